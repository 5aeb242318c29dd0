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
from frameworks import registry
from tests.conftest import read_photo
from tests.runs import info_of_run, refused
from tests.util.evaluate.test_knn import mean_and_std, slow_ranking
from tests.warm import run_by_torchrun
from util.data.transforms import Normalize, RandomResizedCropFlip, ResizeCenterCrop
from util.run.files.checkpoint import save_checkpoint

SMALL = "--steps 12 --total_batch_size 8 --num_workers 0 --device cpu"


def write_encoder(folder, seed=0):
    """An untrained run."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    args = main_pretrain.get_args_parser().parse_args(["--model", "mae_vit_micro_patch4"])
    model = registry.build_model(vars(args))
    info = info_of_run(1, settings=vars(args))
    save_checkpoint(folder, 1, {"model": model.state_dict()}, info.to_json())
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def command(encoder, data, output_dir, *flags):
    words = [encoder, *SMALL.split(), "--data_path", data, "--output_dir", output_dir, *flags]
    return [str(word) for word in words]


def probe(encoder, data, output_dir, *flags):
    main_probe.main(command(encoder, data, output_dir, *flags))
    return json.loads((output_dir / "probe.json").read_text())


def fails(capsys, *arguments, code=2):
    return refused(capsys, main_probe.main, *command(*arguments), code=code)


def slow_features(model, path):
    """{(block, feature): vector} of an image, by the model's own blocks."""
    img = ResizeCenterCrop(32)(read_photo(path))
    features = {}
    with torch.no_grad():
        patches = model.patch_embed(model.patchify(Normalize()(img[None])))
        x = model.prepend_cls_token(patches + model.pos_embed[:, 1:])
        for number, block in enumerate(model.blocks, 1):
            x = block(x)
            tokens = model.norm(x)[0].numpy()
            features[number, "cls"] = tokens[0]
            features[number, "mean"] = tokens[1:].mean(axis=0)
    return features


def slow_split(model, folder):
    """(features of each image, labels) of a folder with cats and dogs."""
    features = []
    labels = []
    for label, name in enumerate(("cat", "dog")):
        for path in sorted((folder / name).iterdir()):
            features.append(slow_features(model, path))
            labels.append(label)
    return features, labels


def test_knn_of_all_blocks_features_and_neighbours_equals_a_loop(encoder, data, tmp_path):
    content = probe(encoder, data, tmp_path, "--probes", "knn", "--blocks", 4, 2, "--knn_temperature", 2)
    assert content["settings"]["knn_temperature"] == 2
    rows = content["results"]
    assert len(rows) == 2 * 2 * 2 * 3
    assert [row["k"] for row in rows[:3]] == [10, 20, 24]  # of 24 images
    assert len({row["top1"] for row in rows}) > 1
    model, _ = registry.load_run(encoder)
    bank, bank_labels = slow_split(model, data / "train")
    queries, query_labels = slow_split(model, data / "val")
    for row in rows:
        name = (row["block"], row["feature"])
        vectors = [features[name] for features in bank]
        moments = None
        if row["scaling"] == "z":
            moments = mean_and_std(vectors)
        hits = []
        for features, label in zip(queries, query_labels, strict=True):
            query = features[name]
            ranking = slow_ranking(vectors, bank_labels, query, 2, row["k"], moments, temperature=2.0)
            hits.append(ranking[0] == label)
        assert row["top1"] == pytest.approx(100 * np.mean(hits)), row


def test_a_probe_learns_what_can_be_learnt_and_writes_it_down(encoder, tmp_path, capsys):
    """Dark and bright images, of which 36 train. The chosen head is the best on the held-out images."""
    for split, number in (("train", 20), ("val", 6)):
        for name, low in (("dark", 0), ("bright", 128)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                rng = np.random.default_rng(i)
                pixels = rng.integers(low, low + 100, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    flags = ("--probes", "linear", "attentive", "--steps", 40)
    content = probe(encoder, tmp_path, tmp_path / "out", *flags)
    out = capsys.readouterr().out
    assert f"{40 * 8 / 36:.1f} epochs" in out
    assert out.count(", eta ") == 20
    probes = {"mean": "linear", "cls": "linear", "patches": "attentive"}
    chosen = {row["feature"]: row for row in content["results"]}
    assert {feature: row["probe"] for feature, row in chosen.items()} == probes
    assert len(content["results"]) == 3
    assert chosen["mean"]["top1"] == 100
    assert chosen["patches"]["top1"] == 100
    for feature, row in chosen.items():
        assert "top5" not in row  # of two classes
        settings = []
        best = 0
        for head in content["held_out"]:
            if head["feature"] == feature:
                assert head["probe"] == probes[feature]
                settings.append((head["lr"], head["weight_decay"]))
                best = max(best, head["held_out_top1"])
        assert settings == list(GRID)
        assert row["held_out_top1"] == best


def test_the_held_out_tenth_never_trains(encoder, data, tmp_path, monkeypatch):
    getitems = engine_probe.AddressedDataset.__getitems__
    trained_on = set()
    selected_by = []

    def note(self, addresses):
        for _, i in addresses:
            if isinstance(self.transform, RandomResizedCropFlip):
                trained_on.add(int(self.images.indices[i]))
            elif len(self.images) == 24:
                selected_by.append(i)
        return getitems(self, addresses)

    monkeypatch.setattr(engine_probe.AddressedDataset, "__getitems__", note)
    probe(encoder, data, tmp_path, "--probes", "linear")
    training, held_out = split_held_out(24)
    assert sorted([*training, *held_out]) == list(range(24))
    assert trained_on == set(training)
    assert selected_by == list(held_out)


def test_the_schedule_warms_up_linearly_and_ends_at_zero():
    assert rate_at(0, 1000) == 0
    assert rate_at(50, 1000) == pytest.approx(0.5)
    assert rate_at(100, 1000) == 1
    quarter = 0.5 + 0.5 * math.cos(math.pi / 4)
    assert rate_at(325, 1000) == pytest.approx(quarter)
    assert rate_at(550, 1000) == pytest.approx(0.5)
    assert rate_at(1000, 1000) == pytest.approx(0, abs=1e-12)


@pytest.fixture
def never_computed(monkeypatch):
    monkeypatch.setattr(engine_probe, "extract_features", lambda *_: pytest.fail("computed"))


@pytest.fixture
def with_results(encoder, data, tmp_path):
    """A folder with the results of kNN."""
    probe(encoder, data, tmp_path / "out", "--probes", "knn")
    return tmp_path / "out"


def test_results_of_others_are_never_overwritten(encoder, data, tmp_path, with_results, capsys, never_computed):
    before = (with_results / "probe.json").read_bytes()
    message = fails(capsys, encoder, data, with_results, "--probes", "knn", "--blocks", 3)
    assert "probe.json' holds other results (blocks was [4] and now is [3]); choose another --output_dir" in message
    other = write_encoder(tmp_path / "other", seed=1)
    message = fails(capsys, other, data, with_results, "--probes", "knn")
    assert "holds other results (checkpoint was" in message
    assert (with_results / "probe.json").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--total_batch_size 23", "--total_batch_size"),
        ("--crop_scale 0 1", "--crop_scale must be two areas"),
        ("--output_dir {data}/train", "lies inside the image folder"),
        ("--data_path {tmp}/nowhere", "nowhere' is not a folder"),
    ],
)
def test_bad_flags_are_refused(encoder, data, tmp_path, capsys, never_computed, flags, message):
    words = [word.format(data=data, tmp=tmp_path) for word in flags.split()]
    assert message in fails(capsys, encoder, data, tmp_path / "out", *words)
    assert not (tmp_path / "out" / "probe.json").exists()


def test_knn_alone_needs_no_batch_of_heads(encoder, data, tmp_path):
    """1024 images do not divide into micro-batches of 100."""
    flags = ["--probes", "knn", "--num_workers", 0, "--device", "cpu", "--batch_size", 100]
    words = [encoder, *flags, "--data_path", data, "--output_dir", tmp_path]
    main_probe.main([str(word) for word in words])
    assert (tmp_path / "probe.json").exists()


@pytest.fixture
def diverge(monkeypatch):
    """Makes these heads of one grid diverge in training."""
    train_heads = engine_probe.Probing.train_heads

    def install(heads):
        def diverging(self, probes):
            train_heads(self, probes)
            for head in [*probes.grids["4 mean linear"].heads][heads]:
                head.weight.data[:] = torch.nan

        monkeypatch.setattr(engine_probe.Probing, "train_heads", diverging)

    return install


def test_a_head_that_has_diverged_is_not_chosen(encoder, data, tmp_path, diverge):
    diverge(slice(3, 4))
    content = probe(encoder, data, tmp_path, "--probes", "linear")
    scores = [head["held_out_top1"] for head in content["held_out"] if head["feature"] == "mean"]
    assert scores[3] == 0
    assert max(scores) > 0


def test_heads_that_have_all_diverged_have_no_results(encoder, data, tmp_path, capsys, diverge):
    diverge(slice(None))
    message = fails(capsys, encoder, data, tmp_path, "--probes", "linear", code=3)
    assert "the logits of all heads (4 mean linear) are not finite" in message
    assert not (tmp_path / "probe.json").exists()


def test_the_neighbours_are_there_before_the_heads_are_trained(encoder, data, tmp_path, monkeypatch):
    probes = ("--probes", "knn", "linear")
    with monkeypatch.context() as patch:
        patch.setattr(engine_probe.Probing, "heads", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main_probe.main(command(encoder, data, tmp_path, *probes))
    kept = json.loads((tmp_path / "probe.json").read_text())
    assert list(kept["parts"]) == ["knn"]
    monkeypatch.setattr(engine_probe.Probing, "knn", lambda self: pytest.fail("computed again"))
    content = probe(encoder, data, tmp_path, *probes)
    assert list(content["parts"]) == ["knn", "heads"]
    assert content["parts"]["knn"] == kept["parts"]["knn"]


def test_two_processes_give_the_results_of_one(encoder, data, tmp_path):
    """Of kNN exactly. Of the heads nearly always: gradients are summed in another order."""
    flags = ("--batch_size", 2, "--blocks", 4)
    words = command(encoder, data, tmp_path / "two", *flags)
    code, out = run_by_torchrun("downstream/probe/main_probe.py", *words)
    assert code == 0, out[-3000:]
    one = probe(encoder, data, tmp_path / "one", *flags)
    two = json.loads((tmp_path / "two" / "probe.json").read_text())
    assert two["settings"] == one["settings"]
    assert two["parts"]["knn"] == one["parts"]["knn"]
    differing = 0
    for ours, theirs in zip(two["held_out"], one["held_out"], strict=True):
        differing += ours["held_out_top1"] != theirs["held_out_top1"]
    assert differing < 0.05 * 90
