"""Images that grow over training."""

from argparse import Namespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.utils import counters

import main_pretrain
from frameworks.hooks import first_shapes, growth
from frameworks.registry import build_model
from models_mae_pr import MaskedAutoencoderViT
from models_vit import MICRO
from prmim import TokenCounts
from tests.runs import assert_same_state, pretrain, reports
from tests.test_framework_contract import compile_parts
from util.data import loader
from util.pos_embed import resize_pos_embed

SMALL = {**MICRO, "decoder_embed_dim": 32, "decoder_depth": 2}
GROW = ("--grow_size", "16:0.34", "24:0.67", "32", "--epochs", 3, "--throw_ratio", 0.25)


def test_stages_end_with_whole_epochs():
    stages = growth.parse_stages(["128:0.5", "160:0.8", "224"], 100)
    assert stages == [
        growth.Stage(128, 50),
        growth.Stage(160, 80),
        growth.Stage(224, 100),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("128:0.5", "the last side of --grow_size lasts to the end and has no share, got '128:0.5'"),
        ("128 224", "takes sides with shares, such as 128:0.5 224, got '128'"),
        ("128:x 224", "got '128:x'"),
        ("128:inf 224", "got '128:inf'"),
        ("128:0.5 160:0.5 224", "160:0.5: epoch 50 must lie behind epoch 50 and before epoch 100"),
        ("128:1 224", "128:1: epoch 100 must lie behind epoch 0"),
        ("128:0.001 224", "128:0.001: epoch 0 must lie behind epoch 0"),
    ],
)
def test_impossible_stages_are_refused(words, message):
    with pytest.raises(ValueError, match="--grow_size") as refusal:
        growth.parse_stages(words.split(), 100)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model simmim_vit_micro_patch4 --grow_size 16:0.5 32", "--grow_size needs a model of MAE or MFF"),
        ("--grow_size 16:0.5 24", "--grow_size must end with the model's 32 x 32 px, got 24"),
        ("--grow_size 4:0.5 32", "--mask_ratio 0.75 leaves none of 1 token visible"),
        ("--grow_size 18:0.5 32", "18 x 18 is not divisible by --patch_size 4"),
        ("--grow_size 8:0.5 32 --mask_unit 4", "--mask_unit must divide the grid of 2 x 2 tokens, got 4"),
        ("--grow_size 16:0.5 32 --sampling attention --attention_start 1 --attention_every 1", "cannot be combined"),
    ],
)
def test_growth_that_does_not_fit_is_refused(photos, tmp_path, capsys, flags, message):
    said = pretrain.refused(capsys, photos, tmp_path / "out", "--epochs", 4, *flags.split())
    assert message in said


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("throw_ratio", [0.0, 0.25])
def test_a_smaller_size_is_the_model_that_was_built_for_it(learned, throw_ratio):
    """With the same weights, and tables that are resized once; also the gradients, in float64."""
    torch.manual_seed(0)
    options = SMALL | dict(throw_ratio=throw_ratio, learned_pos_embed=learned)
    model = MaskedAutoencoderViT(**options).double()
    small = MaskedAutoencoderViT(**options | dict(img_size=16)).double()
    weights = model.state_dict()
    for name in ("pos_embed", "decoder.pos_embed"):
        weights[name] = resize_pos_embed(weights[name], (8, 8), (4, 4)).double()
    small.load_state_dict(weights)
    model.set_image_size((16, 16))
    assert model.counts == small.counts == TokenCounts.from_ratios(16, 0.75, throw_ratio)
    ids_shuffle = torch.rand(4, 16).argsort(dim=1)
    imgs = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    losses = []
    for each in (model, small):
        loss = each(imgs, ids_shuffle)["pixel"]
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # the tables are resized in float32
    for name, ours in model.named_parameters():
        theirs = small.get_parameter(name)
        if "pos_embed" not in name and ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert (model.pos_embed.grad is not None) == learned  # the table of the model's own size learns
    model.set_image_size((32, 32))
    assert model.patch_positions.shape == (1, 64, model.embed_dim)


def test_a_run_sees_images_that_grow_and_resumes_in_any_stage_exactly(photos, tmp_path, monkeypatch):
    seen = []
    forward = MaskedAutoencoderViT.forward

    def note(model, imgs, ids_shuffle):
        assert imgs.shape[2] == imgs.shape[3]
        seen.append((imgs.shape[2], ids_shuffle.shape[1]))
        return forward(model, imgs, ids_shuffle)

    monkeypatch.setattr(MaskedAutoencoderViT, "forward", note)
    whole = pretrain(photos, tmp_path / "whole", *GROW)
    sizes = [(16, 16), (24, 36), (32, 64)]
    assert seen[:3] == sizes  # each is run once before the first step
    assert seen[3:] == [size for size in sizes for _ in range(3)]
    for stop in (2, 3, 7):
        pretrain(photos, tmp_path / f"{stop}", *GROW, "--max_steps", stop)
        seen.clear()
        resumed = pretrain(photos, tmp_path / f"{stop}", *GROW)
        assert_same_state(resumed, whole)
        remaining = sizes[stop // 3 :]
        assert seen[: len(remaining)] == remaining
    epochs = [report["epoch"] for report in reports(tmp_path / "whole")]
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert "epochs 1 to 1: images of 24 px, 9 visible" in (tmp_path / "whole" / "log.txt").read_text()


def test_pictures_and_nearest_neighbours_are_made_in_every_stage(labelled, tmp_path, capsys):
    pretrain(labelled, tmp_path, *GROW, "--picture_every", 1, "--knn_every", 1)
    evaluations = [report for report in reports(tmp_path) if "knn_top1" in report]
    assert [report["step"] for report in evaluations] == [0, 3, 6, 9]
    assert [report["image_side"] for report in evaluations] == [16, 16, 24, 32]
    assert "before training; images of 16 px" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    pictures = events.Images("reconstruction")
    assert [event.step for event in pictures] == [3, 6, 9]
    heights = [event.height for event in pictures]
    assert heights[0] < heights[1] < heights[2]


@pytest.mark.parametrize("flags", ["--nodata 0", "--nodata 0 --optimizer muon --total_batch_size 4 --batch_size 2"])
def test_growth_goes_with_invalid_pixels_muon_and_accumulation(photos, tmp_path, flags):
    """The side of a stage need not be a whole number of the tokens of another."""
    grow = f"--input_size 28 --grow_size 20:0.34 24:0.67 28 --epochs 3 {flags}".split()
    whole = pretrain(photos, tmp_path / "whole", *grow)
    pretrain(photos, tmp_path / "parts", *grow, "--max_steps", 5)
    resumed = pretrain(photos, tmp_path / "parts", *grow)
    assert_same_state(resumed, whole)
    for report in reports(tmp_path / "whole"):
        assert report["loss"] is not None


def test_a_last_stage_for_which_memory_is_too_small_ends_the_run_at_its_start(photos, tmp_path, capsys, monkeypatch):
    batch = 4 * 3 * 32 * 32  # bytes
    monkeypatch.setattr(loader, "free_bytes", lambda: batch - 1)
    message = pretrain.refused(capsys, photos, tmp_path, *GROW, "--batch_size", 4, "--num_workers", 1)
    assert "one batch of each worker takes 0.0 MB" in message
    assert not (tmp_path / "log.jsonl").exists()


def test_a_run_that_has_more_than_its_schedule_behind_it_is_finished(photos, tmp_path):
    pretrain(photos, tmp_path, *GROW)
    shorter = (*GROW, "--grow_size", "16:0.5", "32", "--epochs", 2)  # later flags win
    content = pretrain(photos, tmp_path, *shorter, "--allow_changes")
    assert content["meta"]["step"] == 9


@pytest.mark.parametrize(
    ("step", "side"),
    [
        (0, 16),
        (3, 16),
        (4, 24),
        (6, 24),
        (7, 32),
        (9, 32),
    ],
)
def test_an_evaluation_that_is_still_due_sees_the_size_of_the_step_before_it(step, side):
    """A start begins with what an earlier one has not done after its last step."""
    args = Namespace(grow_size=["16:0.34", "24:0.67", "32"], epochs=3)
    model = MaskedAutoencoderViT(**SMALL)
    training = Namespace(args=args, loop=Namespace(step=step, steps_per_epoch=3))
    growth.GrowingSize(training, model, loader=None, augmentation_for=None)
    assert model.img_size == (side, side)


def test_a_size_is_compiled_once():
    torch._dynamo.reset()
    counters.clear()
    _, args = main_pretrain.parse_args(["--model", "mae_vit_micro_patch4", "--throw_ratio", "0.25"])
    model = build_model(vars(args))
    compile_parts(model)
    num_graphs = []
    for side in (16, 24, 32, 32, 24, 16):
        model.set_image_size((side, side))
        imgs = torch.randn(2, 3, side, side)
        ids_shuffle = torch.rand(2, (side // 4) ** 2).argsort(dim=1)
        model(imgs, ids_shuffle)["pixel"].backward()
        num_graphs.append(counters["stats"]["unique_graphs"])
    first = num_graphs[0]
    assert num_graphs[1] == 2 * first
    assert set(num_graphs[2:]) == {3 * first}


OPTIMIZERS = next(action.choices for action in main_pretrain.get_args_parser()._actions if action.dest == "optimizer")


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", ["mae_vit_micro_patch4", "mff_vit_micro_patch4"])
def test_the_trial_of_the_sizes_leaves_room_for_the_state_of_the_first_step(name, optimizer_name):
    _, args = main_pretrain.parse_args(["--model", name, "--optimizer", optimizer_name])
    model = build_model(vars(args))
    optimizer = main_pretrain.make_optimizer(model, args, lr=1e-3)
    num_bytes = sum(tensor.nbytes for tensor in first_shapes.room_for_state(optimizer))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    used = 0
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.ndim > 0:
                used += value.nbytes
    assert num_bytes == used > 0
    assert first_shapes.room_for_state(optimizer) == []
