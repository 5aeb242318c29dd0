"""What holds for the programs of both dense tasks: results, resume, several processes, other files, bad flags."""

import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from downstream.common import LinearDecay, StepDecay
from models_vit import MICRO, VisionTransformer
from tests.downstream.bands import bands, write_array, write_bands
from tests.downstream.dense import detect, segment, segment_linear
from tests.runs import assert_same_state, reports, state
from util.data import loader
from util.data.pixel_format import read_header
from util.evaluate.evaluator import Evaluator
from util.evaluate.results import RESULTS
from util.run.checkpoint import newest_checkpoint, save_checkpoint
from util.run.folder import read_json

LOSSES = {segment.measure: ("decode", "aux"), "val_box_ap": ("objectness", "rpn_box", "class", "box", "mask")}


def steady(output_dir):
    """The log without what depends on the time."""
    odd = ("seconds_per_step", "images_per_s", "data_share")
    return [{name: value for name, value in report.items() if name not in odd} for report in reports(output_dir)]


def test_a_run_is_evaluated_between_and_at_its_end(dense, encoder, capsys):
    program, data, folder = dense
    evaluated = [r for r in reports(folder) if program.measure in r]
    number = 6 if program is segment else 5
    assert [(r["step"], r["val_num_images"]) for r in evaluated] == [(4, number), (6, number)]
    results = read_json(folder / RESULTS)
    assert results["last"] == evaluated[1] and results["encoder"]["path"] == str(encoder)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images(program.picture.removesuffix(".png"))] == [4, 6]
    losses = [r for r in reports(folder) if "loss" in r]
    names = [f"loss_{name}" for name in LOSSES[program.measure]]
    assert [r["loss"] for r in losses] == pytest.approx([sum(r[name] for name in names) for r in losses])
    assert state(folder)["meta"]["epoch"] == state(folder)["meta"]["settings"]["epochs"] == 3
    text = (folder / "log.txt").read_text()
    assert "encoder from" in text and f"pictures     {folder / program.picture}" in text
    # The checkpoint alone gives the same scores, and takes no other flag.
    scores = program.evaluate(data, folder)
    expected = {name.removeprefix("val_"): value for name, value in evaluated[1].items() if name.startswith("val_")}
    assert {name: scores[name] for name in expected} == expected
    before = [path.stat().st_mtime_ns for path in sorted(folder.glob("checkpoint*"))]
    program(data, folder, "--finetune", encoder, "--drop_path", 0.3)  # a finished run only says what it has done
    assert f"iteration 6: {program.module.describe_scores(scores)}" in capsys.readouterr().out
    assert len(reports(folder)) == len(losses) + 2
    assert before == [path.stat().st_mtime_ns for path in sorted(folder.glob("checkpoint*"))]


def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(dense, encoder, tmp_path):
    """With drop path, dropout and BatchNorm, or sampled boxes; stopped inside an epoch and at an evaluation."""
    program, data, folder = dense
    flags = ["--finetune", encoder, "--drop_path", 0.3]
    for stop in (1, 4, 5):
        program(data, tmp_path, *flags, "--max_steps", stop, "--num_workers", 1)
    assert_same_state(program(data, tmp_path, *flags), state(folder))
    assert steady(tmp_path) == steady(folder)


def test_a_resumed_linear_head_is_the_undisturbed_one(striped, encoder, tmp_path):
    expected = segment_linear(striped, tmp_path / "whole", "--finetune", encoder)
    for stop in (1, 4):
        segment_linear(striped, tmp_path / "parts", "--finetune", encoder, "--max_steps", stop)
    assert_same_state(segment_linear(striped, tmp_path / "parts", "--finetune", encoder), expected)
    assert steady(tmp_path / "parts") == steady(tmp_path / "whole")


def test_a_run_killed_in_its_evaluation_makes_up_for_it(striped, segmented, encoder, tmp_path, monkeypatch):
    def killed(self):
        raise KeyboardInterrupt

    flags = ["--finetune", encoder, "--drop_path", 0.3]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Evaluator, "perform", killed)
        segment(striped, tmp_path, *flags)
    assert newest_checkpoint(tmp_path)[0].name == "checkpoint-4.pth"
    assert_same_state(segment(striped, tmp_path, *flags), state(segmented))
    assert steady(tmp_path) == steady(segmented)
    (tmp_path / RESULTS).unlink()
    segment(striped, tmp_path, *flags)
    assert read_json(tmp_path / RESULTS)["details"] == read_json(segmented / RESULTS)["details"]


def test_an_evaluation_in_two_processes_is_that_of_one(dense, tmp_path, capsys):
    """Its folder is one of its own."""
    program, data, folder = dense
    words = ["--eval", "--resume", folder, "--data_path", data, "--device", "cpu", "--num_workers", 0]
    out = program.in_two_processes(*map(str, words), "--output_dir", tmp_path / "scores")
    expected, found = read_json(folder / RESULTS), read_json(tmp_path / "scores" / RESULTS)
    assert found["last"] == {name: value for name, value in expected["last"].items() if name != "epoch"}
    assert found["details"] == expected["details"] and found["checkpoint"] == str(folder)
    scores = {name.removeprefix("val_"): value for name, value in found["last"].items()}
    assert program.module.describe_scores(scores) in out and (tmp_path / "scores" / program.picture).exists()
    before = {path: path.read_bytes() for path in folder.glob("*.*") if path.is_file()}
    message = program.refuses_to_evaluate(capsys, data, folder, "--output_dir", folder)
    assert "holds a run, whose results --eval would replace" in message
    (tmp_path / "file").write_text("x")
    message = program.refuses_to_evaluate(capsys, data, folder, "--output_dir", tmp_path / "file")
    assert "cannot be written to" in message
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("--shard",), "--eval does not support --shard: leave it out"),
        (("--batch_size", 0), "--batch_size must be at least 1, got 0"),
    ],
)
def test_an_evaluation_refuses_flags_that_it_cannot_follow(dense, capsys, flag, message):
    program, data, folder = dense
    assert message in program.refuses_to_evaluate(capsys, data, folder, *flag)


def test_an_evaluation_is_refused_if_its_images_do_not_fit_into_shared_memory(dense, capsys, monkeypatch):
    program, data, folder = dense
    monkeypatch.setattr(loader, "free_bytes", lambda: 1000)
    message = program.refuses_to_evaluate(capsys, data, folder, "--num_workers", 1)
    assert "/dev/shm has 0.0 MB free" in message and message.strip().endswith("or --num_workers 0")


def test_other_data_is_named_once_on_resume(dense, encoder, tmp_path, capsys):
    """The number of epochs, and the categories of detection, follow from the data: they are no changes of their own."""
    program, data, _ = dense
    program(data, tmp_path / "out", "--max_steps", 1)
    message = program.refused(capsys, program.write(tmp_path / "more", 13), tmp_path / "out")
    assert "the data had 9 images" in message and "epochs" not in message


@pytest.mark.fault("F48", "a run that ends after fewer than 20 steps that are not finite", "exit code 3, no result")
def test_a_short_run_that_diverges_is_no_result(dense, tmp_path, capsys):
    program, data, _ = dense
    message = program.refused(capsys, data, tmp_path, "--num_iters", 8, "--eval_every", 4, "--lr", 1e10, code=3)
    assert "not finite" in message and "checkpoint" in message


@pytest.mark.parametrize(
    ("program", "suffix"), [(segment, ".npy"), (detect, ".tif")], ids=["segmentation", "detection"]
)
def test_five_bands_of_16_bits(tmp_path, capsys, program, suffix):
    """They are normalised as the pre-trained encoder's images were; evaluation takes this from the checkpoint."""
    if program is detect:
        pytest.importorskip("faster_coco_eval")
    root = write_bands(program.write(tmp_path / "data", 4), suffix)
    statistics = {"mean": [0.05, 0.1, 0.2, 0.3, 0.5], "std": [0.03, 0.06, 0.1, 0.2, 0.3]}
    weights = {"model": VisionTransformer(global_pool="token", in_chans=5, **MICRO).state_dict()}
    meta = {"settings": statistics | {"model": "mae_vit_micro_patch4"}, "pixels": "uint16"}
    path = save_checkpoint(tmp_path, 1, weights, meta)
    content = program(root, tmp_path / "out", "--in_chans", 5, "--finetune", path, "--num_iters", 4)
    assert {name: content["meta"]["settings"][name] for name in statistics} == statistics
    assert content["meta"]["pixels"] == "uint16" and (tmp_path / "out" / program.picture).exists()
    if program is segment:
        log = (tmp_path / "out" / "log.txt").read_text()
        assert "--photometric is not applied, because the images have 5 channels of uint16" in log
    last = read_json(tmp_path / "out" / RESULTS)["last"]
    assert program.evaluate(root, tmp_path / "out")[program.measure.removeprefix("val_")] == last[program.measure]
    message = program.refuses_to_evaluate(capsys, root, tmp_path / "out", "--in_chans", 3)
    assert "--in_chans 3, but the model at" in message and "has 5: leave it out" in message
    lacking = min(root.rglob(f"*1{suffix}"))  # of the training images
    height, width = read_header(lacking, 5)[1]
    write_array(lacking, bands(1, size=(width, height))[..., :4])
    message = program.refused(capsys, root, tmp_path / "new", "--in_chans", 5)
    expected = f"{str(lacking)!r} has 4 channels of uint16, but the model takes 5 channels (--in_chans in training)"
    assert f"{expected}, as '" in message and "has: a band is missing" in message


def test_another_head_or_encoder_is_refused(dense, encoder, tmp_path, capsys):
    program, data, folder = dense
    assert "--lr was " in program.refused(capsys, data, folder, "--finetune", encoder, "--drop_path", 0.3, "--lr", 0.5)
    message = program.refuses_to_evaluate(capsys, data, folder, "--decoder_channels", 5)
    assert "--decoder_channels 5, but the model at" in message and "has 8: leave it out" in message
    message = program.refuses_to_evaluate(capsys, data, encoder)
    assert re.search("holds no (segmentation model|detector) of this program", message)


@pytest.mark.fault("U81", "flags of a dense task that cannot work", "exit code 2, with the value and what is right")
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--patch_size 0", "--patch_size must be at least 1, got 0"),
        ("--warmup_iters 7", "--warmup_iters 7 must lie between 0 and --num_iters 6"),
        ("--layer_decay 0", "--layer_decay must lie in (0, 1], got 0.0"),
        ("--drop_path 2", "--drop_path must be at most 1, got 2.0"),
        ("--total_batch_size 10", "the data set has 9 images, fewer than one total batch of 10"),
        ("--compile", "--compile is not for "),
        ("--data_path nowhere", "nowhere"),
        ("--finetune nowhere.pth", "'nowhere.pth' does not exist"),
        ("--resume none --eval", "--eval needs --resume"),
        ("--recipe cocoa", "(`list` names all)"),
    ],
)
def test_bad_flags_are_refused_before_training(dense, tmp_path, capsys, flags, message):
    program, data, _ = dense
    assert message in program.refused(capsys, data, tmp_path, *flags.split())
    assert not list(tmp_path.rglob("checkpoint*"))


def test_the_rate_falls_linearly_after_a_warm_up():
    rate = LinearDecay(num_iters=160_000, warmup_iters=1500, lr=1e-4)
    assert rate(0) == pytest.approx(1e-10) and rate(159_999) == pytest.approx(1e-4 / 160_000)
    assert rate(750) == pytest.approx(1e-4 * (1 - 750 / 160_000) * (1e-6 + (1 - 1e-6) / 2))
    assert rate(1500) == pytest.approx(1e-4 * (1 - 1500 / 160_000)) and rate(80_000, 0.75) == pytest.approx(0.375e-4)
    assert LinearDecay(10, 0, 1.0, min_lr=0.5)(5) == 0.75


def test_the_rate_drops_as_in_detectron2():
    schedule = StepDecay(368_750, 250, 5e-5, (163_889 / 184_375, 177_546 / 184_375))
    assert schedule(0) == pytest.approx(5e-8) and schedule(125) == pytest.approx(5e-5 * (0.001 + 0.999 / 2))
    assert schedule(250) == schedule(327_777) == 5e-5 and schedule(250, 0.7) == pytest.approx(3.5e-5)
    assert schedule(327_778) == schedule(355_091) == pytest.approx(5e-6)
    assert schedule(355_092) == schedule(368_749) == pytest.approx(5e-7)
