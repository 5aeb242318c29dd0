"""What holds for the programs of both dense tasks: results, resume, several processes, other files, bad flags."""

import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from downstream.common import LinearDecay, StepDecay, schedule_by_iterations
from downstream.detection import main_detection
from downstream.segmentation import main_segmentation
from encoders.load import load_encoder
from models_vit import MICRO, VisionTransformer
from scripts import export
from tests.downstream.bands import bands, write_array, write_bands
from tests.downstream.dense import detect, segment, segment_linear
from tests.runs import assert_same_state, refused, reports, reports_without_times, state
from util.data.pixel_format import read_header
from util.evaluate.evaluator import Evaluator
from util.evaluate.results import RESULTS
from util.run.files.checkpoint import save_checkpoint
from util.run.files.record import CheckpointError
from util.run.files.reports import read_json
from util.run.files.search import newest_checkpoint
from util.run.processes.distributed import Process
from util.run.start.plan import make_plan

LOSSES = {"val_miou": ("decode", "aux"), "val_box_ap": ("objectness", "rpn_box", "class", "box", "mask")}
NUM_IMAGES = {"val_miou": 6, "val_box_ap": 5}  # to evaluate on
DROP_PATH = ("--drop_path", 0.3)


def scores_of(report):
    """The scores in a report of the log, as `evaluate` returns them."""
    return {name.removeprefix("val_"): value for name, value in report.items() if name.startswith("val_")}


def evaluations(program, folder):
    return [report for report in reports(folder) if program.measure in report]


def test_a_run_is_evaluated_between_and_at_its_end(dense):
    program, _, folder = dense
    between, last = evaluations(program, folder)
    assert (between["step"], last["step"]) == (4, 6)
    assert between["val_num_images"] == last["val_num_images"] == NUM_IMAGES[program.measure]
    assert read_json(folder / RESULTS)["last"] == last
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images(program.picture.removesuffix(".png"))] == [4, 6]
    assert (folder / program.picture).exists()


def test_the_loss_is_the_sum_of_its_parts(dense):
    program, _, folder = dense
    for report in reports(folder):
        if "loss" in report:
            parts = [report[f"loss_{name}"] for name in LOSSES[program.measure]]
            assert report["loss"] == pytest.approx(sum(parts))


def test_iterations_are_counted_in_epochs_too(dense):
    _, _, folder = dense
    meta = state(folder)["meta"]
    assert meta["epoch"] == meta["settings"]["epochs"] == 3


def test_a_checkpoint_alone_gives_the_scores_of_its_run(dense):
    program, data, folder = dense
    scores = program.evaluate(data, folder)
    expected = scores_of(evaluations(program, folder)[-1])
    assert {name: scores[name] for name in expected} == expected


def test_a_finished_run_only_says_what_it_has_done(dense, encoder, capsys):
    program, data, folder = dense
    before = reports_without_times(folder)
    changed = [path.stat().st_mtime_ns for path in sorted(folder.glob("checkpoint*"))]
    program(data, folder, "--finetune", encoder, *DROP_PATH)
    line = program.module.describe_scores(scores_of(read_json(folder / RESULTS)["last"]))
    assert f"iteration 6: {line}" in capsys.readouterr().out
    assert reports_without_times(folder) == before
    assert changed == [path.stat().st_mtime_ns for path in sorted(folder.glob("checkpoint*"))]


def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(dense, encoder, tmp_path):
    """With drop path, dropout and BatchNorm, or sampled boxes; stopped inside an epoch, after an evaluation."""
    program, data, folder = dense
    flags = ["--finetune", encoder, *DROP_PATH]
    program(data, tmp_path, *flags, "--max_steps", 5, "--num_workers", 1)
    assert_same_state(program(data, tmp_path, *flags), state(folder))
    assert reports_without_times(tmp_path) == reports_without_times(folder)


def test_a_resumed_linear_head_is_the_undisturbed_one(striped, encoder, tmp_path):
    expected = segment_linear(striped, tmp_path / "whole", "--finetune", encoder)
    segment_linear(striped, tmp_path / "parts", "--finetune", encoder, "--max_steps", 3)
    assert_same_state(segment_linear(striped, tmp_path / "parts", "--finetune", encoder), expected)
    assert reports_without_times(tmp_path / "parts") == reports_without_times(tmp_path / "whole")


def test_a_run_killed_in_its_evaluation_makes_up_for_it(striped, segmented, encoder, tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    flags = ["--finetune", encoder, *DROP_PATH]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Evaluator, "perform", killed)
        segment(striped, tmp_path, *flags)
    newest, _ = newest_checkpoint(tmp_path)
    assert newest.name == "checkpoint-4.pth"
    assert_same_state(segment(striped, tmp_path, *flags), state(segmented))
    assert reports_without_times(tmp_path) == reports_without_times(segmented)


def test_lost_results_are_written_again(striped, encoder, tmp_path):
    flags = ["--finetune", encoder, "--num_iters", 2]
    segment(striped, tmp_path, *flags)
    before = read_json(tmp_path / RESULTS)
    (tmp_path / RESULTS).unlink()
    segment(striped, tmp_path, *flags)
    assert read_json(tmp_path / RESULTS)["details"] == before["details"]


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


def test_an_evaluation_never_replaces_the_results_of_a_run(dense, capsys):
    program, data, folder = dense
    before = (folder / RESULTS).read_bytes()
    message = program.refuses_to_evaluate(capsys, data, folder, "--output_dir", folder)
    assert "holds a run, whose results --eval would replace" in message
    assert (folder / RESULTS).read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--decoder_channels 5", "has 8: leave it out"),
    ],
)
def test_an_evaluation_refuses_flags_that_it_cannot_follow(dense, capsys, flags, message):
    program, data, folder = dense
    assert message in program.refuses_to_evaluate(capsys, data, folder, *flags.split())


def test_an_evaluation_refuses_other_models(dense, encoder, capsys):
    program, data, _ = dense
    message = program.refuses_to_evaluate(capsys, data, encoder)
    assert re.search("holds no (segmentation model|detector) of main_(segmentation|detection).py", message)


def test_an_export_says_what_can_be_done_instead(dense, encoder, tmp_path, capsys):
    program, _, folder = dense
    message = refused(capsys, export.main, folder, "--out", tmp_path / "exported", "--format", "transformers")
    name = program.path.rpartition("/")[2]
    assert f"is a model of {name}, which evaluates it (--eval --resume) and starts other runs from it" in message
    assert "scripts/export.py writes it as a folder for timm" in message
    assert f"The encoder that it started from: {encoder}\n" in message
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=f"is a model of {name}, which evaluates it"):
        load_encoder(VisionTransformer(**MICRO), folder)


def test_other_data_is_named_once_on_resume(dense, tmp_path, capsys):
    """The number of epochs, and the categories of detection, follow from the data: they are no changes of their own."""
    program, data, _ = dense
    program(data, tmp_path / "out", "--max_steps", 1)
    message = program.refused(capsys, program.write(tmp_path / "more", 13), tmp_path / "out")
    assert "the data had 9 images" in message
    assert "epochs" not in message


def test_a_short_run_that_diverges_is_no_result(dense, tmp_path, capsys):
    program, data, _ = dense
    message = program.refused(capsys, data, tmp_path, "--num_iters", 8, "--eval_every", 4, "--lr", 1e10, code=3)
    assert "not finite" in message


# ------------------------------------------------------------------------------------------------ five bands of 16 bits


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


def test_a_missing_band_is_refused_by_the_name_of_its_file(with_bands, tmp_path, capsys):
    program, root = with_bands
    path, *_ = [path for path in sorted(root.rglob("*1.*")) if path.suffix in (".npy", ".tif")]
    height, width = read_header(path, 5)[1]
    write_array(path, bands(1, size=(width, height))[..., :4])
    message = program.refused(capsys, root, tmp_path / "out", "--in_chans", 5)
    assert f"{str(path)!r} has 4 channels of uint16, but the model takes 5 channels" in message
    assert "has: a band is missing" in message


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--warmup_iters 7", "--warmup_iters 7 must lie between 0 and --num_iters 6"),
        ("--layer_decay 0", "--layer_decay must be above 0, got 0.0"),
        ("--drop_path 1", "--drop_path must be below 1, got 1.0"),
        ("--compile", "--compile is not for "),
        ("--finetune nowhere.pth", "'nowhere.pth' does not exist"),
        ("--recipe cocoa", "(`list` names all)"),
    ],
)
def test_bad_flags_are_refused_before_training(dense, tmp_path, capsys, flags, message):
    program, data, _ = dense
    assert message in program.refused(capsys, data, tmp_path, *flags.split())
    assert not list(tmp_path.rglob("checkpoint*"))


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("main", "command", "said"),
    [
        (main_segmentation, "--num_iters 40000", "40000 iterations, 400 epochs of 100 steps, 1500 of warm-up, peak"),
        (main_segmentation, "--num_iters 5009", "500 of warm-up (shortened from 1500 of 160000), peak"),
        (main_segmentation, "--num_iters 8000 --head linear", "800 of warm-up (shortened from 1500 of 40000), peak"),
        (main_segmentation, "--recipe ade20k_linear_vit_base", "1500 of warm-up, peak"),
        (main_segmentation, "--num_iters 1000 --warmup_iters 900", "900 of warm-up, peak"),
        (main_detection, "--num_iters 10000", "250 of warm-up, peak"),
        (main_detection, "--num_iters 1000 --recipe short", "100 of warm-up (shortened from 250 of 88000), peak"),
    ],
)
def test_the_summary_says_whether_the_warm_up_was_shortened(main, command, said):
    parser, args = main.parse_args(command.split())
    plan = make_plan(args, Process(torch.device("cpu")))
    assert said in schedule_by_iterations(parser, args, plan, 100, lambda step: 0.0).summary


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
    assert LinearDecay(num_iters=10, warmup_iters=0, lr=1.0, min_lr=0.5)(5) == 0.75


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
