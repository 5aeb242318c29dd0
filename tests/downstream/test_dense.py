"""What holds for the programs of both dense tasks: results, resume, several processes, bands, bad flags, schedules."""

import sys

import pytest
import torch

from downstream.common import LinearDecay, StepDecay
from models_vit import MICRO, VisionTransformer
from tests.downstream.bands import write_bands
from tests.downstream.dense import detect, segment
from tests.runs import assert_same_state, reports, reports_without_times, state
from tests.two_processes import run_in_two_processes
from util.evaluate.results import RESULTS
from util.run.files.checkpoint import save_checkpoint
from util.run.files.json_files import read_json

LOSSES = {"val_miou": ("decode", "aux"), "val_box_ap": ("objectness", "rpn_box", "class", "box", "mask")}
NUM_IMAGES = {"val_miou": 6, "val_box_ap": 5}  # to evaluate on
DROP_PATH = ("--drop_path", 0.3)


def scores_of(report):
    """The scores in a report of the log, as `evaluate` returns them."""
    return {name.removeprefix("val_"): value for name, value in report.items() if name.startswith("val_")}


def test_a_run_reports_losses_and_scores(dense):
    program, _, folder = dense
    between, last = [report for report in reports(folder) if program.measure in report]
    assert (between["step"], last["step"]) == (4, 6)
    assert between["val_num_images"] == last["val_num_images"] == NUM_IMAGES[program.measure]
    assert read_json(folder / RESULTS)["last"] == last
    assert (folder / program.picture).exists()
    for report in reports(folder):
        if "loss" in report:
            parts = [report[f"loss_{name}"] for name in LOSSES[program.measure]]
            assert report["loss"] == pytest.approx(sum(parts))
    meta = state(folder)["meta"]
    assert meta["epoch"] == meta["settings"]["epochs"] == 3


def test_a_checkpoint_alone_gives_the_scores_of_its_run(dense):
    program, data, folder = dense
    scores = program.evaluate(data, folder)
    expected = scores_of(read_json(folder / RESULTS)["last"])
    assert {name: scores[name] for name in expected} == expected


def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(dense, encoder, tmp_path):
    """With drop path, dropout and BatchNorm, or sampled boxes; stopped inside an epoch, after an evaluation."""
    program, data, folder = dense
    flags = ["--finetune", encoder, *DROP_PATH]
    program(data, tmp_path, *flags, "--max_steps", 5, "--num_workers", 1)
    assert_same_state(program(data, tmp_path, *flags), state(folder))
    assert reports_without_times(tmp_path) == reports_without_times(folder)


def test_an_evaluation_in_two_processes_is_that_of_one(dense, tmp_path):
    """Its folder is one of its own."""
    program, data, folder = dense
    words = ["--eval", "--resume", folder, "--data_path", data, "--device", "cpu", "--num_workers", 0]
    program.in_two_processes(*map(str, words), "--output_dir", tmp_path)
    expected = read_json(folder / RESULTS)
    results = read_json(tmp_path / RESULTS)
    assert scores_of(results["last"]) == scores_of(expected["last"])
    assert results["details"] == expected["details"]
    assert (tmp_path / program.picture).exists()


def open_and_watch(rank, path, root):
    """Opens the training images. Returns (their names, the files below `root` that were opened)."""
    opened = []

    def note(event, arguments):
        if event == "open" and str(arguments[0]).startswith(str(root)):
            opened.append(arguments[0])

    program = {segment.path: segment, detect.path: detect}[path]
    _, args = program.module.parse_args(program.command(root, "nowhere"))
    sys.addaudithook(note)  # of this child process
    images = program.module.open_split(args, "train")
    return images.names.tolist(), list(opened)


def test_rank_0_alone_reads_the_headers_of_a_shared_folder(dense):
    program, data, _ = dense
    (names, opened), (received, opened_by_other) = run_in_two_processes(open_and_watch, program.path, data)
    assert received == names
    assert len(opened) >= len(names)
    assert not opened_by_other


def test_an_evaluation_never_replaces_the_results_of_a_run(dense, capsys):
    program, data, folder = dense
    before = (folder / RESULTS).read_bytes()
    assert "--output_dir" in program.refuses_to_evaluate(capsys, data, folder, "--output_dir", folder)
    assert (folder / RESULTS).read_bytes() == before


def test_a_short_run_that_diverges_is_no_result(dense, tmp_path, capsys):
    program, data, _ = dense
    program.refused(capsys, data, tmp_path, "--num_iters", 8, "--eval_every", 4, "--lr", 1e10, code=3)


@pytest.fixture(params=["segmentation", "detection"])
def with_bands(request, tmp_path):
    """(program, a data set of five bands)."""
    if request.param == "segmentation":
        return segment, write_bands(segment.write(tmp_path / "data", 4), ".npy")
    pytest.importorskip("faster_coco_eval")
    return detect, write_bands(detect.write(tmp_path / "data", 4), ".tif")


def test_bands_are_normalised_as_the_pre_trained_encoder_s_images_were(with_bands, tmp_path):
    """Evaluation takes this from the checkpoint."""
    program, root = with_bands
    statistics = {"mean": [0.05, 0.1, 0.2, 0.3, 0.5], "std": [0.03, 0.06, 0.1, 0.2, 0.3]}
    weights = {"model": VisionTransformer(global_pool="token", in_chans=5, **MICRO).state_dict()}
    meta = {"settings": {**statistics, "model": "mae_vit_micro_patch4"}, "pixels": "uint16"}
    path = save_checkpoint(tmp_path, 1, weights, meta)
    out = tmp_path / "out"
    trained = program(root, out, "--in_chans", 5, "--finetune", path, "--num_iters", 4)["meta"]
    assert {name: trained["settings"][name] for name in statistics} == statistics
    assert trained["pixels"] == "uint16"
    last = scores_of(read_json(out / RESULTS)["last"])
    scores = program.evaluate(root, out)
    assert {name: scores[name] for name in last} == last


def test_rgb_weights_start_bands(with_bands, tmp_path, capsys):
    program, root = with_bands
    weights = VisionTransformer(global_pool="token", **MICRO).state_dict()
    torch.save({"model": weights}, tmp_path / "rgb.pth")
    flags = ["--in_chans", 5, "--finetune", tmp_path / "rgb.pth", "--num_iters", 4]
    assert "--rgb_bands" in program.refused(capsys, root, tmp_path / "out", *flags)
    begun = program(root, tmp_path / "out", *flags, "--rgb_bands", 3, 2, 1, "--lr", 0, "--weight_decay", 0)["model"]
    kernel = begun["backbone.patch_embed.proj.weight"]
    assert torch.equal(kernel[:, [3, 2, 1]], weights["patch_embed.proj.weight"])
    assert not kernel[:, [0, 4]].any()


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "flags",
    ["--warmup_iters 7", "--layer_decay 0", "--drop_path 1", "--compile", "--finetune nowhere.pth", "--recipe cocoa"],
)
def test_bad_flags_are_refused_before_training(dense, tmp_path, capsys, flags):
    program, data, _ = dense
    flag, *values = flags.split()
    message = program.refused(capsys, data, tmp_path, flag, *values)
    assert flag.strip("-") in message or values[-1] in message
    assert not list(tmp_path.rglob("checkpoint*"))


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1e-10),
        (750, 1e-4 * (1 - 750 / 160_000) * (1e-6 + (1 - 1e-6) / 2)),
        (1500, 1e-4 * (1 - 1500 / 160_000)),
        (159_999, 1e-4 / 160_000),
    ],
)
def test_the_rate_falls_linearly_after_a_warm_up(step, expected):
    rate = LinearDecay(num_iters=160_000, warmup_iters=1500, lr=1e-4)
    assert rate(step) == pytest.approx(expected)


def test_the_linear_rate_is_scaled_and_ends_at_its_least_value():
    assert LinearDecay(num_iters=10, warmup_iters=0, lr=1.0)(5, lr_scale=0.75) == 0.375


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 5e-8),
        (125, 5e-5 * (0.001 + 0.999 / 2)),
        (250, 5e-5),
        (327_777, 5e-5),
        (327_778, 5e-6),
        (355_091, 5e-6),
        (355_092, 5e-7),
        (368_749, 5e-7),
    ],
)
def test_the_rate_drops_as_in_detectron2(step, expected):
    rate = StepDecay(num_iters=368_750, warmup_iters=250, lr=5e-5, drops=(163_889 / 184_375, 177_546 / 184_375))
    assert rate(step) == pytest.approx(expected)
    assert rate(step, lr_scale=0.7) == pytest.approx(0.7 * expected)
