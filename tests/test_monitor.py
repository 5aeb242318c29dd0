"""The evaluation during pre-training: its figures, its schedule, and that it changes nothing else."""

import json
import math
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main_pretrain
import monitor
from frameworks import registry
from tests.conftest import write_photo
from tests.runs import assert_same_state, pretrain, reports
from tests.two_processes import run_in_two_processes
from tests.util.evaluate.test_knn import mean_and_std, slow_ranking, slow_rankme
from tests.warm import run_by_torchrun
from util.costs import count_gmac, forward_gmac
from util.data.datasets import AddressedDataset
from util.data.open import open_images
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate.features import Features, extract_features
from util.evaluate.knn import KnnProtocol, knn_accuracy
from util.evaluate.loop import EvalContext
from util.evaluate.moments import moments_of_all
from util.run.checkpoint import newest_checkpoint
from util.run.training import Training

KNN = ("--knn_every", 1)
ACCURACIES = ("knn_top1", "knn_mean_raw_top1", "knn_cls_z_top1", "knn_cls_raw_top1")


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory):
    """The session's photos of cats and dogs in train/, and ten more in val/."""
    root = tmp_path_factory.mktemp("labelled")
    shutil.copytree(photos / "train", root / "train")
    for label, name in enumerate(("cat", "dog")):
        (root / "val" / name).mkdir(parents=True)
        for i in range(5):
            write_photo(root / "val" / name / f"{i}.jpg", size=(44 + 3 * i, 50), seed=1000 + 100 * label + i)
    return root


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """A run without evaluations: (its folder, its last checkpoint)."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, pretrain(data, folder)


@pytest.fixture(scope="module")
def watched(data, tmp_path_factory):
    """The same run with an evaluation after each of its two epochs."""
    folder = tmp_path_factory.mktemp("watched")
    return folder, pretrain(data, folder, *KNN)


def evaluations(folder):
    return [report for report in reports(folder) if "rankme" in report]


def without_times(found):
    times = ("seconds_per_step", "images_per_s", "data_share", "knn_seconds")
    return [{name: value for name, value in report.items() if name not in times} for report in found]


def test_weights_and_losses_are_bit_equal_with_and_without(plain, watched, data, tmp_path):
    """Also if the flag is only set on resume, or no longer."""
    assert_same_state(watched[1], plain[1])
    others = [report for report in reports(watched[0]) if "rankme" not in report]
    assert without_times(others) == without_times(reports(plain[0])) and len(others) == 6
    for name, flags in (("on", ((), KNN)), ("off", (KNN, ()))):
        pretrain(data, tmp_path / name, *flags[0], "--max_steps", 3)
        assert_same_state(pretrain(data, tmp_path / name, *flags[1], "--num_workers", 1), plain[1])
        steps = [report["step"] for report in evaluations(tmp_path / name)]
        assert steps == ([3, 6] if name == "on" else [0, 3])


def test_the_figures_are_those_of_a_slow_evaluation_of_the_checkpoint(watched, data):
    model, _ = registry.load_run(watched[0])
    view, normalize, found = ResizeCenterCrop(32), Normalize(), {}
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            for path in (data / split / name).iterdir():
                img = view(torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1))
                with torch.no_grad():
                    tokens = model.double().forward_features(normalize(img.unsqueeze(0)).double())[0].numpy()
                found.setdefault(split, []).append((label, {"mean": tokens[1:].mean(axis=0), "cls": tokens[0]}))
    last = evaluations(watched[0])[-1]
    labels = [label for label, _ in found["train"]]
    for key in ("mean z", "mean raw", "cls z", "cls raw"):
        name, scaling = key.split()
        bank = np.stack([vectors[name] for _, vectors in found["train"]])
        moments = mean_and_std(bank) if scaling == "z" else None
        ranks = [
            slow_ranking(bank, labels, vectors[name], 2, 20, moments).index(label) for label, vectors in found["val"]
        ]
        logged = last["knn_top1" if key == "mean z" else f"knn_{name}_{scaling}_top1"]
        assert logged == pytest.approx(100 * np.mean(np.array(ranks) == 0)), key
        if key == "mean raw":
            assert last["rankme"] == pytest.approx(slow_rankme(bank), rel=1e-4)
            assert last["rankme_centred"] == pytest.approx(slow_rankme(bank, centred=True), rel=1e-2)
    assert "knn_top5" not in last  # of two classes


def test_a_run_reports_its_evaluations_everywhere(watched, data, tmp_path, capsys):
    found = evaluations(watched[0])
    assert [(report["step"], report["epoch"]) for report in found] == [(0, -1), (3, 0), (6, 1)]
    assert all({*ACCURACIES, "rankme", "rankme_centred", "knn_seconds"} <= report.keys() for report in found)
    assert found[0]["rankme"] != found[-1]["rankme"]
    events = EventAccumulator(str(watched[0] / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("knn_top1")] == [0, 3, 6]
    assert (watched[0] / "log.txt").read_text().count("kNN top-1") == 3
    capsys.readouterr()
    pretrain(data, watched[0], *KNN)  # it is finished, says so again, and evaluates nothing
    out = capsys.readouterr().out
    assert out.count("  kNN          top-1") == 2 and evaluations(watched[0]) == found
    first, last = (line for line in out.splitlines() if line.startswith("  kNN"))
    assert f"{found[0]['knn_top1']:.2f} %" in first and first.endswith("before training")
    assert f"{found[-1]['knn_top1']:.2f} %" in last and last.endswith("after epoch 1")


def test_evaluations_come_every_few_epochs_and_at_the_end(data, tmp_path):
    flags = ("--epochs", 3, "--knn_every", 2, "--knn_train", 7)
    pretrain(data, tmp_path, *flags, "--max_steps", 5)
    assert [report["step"] for report in evaluations(tmp_path)] == [0]
    pretrain(data, tmp_path, *flags)
    assert [report["step"] for report in evaluations(tmp_path)] == [0, 6, 9]


@pytest.mark.parametrize("killed_at", [0, 3, 6])
def test_a_kill_inside_the_evaluation_costs_nothing(watched, data, tmp_path, monkeypatch, killed_at):
    exact, calls = monitor.Monitor.accuracies, []

    def killed(self, *arguments):
        if self.training.loop.step == killed_at and not calls:
            calls.append(killed_at)
            raise KeyboardInterrupt  # as late as possible: the features are there
        return exact(self, *arguments)

    monkeypatch.setattr(monitor.Monitor, "accuracies", killed)
    with pytest.raises(KeyboardInterrupt):
        main_pretrain.main(pretrain.command(data, tmp_path, *KNN))
    assert len(evaluations(tmp_path)) == killed_at // 3
    assert_same_state(pretrain(data, tmp_path, *KNN), watched[1])
    assert without_times(reports(tmp_path)) == without_times(reports(watched[0]))


def test_a_new_run_in_a_used_folder_does_not_take_over_the_first_figure(data, tmp_path):
    """No checkpoint was written, so another seed starts anew."""
    (tmp_path / ".lock").touch()
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 0, "rankme": 1.25}) + "\n")
    pretrain(data, tmp_path, *KNN, "--max_steps", 1)
    assert [report["step"] for report in evaluations(tmp_path)] == [0]
    assert evaluations(tmp_path)[0]["rankme"] != 1.25


def test_the_watchdog_hears_every_batch(data, tmp_path, monkeypatch):
    heard = []
    monkeypatch.setattr(Training, "heartbeat", lambda self: heard.append(self.loop.step))
    pretrain(data, tmp_path, *KNN, "--max_steps", 1)
    assert heard == [0] * (3 + 2 + 4)  # batches of 24 and of 10 images, and four searches


def test_without_val_images_are_classified_by_the_others(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "photos", *KNN, "--max_steps", 1)
    message = "no validation split, so --knn_every classifies training images by the others"
    assert message in capsys.readouterr().out
    assert "1 training image cannot be classified by the others: give --knn_train 2 or more" in pretrain.refused(
        capsys, photos, tmp_path / "one", *KNN, "--knn_train", 1
    )
    same = {"cat": 0, "dog": 1}
    root = tmp_path / "twins"  # each image and a copy: its nearest neighbour is the copy, not itself
    for name in same:
        (root / name).mkdir(parents=True)
        for i in range(12):
            for twin in "ab":
                write_photo(root / name / f"{i}{twin}.png", seed=100 * same[name] + i)
    pretrain(root, tmp_path / "out", *KNN, "--max_steps", 1)
    twins = evaluations(tmp_path / "out")[0]
    assert twins["knn_mean_raw_top1"] > evaluations(tmp_path / "photos")[0]["knn_mean_raw_top1"]


def test_images_without_classes_have_rankme_alone(photos, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, path in enumerate(sorted(photos.glob("train/*/*.jpg"))):
        shutil.copy(path, flat / f"{i}.jpg")
    pretrain(flat, tmp_path / "out", *KNN)
    out = capsys.readouterr().out
    assert "so --knn_every computes RankMe alone, which needs no labels" in out
    found = evaluations(tmp_path / "out")
    assert [report["step"] for report in found] == [0, 3, 6] and not any("knn_top1" in report for report in found)
    assert f"  kNN          RankMe {found[-1]['rankme']:.1f} after epoch 1" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--knn_every 2", "the training data has 2 classes, the validation data 2; only one of them has dog, wolf"),
        ("--knn_every -1", "--knn_every must be at least 0, got -1"),
        ("--knn_train -5", "--knn_train must be at least 0, got -5"),
    ],
)
def test_user_errors_come_before_the_first_step(data, tmp_path, capsys, flags, message):
    root = shutil.copytree(data, tmp_path / "data")
    (root / "val" / "dog").rename(root / "val" / "wolf")
    assert message in pretrain.refused(capsys, root, tmp_path / "out", *flags.split())
    assert not (tmp_path / "out").exists()


def test_val_without_classes_is_refused_by_the_name_of_the_flag(data, tmp_path, capsys):
    shutil.copytree(data / "train", tmp_path / "data" / "train")
    shutil.copytree(data / "val" / "cat", tmp_path / "data" / "val")
    message = pretrain.refused(capsys, tmp_path / "data", tmp_path / "out", *KNN)
    assert f"error: --knn_every: {str(tmp_path / 'data' / 'val')!r} holds no class folders" in message
    assert message.endswith("Without --knn_every, the run reads no validation images\n")
    pretrain(tmp_path / "data", tmp_path / "out", "--max_steps", 1)


def test_unreadable_images_are_replaced(data, tmp_path):
    root = shutil.copytree(data, tmp_path / "data")
    for split in ("train", "val"):
        (root / split / "cat" / "0.jpg").write_bytes(b"no image")
    pretrain(root, tmp_path / "out", *KNN, "--max_bad_fraction", 0.2, "--max_steps", 1)
    assert 0 <= evaluations(tmp_path / "out")[0]["knn_top1"] <= 100


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_features_that_are_not_finite_are_said_and_end_the_run_at_its_end(data, tmp_path, monkeypatch, capsys, value):
    """The squares of 1e30 overflow."""
    exact = registry.MODELS["mae_vit_micro_patch4"]

    def broken(**options):
        model = exact(**options)
        model.forward_features = lambda imgs: torch.full((len(imgs), 65, 4), value)
        return model

    monkeypatch.setitem(registry.MODELS, "mae_vit_micro_patch4", broken)
    for _ in range(2):  # the finished run, too
        with pytest.raises(SystemExit) as stop:
            pretrain(data, tmp_path, *KNN)
        out, err = capsys.readouterr()
        assert stop.value.code == 3 and "error: the features of the encoder are not finite" in err
    assert [report["step"] for report in evaluations(tmp_path)] == [0, 3, 6, 6]
    assert newest_checkpoint(tmp_path)[0].name == "checkpoint-6.pth"


def test_the_bank_is_a_random_part_that_depends_on_the_seed_alone():
    bank = monitor.bank_images(1000, 100, 0)
    assert len(set(bank.tolist())) == 100 and sorted(bank) == bank.tolist() and bank.max() < 1000
    assert np.array_equal(bank, monitor.bank_images(1000, 100, 0))
    assert len(np.intersect1d(bank, monitor.bank_images(1000, 100, 1))) < 30
    assert set(bank) <= set(monitor.bank_images(1000, 200, 0))
    assert monitor.bank_images(10, 0, 0).tolist() == monitor.bank_images(10, 99, 0).tolist() == list(range(10))


# ------------------------------------------------------------------------------------------------- several processes


def _scores(rank, world_size=2):
    """kNN accuracies and moments of features that the processes share."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 9, generator=generator)
    labels = torch.randint(0, 6, (73,), generator=generator)
    bank = centres[labels] + 2.5 * torch.randn(73, 9, generator=generator)
    bank[20:30] = bank[:10]  # ties between processes
    found = {}
    for name, numbers in (("val", torch.arange(0, 73, 3)), ("loo", torch.arange(0, 73, 2))):
        queries = bank[numbers]
        if name == "val":
            queries = queries + torch.randn(queries.shape, generator=generator)
        shares = [
            Features({"mean": x[rank::world_size]}, labels[n][rank::world_size], n[rank::world_size])
            for x, n in ((bank, torch.arange(73)), (queries, numbers))
        ]
        moments = moments_of_all(shares[0].values["mean"])
        protocol = KnnProtocol(6, (1, 5, 20, 80), leave_one_out=name == "loo")
        scores = knn_accuracy(*shares, "mean", protocol, moments)
        found |= {f"{name} {k} {top}": value for k, both in scores.items() for top, value in both.items()}
        found[f"{name} rankme"] = moments.rankme(centred=True)
    return found


def test_two_processes_score_as_one():
    one = _scores(0, 1)
    assert len({value for name, value in one.items() if "top" in name}) > 6
    for two in run_in_two_processes(_scores):
        assert two == pytest.approx(one, rel=1e-6)


def _score_few_images(rank, folder, num_bank, num_queries):
    """Features and kNN accuracies of so few images that a process may have none."""
    network = torch.nn.Linear(3 * 8 * 8, 5, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.linspace(-1, 1, network.weight.numel()).sin().view_as(network.weight))
    dataset = AddressedDataset(open_images("folder", folder), ResizeCenterCrop((8, 8)))

    def encode(imgs):
        return {"first": network(imgs.flatten(1)), "second": imgs.mean(dim=(2, 3))}

    context = EvalContext(Normalize(), nullcontext, batch_size=4, num_workers=0)
    bank, queries = (
        extract_features(encode, network, dataset, indices, context)
        for indices in (np.arange(3, 3 + num_bank), np.arange(23 - num_queries, 23))
    )
    found = {"share": len(bank.labels), "features": [*bank.values]}
    for name, x in bank.values.items():
        moments = moments_of_all(x)
        found |= {f"{name} mean": moments.mean, f"{name} gram": moments.gram}
        scores = knn_accuracy(bank, queries, name, KnnProtocol(2, (1, 20)), moments)
        found |= {f"{name} {k} {top}": value for k, both in scores.items() for top, value in both.items()}
    return found


@pytest.mark.parametrize("sizes", [(1, 4), (3, 1), (1, 1)])
def test_a_process_without_images_takes_part(photos, sizes):
    one = _score_few_images(0, photos, *sizes)
    two = run_in_two_processes(_score_few_images, photos, *sizes)
    assert one.pop("share") == sizes[0] and [found.pop("share") for found in two] == [-(-sizes[0] // 2), sizes[0] // 2]
    for found in two:
        assert found.pop("features") == ["first", "second"]
        assert found == {name: pytest.approx(np.asarray(one[name]), rel=1e-5) for name in found}
        assert len(found) == len(one) - 1


@pytest.mark.parametrize("flags", [(), ("--shard",)], ids=["ddp", "sharded"])
def test_a_run_of_two_processes_with_a_bank_of_one_image(data, tmp_path, flags):
    flags = (*KNN, "--knn_train", 1, "--batch_size", 4, *flags)
    code, out = run_by_torchrun("main_pretrain.py", *pretrain.command(data, tmp_path / "two", *flags, "--max_steps", 1))
    assert code == 0, out[-3000:]
    (found,) = evaluations(tmp_path / "two")
    assert found["knn_mean_raw_top1"] == 50 and found["rankme"] == pytest.approx(1, abs=1e-3)  # all are of one class


@pytest.mark.parametrize("flags", [(), ("--shard",)], ids=["ddp", "sharded"])
def test_a_run_of_two_processes_logs_what_one_does(watched, data, tmp_path, flags):
    """The processes have unequal shares of the images: 7 batches of 2 and of 1 for 13 training images."""
    flags = ("--batch_size", 2, "--accum_iter", 2, "--knn_train", 13, *flags)
    code, out = run_by_torchrun(
        "main_pretrain.py", *pretrain.command(data, tmp_path / "two", *KNN, *flags, "--max_steps", 3)
    )
    assert code == 0, out[-3000:]
    pretrain(data, tmp_path / "one", *KNN, "--knn_train", 13, "--max_steps", 3)
    two, one = (evaluations(tmp_path / name) for name in ("two", "one"))
    assert [report["step"] for report in two] == [0, 3]
    for ours, theirs in zip(two, one, strict=True):
        assert {name: ours[name] for name in ACCURACIES} == {name: theirs[name] for name in ACCURACIES}
        assert ours["rankme"] == pytest.approx(theirs["rankme"], rel=1e-3)


# ------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("throw_ratio", [0.0, 0.5])
def test_every_tenth_epoch_of_imagenet_it_costs_less_than_one_percent(throw_ratio):
    """Counted for ViT-B: 50,000 + 10,000 whole images against ten epochs, whose steps are three forward passes."""
    args = main_pretrain.get_args_parser().parse_args(["--throw_ratio", str(throw_ratio)])
    training = 3 * forward_gmac(vars(args), registry.build_model)[0]
    with torch.device("meta"):
        model = registry.build_model(vars(args))
        imgs = torch.empty(1, 3, *model.img_size)
    whole = count_gmac(lambda: monitor.encode(model, imgs))
    assert math.isclose(whole, 17.5, rel_tol=0.02)
    assert 60_000 * whole / (10 * 1_281_167 * training) < 0.01


@pytest.mark.gpu
def test_an_evaluation_on_the_gpu_equals_that_of_the_cpu(data, tmp_path):
    for name, flags in (("cpu", ()), ("cuda", ("--device", "cuda", "--precision", "fp32"))):
        pretrain(data, tmp_path / name, *flags, *KNN, "--max_steps", 1)
    cpu, cuda = (evaluations(tmp_path / name)[0] for name in ("cpu", "cuda"))
    assert cuda["rankme"] == pytest.approx(cpu["rankme"], rel=1e-3)
    assert cuda["knn_top1"] == pytest.approx(cpu["knn_top1"], abs=10.1)  # one image of ten
