"""What the tests of both dense tasks share: the programs with tiny flags, and how they evaluate."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from downstream.detection import main_detection
from downstream.segmentation import main_segmentation
from tests.downstream.detection.coco import write_coco
from tests.downstream.segmentation.pairs import write_pairs
from tests.runs import Program, evaluation, refused
from tests.warm import run_by_torchrun


@dataclass(frozen=True)
class Dense(Program):
    """A program with the flags of a run of a few iterations. write: its data. measure, picture: of an evaluation."""

    path: str
    write: Callable[..., Path]
    measure: str
    picture: str

    def also(self, flags):
        return replace(self, flags=f"{self.flags} {flags}")

    def evaluate(self, data_path, path, *flags):
        return self.module.main(evaluation(path, data_path, *flags))

    def refuses_to_evaluate(self, capsys, data_path, path, *flags, code=2):
        return refused(capsys, self.module.main, *evaluation(path, data_path, *flags), code=code)

    def in_two_processes(self, *words):
        code, out = run_by_torchrun(self.path, *words)
        assert code == 0, out[-3000:]
        return out


def write_stripes(root, number=9):
    """Training pairs, and six of several sizes to evaluate on."""
    write_pairs(root, number)
    write_pairs(root, 5, "validation", size=(31, 37))
    return write_pairs(root, 1, "validation/wide", size=(70, 20))


def write_shapes(root, number=9):
    """Training images, and five to evaluate on."""
    write_coco(root, "train", number)
    return write_coco(root, "val", 5, seed=1)


TINY = "--model vit_micro_patch4 --decoder_channels 8 --total_batch_size 4 --warmup_iters 2 --num_workers 0 "
TINY += "--print_freq 1 --device cpu --save_steps 4 --num_iters 6 --eval_every 4"
segment = Dense(
    main_segmentation,
    f"{TINY} --input_size 16 --image_scale 64 24 --stride 10 --num_classes 3",
    "downstream/segmentation/main_segmentation.py",
    write_stripes,
    "val_miou",
    "predictions.png",
)
segment_linear = replace(segment, flags=segment.flags.replace("--decoder_channels 8", "--head linear"))
detect = Dense(
    main_detection,
    f"{TINY} --input_size 32 --window_size 4 --num_rois 64 --scale_range 0.8 1.2 --lr 1e-3",
    "downstream/detection/main_detection.py",
    write_shapes,
    "val_box_ap",
    "detections.png",
)
