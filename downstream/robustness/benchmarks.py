"""The published test sets: ImageNet itself, -A, -R, -Sketch and -C."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A published test set. restricted: predictions are chosen from the classes of the set, as its authors do."""

    title: str
    num_images: int  # of each corruption and severity, for ImageNet-C
    num_classes: int
    protocol: str
    restricted: bool = False


RESTRICTED = "top-1, logits restricted to the set's classes"
# In the table's order; the names are the flags'.
BENCHMARKS = {
    "imagenet": Benchmark("ImageNet", 50_000, 1000, "top-1 on the validation set"),
    "imagenet_a": Benchmark("ImageNet-A", 7_500, 200, RESTRICTED, restricted=True),
    "imagenet_r": Benchmark("ImageNet-R", 30_000, 200, RESTRICTED, restricted=True),
    "imagenet_sketch": Benchmark("ImageNet-Sketch", 50_889, 1000, "top-1 among all classes"),
    "imagenet_c": Benchmark(
        "ImageNet-C", 50_000, 1000, "mCE: errors relative to AlexNet's, 15 corruptions x 5 severities"
    ),
}
