"""The published test sets: ImageNet itself, -A, -R, -Sketch and -C."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A published test set. restricted: predictions are chosen from the classes of the set, as its authors do."""

    title: str
    num_images: int  # of each corruption and severity, for ImageNet-C
    num_classes: int
    restricted: bool = False


# In the table's order; the names are the flags'.
BENCHMARKS = {
    "imagenet": Benchmark("ImageNet", 50_000, 1000),
    "imagenet_a": Benchmark("ImageNet-A", 7_500, 200, restricted=True),
    "imagenet_r": Benchmark("ImageNet-R", 30_000, 200, restricted=True),
    "imagenet_sketch": Benchmark("ImageNet-Sketch", 50_889, 1000),
    "imagenet_c": Benchmark("ImageNet-C", 50_000, 1000),
}
