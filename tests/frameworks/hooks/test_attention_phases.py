"""Attention phases: when maps are made, what is in them, and runs that draw tokens by the newest maps."""

import os
import signal

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import main_pretrain
from frameworks.hooks import attention_phases
from frameworks.hooks.attention_phases import cls_attention, compute_maps, mean_over_heads, refresh_epochs
from models_mae_pr import mae_vit_micro_patch4
from models_vit import ViTEncoder
from prmim import TokenCounts, TokenOrderSampler, addressed_noise
from tests.conftest import read_photo, write_photo
from tests.loops import SilentLog, a_run, a_schedule
from tests.orders import draw_order
from tests.runs import assert_same_state, pretrain, reports, state
from tests.test_models_mae_pr import perturbed
from tests.two_processes import run_in_two_processes
from tests.warm import run_by_torchrun
from util.data.attention_maps import AttentionMaps, Squash, crop_box, maps_path
from util.data.datasets import AddressedDataset, permutation
from util.data.images import FolderImages
from util.data.repeats import RepeatedStepSampler
from util.data.transforms import Normalize, RandomResizedCropFlip
from util.run.files.checkpoint import list_checkpoints
from util.run.train.loop import TrainLoop

# Four epochs of three steps, with new maps after each of the first three.
TEXT = "--model mae_vit_micro_patch4 --epochs 4 --sampling attention --no-progressive --picture_every 0 "
TEXT += "--attention_start 0 --attention_every 1 --blr 0.05 --warmup_epochs 0"
FLAGS = TEXT.split()
SIMMIM = [*FLAGS, "--model", "amt_simmim_vit_micro_patch4", "--mask_ratio", "0.7", "--throw_ratio", "0.26"]
AMT = [*FLAGS, "--model", "amt_vit_micro_patch4", "--mask_ratio", "0.85", "--throw_ratio", "0.4"]

# -------------------------------------------------------------------------------------------------------- schedule


@pytest.mark.parametrize(
    ("epochs", "start", "every", "expected"),
    [
        (400, 40, 40, [40, 80, 120, 160, 200, 240, 280, 320, 360]),  # AMT on MAE
        (200, 40, 40, [40, 80, 120, 160]),  # AMT on SimMIM
        (200, 10, 40, [40, 80, 120, 160]),
        (81, 40, 40, [40]),  # epoch 80 is the last one
        (4, 0, 1, [0, 1, 2]),
        (40, 40, 40, []),
    ],
)
def test_refresh_epochs(epochs, start, every, expected):
    assert refresh_epochs(epochs, start, every) == expected


# ------------------------------------------------------------------------------------------------------------ maps


def test_each_head_is_scaled_and_then_averaged():
    attention = torch.rand(3, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    attention[1, 0] = 0.2  # a head that attends to all tokens alike
    expected = torch.zeros(3, 5, dtype=torch.float64)
    for b in range(3):
        for head in attention[b]:
            spread = head.max() - head.min()
            if spread > 0:
                expected[b] += (head - head.min()) / spread / 2
    assert_close(mean_over_heads(attention), expected)


@torch.no_grad()
@pytest.mark.parametrize("num_cls_tokens", [1, 3])
def test_cls_attention_is_the_softmax_of_the_last_block(num_cls_tokens):
    """From the first class token to the patches."""
    torch.manual_seed(0)
    model = perturbed(
        ViTEncoder(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_cls_tokens=num_cls_tokens)
    )
    last = model.blocks[-1]
    inputs = []
    last.norm1.register_forward_hook(lambda module, args, output: inputs.extend(output))
    imgs = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    found = cls_attention(model, imgs)
    assert found.shape == (2, 3, 16)
    assert found.dtype == torch.float32
    for b in range(2):
        q, k, _ = last.attn.qkv(inputs[b]).chunk(3, dim=1)  # [T, D] each
        for head in range(3):
            span = slice(16 * head, 16 * head + 16)
            logits = k[:, span] @ q[0, span] / 4  # the root of 16 channels
            expected = logits.softmax(dim=0)[num_cls_tokens:]
            assert_close(found[b, head].double(), expected, rtol=1e-5, atol=0)


def a_loop():
    model = torch.nn.Linear(1, 1)
    schedule = a_schedule(None, steps_per_epoch=3, num_steps=9)
    return TrainLoop(a_run(), model, None, schedule, Normalize(), SilentLog(), state={})


@pytest.fixture
def uneven(tmp_path):
    """Seven images of several sizes, of which number 2 is broken."""
    (tmp_path / "uneven").mkdir()
    for i in range(7):
        write_photo(tmp_path / "uneven" / f"{i}.png", size=(36 + 5 * i, 60 - 3 * i), seed=i)
    (tmp_path / "uneven" / "2.png").write_bytes(b"no image")
    return tmp_path / "uneven"


def maps_of(model, folder, num_workers=0):
    """Returns the maps of all images, or None on other ranks than 0."""
    dataset = AddressedDataset(FolderImages(folder), Squash(32), replace=True)
    return compute_maps(model, dataset, a_loop(), batch_size=3, num_workers=num_workers)


def test_attention_that_is_not_finite_is_an_error(uneven):
    model = a_model()
    with torch.no_grad():
        model.blocks[-1].attn.qkv.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="attention of the class token is not finite"):
        maps_of(model, uneven)


def a_model():
    torch.manual_seed(0)
    model = mae_vit_micro_patch4(throw_ratio=0.5)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(3)  # so that attention differs between tokens
    return model


@pytest.mark.parametrize("num_workers", [0, 1])
def test_maps_are_those_of_the_whole_images_one_by_one(uneven, num_workers):
    model = a_model()
    maps = maps_of(model, uneven, num_workers)
    assert model.training
    assert maps.dtype == np.float16
    assert maps.std() > 0.05
    images = FolderImages(uneven)
    normalize = Normalize()
    for i in (0, 1, 3, 4, 5, 6):
        img = Squash(32)(read_photo(images.path(i)))
        with torch.no_grad():
            attention = cls_attention(model, normalize(img[None]))
        expected = mean_over_heads(attention).view(8, 8)
        found = torch.from_numpy(maps[i]).float()
        assert_close(found, expected, atol=1e-3, rtol=0)
    assert np.array_equal(maps[2], maps[3])  # image 2 is broken, and image 3 takes its place


def _maps_in_two_processes(rank, folder):
    model = a_model()
    maps = maps_of(model, folder)
    samples = [(torch.zeros(1), 0, (0, i)) for i in range(2)]
    _, _, ids = model.collator("attention", 0)(samples)
    model(torch.randn(2, 3, 32, 32), ids)["pixel"].backward()  # training goes on
    return {"maps": maps}


def test_two_processes_give_the_maps_of_one(uneven):
    """Four and three images: the last one is computed twice, so that no rank waits for the other."""
    first, second = run_in_two_processes(_maps_in_two_processes, uneven)
    expected = maps_of(a_model(), uneven)
    found = first["maps"].astype(float)
    np.testing.assert_allclose(found, expected.astype(float), atol=1e-3)
    assert second["maps"] is None


# ------------------------------------------------------------------------------------------------------------- runs


def orders_of(monkeypatch):
    """Records the token orders of all micro-batches that a run trains on."""
    taken = []
    exact = TrainLoop.next_batch

    def note(loop, batches, micro):
        batch = exact(loop, batches, micro)
        taken.append(batch[2].clone())
        return batch

    monkeypatch.setattr(TrainLoop, "next_batch", note)
    return taken


def losses_of(folder):
    return [report["loss"] for report in reports(folder)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_draws_by_the_newest_maps(photos, tmp_path, monkeypatch, num_workers):
    """Also if workers prepare batches ahead. The expected orders follow from the files of the maps."""
    taken = orders_of(monkeypatch)
    pretrain(photos, tmp_path / "out", *FLAGS, "--num_workers", num_workers)
    files = [maps_path(tmp_path / "out", epoch) for epoch in range(3)]
    assert len({file.read_bytes() for file in files}) == 3
    assert not maps_path(tmp_path / "out", 3).exists()
    images = FolderImages(photos)
    transform = RandomResizedCropFlip(32, seed=0)
    counts = mae_vit_micro_patch4(throw_ratio=0.5).counts
    assert len(taken) == 12
    for step, found in enumerate(taken):
        epoch = step // 3
        first = step % 3 * 8
        indices = permutation(0, epoch, 24)[first : first + 8].tolist()
        noise = addressed_noise(0, epoch, indices, 64)
        if epoch == 0:
            expected = TokenOrderSampler(8, counts, "random")(noise)
        else:
            boxes = []
            for i in indices:
                array, _ = images.load(i)
                boxes.append((i, crop_box(transform, array.shape[:2], epoch, i)))
            weights = AttentionMaps(files[epoch - 1], 4).token_weights(boxes)
            expected = draw_order(TokenOrderSampler(8, counts, "attention"), noise, weights)
        assert np.array_equal(found.numpy(), expected), step


def test_amt_masks_at_random_until_there_are_maps(photos, tmp_path, monkeypatch, capsys):
    forward = attention_phases.Framework.__call__
    counts = []

    def record(model, *args):
        counts.append(model.counts)
        return forward(model, *args)

    monkeypatch.setattr(attention_phases.Framework, "__call__", record)
    taken = orders_of(monkeypatch)
    pretrain(photos, tmp_path / "out", *AMT)
    assert counts[:3] == [TokenCounts(16, 48, 0)] * 3
    assert counts[3:] == [TokenCounts(10, 28, 26)] * 9
    for ids, count in zip(taken, counts, strict=True):
        assert (ids[:, : count.num_visible].diff(dim=1) > 0).all()
    out = capsys.readouterr().out
    assert "epochs 0 to 0: tokens are drawn at random, 16 visible + 48 retained + 0 thrown" in out
    assert "epochs 3 to 3: tokens are drawn by the attention after epoch 2, 10 visible + 28 retained" in out


REPEATED = [*FLAGS, "--repeat_aug", 4]  # epoch 0, epochs 1 and 2, epoch 3: groups end with their phase


@pytest.mark.parametrize("flags", [FLAGS, AMT, SIMMIM, REPEATED], ids=["attention", "AMT", "AMT on SimMIM", "repeated"])
def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(photos, tmp_path, flags):
    """Stopped in mid-epoch before the first maps, and in the midst of a phase."""
    flags = [*flags, "--attention_every", 2]  # maps after epochs 0 and 2: a phase has two epochs
    expected = pretrain(photos, tmp_path / "whole", *flags)
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 2, "--num_workers", 1)
    pretrain(photos, tmp_path / "parts", *flags, "--max_steps", 8)
    first_maps = maps_path(tmp_path / "parts", 0)
    inode = first_maps.stat().st_ino
    assert_same_state(pretrain(photos, tmp_path / "parts", *flags), expected)
    assert first_maps.stat().st_ino == inode  # not made again
    for epoch in (0, 2):
        maps = maps_path(tmp_path / "parts", epoch).read_bytes()
        assert maps == maps_path(tmp_path / "whole", epoch).read_bytes()
    assert [report["step"] for report in reports(tmp_path / "parts")] == list(range(1, 13))


def test_all_crops_of_an_image_are_drawn_with_the_same_maps(photos, tmp_path, monkeypatch):
    epochs = []

    class Recorded(RepeatedStepSampler):
        def batches(self, steps):
            for batch in super().batches(steps):
                epochs.append({epoch for epoch, _ in batch})
                yield batch

    monkeypatch.setattr("util.data.repeats.RepeatedStepSampler", Recorded)
    pretrain(photos, tmp_path / "out", *REPEATED, "--attention_every", 2)
    assert epochs == [{0}] * 3 + [{1, 2}] * 6 + [{3}] * 3


@pytest.fixture
def whole(photos, undisturbed_run):
    """The folder of a run with FLAGS."""
    return undisturbed_run(pretrain, photos, *FLAGS)


def test_a_run_that_starts_at_another_one_takes_its_maps(photos, whole, tmp_path, capsys):
    pretrain(photos, tmp_path / "first", *FLAGS, "--max_steps", 8)
    maps = maps_path(tmp_path / "second", 1)
    maps.parent.mkdir(parents=True)
    np.save(maps, np.zeros((24, 8, 8), np.float16))  # left over from something else
    capsys.readouterr()
    content = pretrain(photos, tmp_path / "second", *FLAGS, "--resume", tmp_path / "first")
    assert_same_state(content, state(whole))
    assert "warning" not in capsys.readouterr().out
    assert maps.read_bytes() == maps_path(whole, 1).read_bytes()
    assert not maps_path(tmp_path / "second", 0).exists()


def test_missing_maps_are_made_again_and_said(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "out", *FLAGS, "--max_steps", 8)
    maps_path(tmp_path / "out", 1).unlink()
    capsys.readouterr()
    pretrain(photos, tmp_path / "out", *FLAGS)
    out = capsys.readouterr().out
    assert "epoch-0001.npy' is missing, so maps are made with the weights of step 8" in out
    assert out.count("is missing") == 1
    assert maps_path(tmp_path / "out", 1).exists()


def test_a_signal_while_maps_are_made_loses_nothing(photos, whole, tmp_path, monkeypatch):
    """The last two checkpoints stay, and the same maps are made again."""
    calls = []

    def interrupted(model, imgs):
        calls.append(imgs)
        if len(calls) == 5:  # in the midst of the second refresh, of three batches each
            os.kill(os.getpid(), signal.SIGTERM)
        return cls_attention(model, imgs)

    monkeypatch.setattr(attention_phases, "cls_attention", interrupted)
    assert main_pretrain.main(pretrain.command(photos, tmp_path / "parts", *FLAGS)) is False
    assert [path.name for path in list_checkpoints(tmp_path / "parts")] == ["checkpoint-3.pth", "checkpoint-6.pth"]
    assert maps_path(tmp_path / "parts", 0).exists()
    assert not maps_path(tmp_path / "parts", 1).exists()
    monkeypatch.undo()
    assert_same_state(pretrain(photos, tmp_path / "parts", *FLAGS), state(whole))


def test_two_processes_draw_as_one(photos, tmp_path):
    """Through torchrun with accumulation and workers: the same losses and maps."""
    flags = pretrain.command(photos, tmp_path / "two", *AMT, "--batch_size", 4, "--num_workers", 1)
    code, out = run_by_torchrun("main_pretrain.py", *flags)
    assert code == 0, out[-3000:]
    pretrain(photos, tmp_path / "one", *AMT)
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    for epoch in range(3):
        ours = np.load(maps_path(tmp_path / "two", epoch)).astype(float)
        theirs = np.load(maps_path(tmp_path / "one", epoch)).astype(float)
        np.testing.assert_allclose(ours, theirs, atol=5e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--throw_ratio 0", "--sampling attention chooses the tokens that are thrown, but --throw_ratio is 0"),
        ("--model simmim_swin_micro_patch4_window4 --throw_ratio 0", "swin_micro_patch4_window4 does not have: choose"),
        ("--attention_start 3", "--attention_start 3 and --attention_every 1 leave none of 4 epochs"),
        ("--attention_start -1", "--attention_start must be at least 0, got -1"),
        ("--attention_every 0", "--attention_every must be at least 1, got 0"),
        ("--attention_crop whole", "invalid choice: 'whole'"),
    ],
)
def test_impossible_flags_are_refused(photos, tmp_path, capsys, flags, message):
    assert message in pretrain.refused(capsys, photos, tmp_path / "out", *FLAGS, *flags.split())


def test_amt_needs_sampling_by_attention(photos, tmp_path, capsys):
    assert "--sampling attention" in pretrain.refused(capsys, photos, tmp_path, "--model", "amt_vit_micro_patch4")


def test_the_released_crop_gives_another_run(photos, tmp_path):
    for crop in ("view", "released"):
        pretrain(photos, tmp_path / crop, *FLAGS, "--max_steps", 5, "--attention_crop", crop)
    ours = losses_of(tmp_path / "view")
    theirs = losses_of(tmp_path / "released")
    assert ours[:3] == theirs[:3]
    assert ours[3:] != theirs[3:]
