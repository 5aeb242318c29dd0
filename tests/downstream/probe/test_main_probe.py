"""Frozen evaluation as a program: its figures, its data, and what it refuses."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

import main_pretrain
from downstream.probe import engine_probe, main_probe
from downstream.probe.engine_probe import GRID, rate_at, split_held_out
from downstream.probe.models import FrozenEncoder
from frameworks import registry
from tests.locks import held_by_another_process
from tests.runs import refused
from tests.util.evaluate.test_knn import mean_and_std, slow_ranking
from tests.warm import run_by_torchrun
from util.data import loader
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop
from util.run.checkpoint import save_checkpoint

SMALL = "--steps 12 --total_batch_size 8 --num_workers 0 --device cpu"


def write_encoder(folder, seed=0):
    """An untrained run."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    settings = vars(main_pretrain.get_args_parser().parse_args(["--model", "mae_vit_micro_patch4"]))
    save_checkpoint(folder, 1, {"model": registry.build_model(settings).state_dict()}, {"settings": settings})
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def command(encoder, data, output_dir, *flags):
    found = [encoder, *SMALL.split(), "--data_path", data, "--output_dir", output_dir, *flags]
    return [str(word) for word in found]


def probe(*arguments):
    main_probe.main(command(*arguments))
    return json.loads((arguments[2] / "probe.json").read_text())


def fails(capsys, *arguments, code=2):
    return refused(capsys, main_probe.main, *command(*arguments), code=code)


def test_knn_of_all_blocks_features_and_neighbours_equals_a_loop(encoder, data, tmp_path):
    rows = probe(encoder, data, tmp_path, "--probes", "knn", "--blocks", 2, 4)["results"]
    model, _ = registry.load_run(encoder)
    view, normalize, found = ResizeCenterCrop(32), Normalize(), {}
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for path in sorted((data / split / name).iterdir()):
                img = view(torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1))
                with torch.no_grad():
                    x = model.prepend_cls_token(
                        model.patch_embed(model.patchify(normalize(img[None]))) + model.pos_embed[:, 1:]
                    )
                    tokens = [model.norm(x := block(x))[0].numpy() for block in model.blocks]
                found.setdefault(split, []).append((label, tokens))
    labels = [label for label, _ in found["train"]]
    assert len(rows) == 2 * 2 * 2 * 3 and [row["k"] for row in rows[:3]] == [10, 20, 24]  # of 24 images
    for row in rows:
        pick = (lambda t: t[1:].mean(axis=0)) if row["feature"] == "mean" else lambda t: t[0]
        vectors = {split: [pick(t[row["block"] - 1]) for _, t in items] for split, items in found.items()}
        moments = mean_and_std(vectors["train"]) if row["scaling"] == "z" else None
        hits = [
            slow_ranking(vectors["train"], labels, q, 2, row["k"], moments)[0] == label
            for q, (label, _) in zip(vectors["val"], found["val"], strict=True)
        ]
        assert row["top1"] == pytest.approx(100 * np.mean(hits)) and "top5" not in row, row
    assert len({row["top1"] for row in rows}) > 1


def test_a_probe_learns_what_can_be_learnt_and_writes_it_down(encoder, tmp_path, capsys):
    """Dark and bright images. The chosen head is the best on the held-out images."""
    for split, number in (("train", 20), ("val", 6)):
        for name, low in (("dark", 0), ("bright", 128)):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(number):
                pixels = np.random.default_rng(i).integers(low, low + 100, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    content = probe(encoder, tmp_path, tmp_path / "out", "--probes", "linear", "attentive", "--steps", 40)
    rows = {(row["feature"], row["probe"]): row for row in content["results"]}
    assert rows.keys() == {("mean", "linear"), ("cls", "linear"), ("patches", "attentive")}
    for (feature, kind), row in rows.items():
        heads = [h for h in content["held_out"] if (h["feature"], h["probe"]) == (feature, kind)]
        assert [(h["lr"], h["weight_decay"]) for h in heads] == list(GRID) and len(heads) == 30
        assert row["held_out_top1"] == max(h["held_out_top1"] for h in heads)
        assert row["block"] == 4 and "top5" not in row  # of two classes
    assert rows["mean", "linear"]["top1"] == rows["patches", "attentive"]["top1"] == 100
    out = capsys.readouterr().out
    assert "step 40/40: mean loss of all heads" in out and "| attentive | 4     | patches | lr" in out


def test_the_held_out_tenth_never_trains(encoder, data, tmp_path, monkeypatch):
    loads, getitem = [], engine_probe.AddressedDataset.__getitem__

    def note(self, address):
        images, i = self.images, address[1]
        is_subset = isinstance(images, engine_probe.ImageSubset)
        loads.append((type(self.transform), len(images), int(images.indices[i]) if is_subset else i))
        return getitem(self, address)

    monkeypatch.setattr(engine_probe.AddressedDataset, "__getitem__", note)
    probe(encoder, data, tmp_path, "--probes", "linear")
    training, held_out = split_held_out(24)
    assert len(held_out) == 2 and sorted([*training, *held_out]) == list(range(24))
    assert {i for kind, _, i in loads if kind is RandomResizedCropFlip} == set(training)
    assert [i for kind, number, i in loads if kind is ResizeCenterCrop and number == 24] == list(held_out)


def test_the_split_is_a_permutation_that_no_flag_changes():
    training, held_out = split_held_out(1000)
    assert len(held_out) == 100 and not set(training) & set(held_out)
    assert abs(np.mean(held_out) - 499.5) < 100 and len(np.unique(np.diff(held_out))) > 10
    assert np.array_equal(held_out, split_held_out(1000)[1])


def test_the_schedule_warms_up_linearly_and_ends_at_zero():
    rates = [rate_at(step, 1000) for step in range(1001)]
    assert rates[0] == 0 and rates[50] == pytest.approx(0.5) and rates[100] == 1 == max(rates)
    assert rates[550] == pytest.approx(0.5) and rates[1000] == pytest.approx(0, abs=1e-12)
    assert rates[325] == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))


def test_results_are_never_overwritten_by_others(encoder, data, tmp_path, capsys, monkeypatch):
    content = probe(encoder, data, tmp_path / "out", "--probes", "knn")
    with monkeypatch.context() as patch:
        patch.setattr(engine_probe.Probing, "knn", lambda self: pytest.fail("computed again"))
        assert probe(encoder, data, tmp_path / "out", "--probes", "knn") == content
    assert "already holds 1 of 1 part: knn" in capsys.readouterr().out
    message = fails(capsys, encoder, data, tmp_path / "out", "--probes", "knn", "--blocks", 3)
    assert "probe.json' holds other results (blocks was [4] and now is [3]); choose another --output_dir" in message
    other = write_encoder(tmp_path / "other", seed=1)
    assert "holds other results (checkpoint was" in fails(capsys, other, data, tmp_path / "out", "--probes", "knn")
    assert json.loads((tmp_path / "out" / "probe.json").read_text()) == content
    (tmp_path / "out" / "probe.json").write_text("[]")
    assert "is no result of this program" in fails(capsys, encoder, data, tmp_path / "out", "--probes", "knn")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--blocks 5", "--blocks must lie between 1 and 4, the blocks of"),
        ("--total_batch_size 23", "nine tenths of the training set are 22 images, fewer than one batch of 23"),
        (
            "--total_batch_size 8 --batch_size 3",
            "cannot be split into --batch_size 3 on 1 process",
        ),
        ("--input_size 30", "30 x 30 is not divisible by patch_size 4"),
        ("--crop_scale 0 1", "--crop_scale must be two areas"),
        ("--probes efficient", "invalid choice: 'efficient'"),
        ("--timm no_such_model", "--timm 'no_such_model' is no model of timm"),
        ("--output_dir {data}/train", "lies inside the image folder"),
        ("--data_path {tmp}/nowhere", "nowhere' is not a folder"),
        ("--data_path {data}/train", "has no folder train/"),
    ],
)
def test_errors_are_one_paragraph_before_anything_is_computed(
    encoder,
    data,
    tmp_path,
    capsys,
    monkeypatch,
    flags,
    message,
):
    monkeypatch.setattr(engine_probe, "extract_features", lambda *_: pytest.fail("computed"))
    words = [word.format(data=data, tmp=tmp_path) for word in flags.split()]
    assert message in fails(capsys, encoder, data, tmp_path / "out", *words)
    assert not (tmp_path / "out" / "probe.json").exists()


@pytest.mark.parametrize(("image", "split"), [(5, 24), (24 + 3, 10)])
def test_knn_of_features_that_are_not_finite_is_refused(encoder, data, tmp_path, capsys, monkeypatch, image, split):
    """One image of the 24 in train/, or of the 10 in val/, has a feature that is NaN."""
    vectors, seen = FrozenEncoder.vectors, [0]

    def damaged(self, imgs):
        found = vectors(self, imgs)
        if seen[0] <= image < seen[0] + len(imgs):
            found["4 cls"][image - seen[0], 7] = torch.nan
        seen[0] += len(imgs)
        return found

    monkeypatch.setattr(FrozenEncoder, "vectors", damaged)
    message = fails(capsys, encoder, data, tmp_path / "out", "--probes", "knn", code=3)
    expected = f"features (cls, block 4) of 1 of {split} images are not finite: try --precision fp32"
    assert expected in message and not (tmp_path / "out" / "probe.json").exists()


def test_heads_whose_logits_are_not_finite_are_not_chosen(encoder, data, tmp_path, capsys, monkeypatch):
    """First one head of each grid has diverged, then all of them have."""
    train_heads, diverged = engine_probe.Probing.train_heads, slice(3, 4)

    def diverging(self, *how):
        finished = train_heads(self, *how)
        probes = how[0]
        for head in [*probes.grids["4 mean linear"].heads][diverged]:
            head.weight.data[:] = torch.nan
        return finished

    monkeypatch.setattr(engine_probe.Probing, "train_heads", diverging)
    content = probe(encoder, data, tmp_path / "one", "--probes", "linear")
    scores = [head["held_out_top1"] for head in content["held_out"] if head["feature"] == "mean"]
    assert scores[3] == 0 and max(scores) > 0
    diverged = slice(None)
    message = fails(capsys, encoder, data, tmp_path / "all", "--probes", "linear", code=3)
    assert "the logits of all heads (4 mean linear) are not finite" in message
    assert not (tmp_path / "all" / "probe.json").exists()


def test_a_signal_stops_the_heads_and_keeps_the_neighbours(encoder, data, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_probe.StopSignal, "agreed", lambda stop: True)
    words = command(encoder, data, tmp_path / "out", "--probes", "knn", "linear")
    assert main_probe.main(words) is False
    kept = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert list(kept["parts"]) == ["knn"]
    monkeypatch.undo()
    monkeypatch.setattr(engine_probe.Probing, "knn", lambda self: pytest.fail("computed again"))
    content = probe(encoder, data, tmp_path / "out", "--probes", "knn", "linear")
    assert list(content["parts"]) == ["knn", "heads"] and content["results"][: len(kept["results"])] == kept["results"]


def test_a_folder_takes_one_program_at_a_time(encoder, data, tmp_path, capsys, monkeypatch):
    with held_by_another_process(tmp_path / "out") as message, monkeypatch.context() as patch:
        patch.setattr(engine_probe.Probing, "knn", lambda self: pytest.fail("computed"))
        assert message in fails(capsys, encoder, data, tmp_path / "out", "--probes", "knn")
    probe(encoder, data, tmp_path / "out", "--probes", "knn")  # a lock goes with its process


def test_batches_that_do_not_fit_into_shared_memory_are_refused(encoder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loader, "free_bytes", lambda: 1000)
    for probes in ("knn", "linear"):
        assert "/dev/shm has 0.0 MB free" in fails(
            capsys, encoder, data, tmp_path, "--probes", probes, "--num_workers", 1
        )


def test_an_encoder_must_be_named(data, tmp_path, capsys):
    message = refused(capsys, main_probe.main, "--data_path", data, "--output_dir", tmp_path / "out")
    assert "give a checkpoint, a run's folder, or --timm NAME" in message


def test_two_processes_give_the_results_of_one(encoder, data, tmp_path):
    flags = ("--batch_size", 2, "--blocks", 4)
    code, out = run_by_torchrun("downstream/probe/main_probe.py", *command(encoder, data, tmp_path / "two", *flags))
    assert code == 0, out[-3000:]
    two, one = json.loads((tmp_path / "two" / "probe.json").read_text()), probe(encoder, data, tmp_path / "one", *flags)
    assert two["settings"] == one["settings"] and len(one["results"]) == 12 + 3
    for ours, theirs in zip(two["results"][:12], one["results"][:12], strict=True):
        assert ours == theirs
    same = [
        ours["held_out_top1"] == theirs["held_out_top1"]
        for ours, theirs in zip(two["held_out"], one["held_out"], strict=True)
    ]
    assert len(same) == 90 and np.mean(same) > 0.95
