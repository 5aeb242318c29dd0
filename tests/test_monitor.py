"""The evaluation during pre-training: its figures, its schedule, and that it changes nothing else."""

import shutil

import numpy as np
import pytest
import torch

import main_pretrain
import monitor
from frameworks import registry
from tests.conftest import read_photo, write_photo
from tests.runs import assert_same_state, pretrain, reports, reports_without_times
from tests.two_processes import run_in_two_processes
from tests.util.evaluate.test_knn import mean_and_std, slow_ranking, slow_rankme
from tests.warm import run_by_torchrun
from util.data.transforms import Normalize, ResizeCenterCrop
from util.evaluate.features import Features
from util.evaluate.knn import KnnProtocol, knn_accuracy
from util.evaluate.moments import moments_of_all
from util.run.files.checkpoint import newest_checkpoint

KNN = ("--knn_every", 1)
ACCURACIES = ("knn_top1", "knn_mean_raw_top1", "knn_cls_z_top1", "knn_cls_raw_top1")


@pytest.fixture(scope="module")
def data(photos, tmp_path_factory):
    """The session's photos of cats and dogs in train/, and ten more in val/."""
    root = tmp_path_factory.mktemp("labelled")
    shutil.copytree(photos / "train", root / "train")
    for label, name in enumerate(("cat", "dog")):
        folder = root / "val" / name
        folder.mkdir(parents=True)
        for i in range(5):
            seed = 1000 + 100 * label + i
            write_photo(folder / f"{i}.jpg", size=(44 + 3 * i, 50), seed=seed)
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


def evaluated_steps(folder):
    return [report["step"] for report in evaluations(folder)]


def test_weights_and_losses_are_bit_equal_with_and_without(plain, watched):
    folder, expected = plain
    watched_folder, found = watched
    assert_same_state(found, expected)
    others = [report for report in reports_without_times(watched_folder) if "rankme" not in report]
    assert others == reports_without_times(folder)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((), KNN, [3, 6]),
        (KNN, (), [0, 3]),
    ],
    ids=["on", "off"],
)
def test_evaluations_may_begin_or_end_on_resume(plain, data, tmp_path, before, after, steps):
    _, expected = plain
    pretrain(data, tmp_path, *before, "--max_steps", 3)
    resumed = pretrain(data, tmp_path, *after, "--num_workers", 1)
    assert_same_state(resumed, expected)
    assert evaluated_steps(tmp_path) == steps


@pytest.fixture(scope="module")
def slow_features(watched, data):
    """{split: ([{"mean", "cls"} of each image], labels)} of the run's encoder, in float64."""
    model, _ = registry.load_run(watched[0])
    model.double()
    features = {}
    for split in ("train", "val"):
        vectors = []
        labels = []
        for label, name in enumerate(("cat", "dog")):
            for path in (data / split / name).iterdir():
                img = ResizeCenterCrop(32)(read_photo(path))
                with torch.no_grad():
                    (tokens,) = model.forward_features(Normalize()(img[None]).double())
                cls, *patches = tokens.numpy()
                vectors.append({"mean": np.mean(patches, axis=0), "cls": cls})
                labels.append(label)
        features[split] = (vectors, labels)
    return features


@pytest.mark.parametrize(
    ("measure", "feature", "is_z"),
    [
        ("knn_top1", "mean", True),
        ("knn_mean_raw_top1", "mean", False),
        ("knn_cls_z_top1", "cls", True),
        ("knn_cls_raw_top1", "cls", False),
    ],
)
def test_accuracies_are_those_of_a_slow_evaluation_of_the_checkpoint(watched, slow_features, measure, feature, is_z):
    images, labels = slow_features["train"]
    bank = np.stack([vectors[feature] for vectors in images])
    moments = None
    if is_z:
        moments = mean_and_std(bank)
    num_hits = 0
    for vectors, label in zip(*slow_features["val"], strict=True):
        nearest, _ = slow_ranking(bank, labels, vectors[feature], 2, 20, moments)
        num_hits += nearest == label
    last = evaluations(watched[0])[-1]
    assert last[measure] == pytest.approx(100 * num_hits / 10)


def test_rankme_is_that_of_a_slow_evaluation_of_the_checkpoint(watched, slow_features):
    images, _ = slow_features["train"]
    bank = np.stack([vectors["mean"] for vectors in images])
    last = evaluations(watched[0])[-1]
    assert last["rankme"] == pytest.approx(slow_rankme(bank), rel=1e-4)
    centred = slow_rankme(bank, centred=True)
    assert last["rankme_centred"] == pytest.approx(centred, rel=1e-2)


def test_evaluations_come_every_few_epochs_and_at_the_end(data, tmp_path):
    flags = ("--epochs", 3, "--knn_every", 2, "--knn_train", 7)
    pretrain(data, tmp_path, *flags, "--max_steps", 5)
    assert evaluated_steps(tmp_path) == [0]
    pretrain(data, tmp_path, *flags)
    assert evaluated_steps(tmp_path) == [0, 6, 9]


@pytest.mark.parametrize("killed_at", [0, 6])
def test_a_kill_inside_the_evaluation_costs_nothing(watched, data, tmp_path, monkeypatch, killed_at):
    folder, expected = watched
    accuracies = monitor.Monitor.accuracies

    def killed(self, *arguments):
        if self.loop.step == killed_at:
            raise KeyboardInterrupt  # as late as possible: the features are there
        return accuracies(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(monitor.Monitor, "accuracies", killed)
        main_pretrain.main(pretrain.command(data, tmp_path, *KNN))
    assert len(evaluations(tmp_path)) == killed_at // 3
    assert_same_state(pretrain(data, tmp_path, *KNN), expected)
    assert reports_without_times(tmp_path) == reports_without_times(folder)


def write_twins(root):
    """Each image and a copy: its nearest neighbour is the copy, not itself."""
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for i in range(12):
            for twin in "ab":
                write_photo(root / name / f"{i}{twin}.png", seed=100 * label + i)
    return root


def test_without_val_images_are_classified_by_the_others(photos, tmp_path, capsys):
    pretrain(photos, tmp_path / "photos", *KNN, "--max_steps", 1)
    assert "--knn_every classifies training images by the others" in capsys.readouterr().out
    pretrain(write_twins(tmp_path / "twins"), tmp_path / "out", *KNN, "--max_steps", 1)
    (alone,) = evaluations(tmp_path / "photos")
    (twins,) = evaluations(tmp_path / "out")
    assert twins["knn_mean_raw_top1"] > alone["knn_mean_raw_top1"]


def test_images_without_classes_have_rankme_alone(photos, tmp_path, capsys):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, path in enumerate(photos.glob("train/*/*.jpg")):
        shutil.copy(path, flat / f"{i}.jpg")
    pretrain(flat, tmp_path / "out", *KNN, "--max_steps", 1)
    assert "so --knn_every computes RankMe alone" in capsys.readouterr().out
    (evaluation,) = evaluations(tmp_path / "out")
    assert "knn_top1" not in evaluation


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_features_that_are_not_finite_are_said_and_end_the_run_at_its_end(data, tmp_path, monkeypatch, capsys, value):
    """The squares of 1e30 overflow."""
    make_model = registry.MODELS["mae_vit_micro_patch4"]

    def broken(**options):
        model = make_model(**options)
        model.forward_features = lambda imgs: torch.full((len(imgs), 65, 4), value)
        return model

    broken.func = make_model.func  # as of a partial
    monkeypatch.setitem(registry.MODELS, "mae_vit_micro_patch4", broken)
    for _ in range(2):  # the finished run, too
        with pytest.raises(SystemExit) as stop:
            pretrain(data, tmp_path, *KNN)
        assert stop.value.code == 3
        assert "error: the features of the encoder are not finite" in capsys.readouterr().err
    assert evaluated_steps(tmp_path) == [0, 3, 6, 6]
    assert newest_checkpoint(tmp_path)[0].name == "checkpoint-6.pth"


def test_the_bank_is_a_random_part_that_depends_on_the_seed_alone():
    bank = monitor.bank_images(1000, 100, 0)
    assert len(np.unique(bank)) == 100
    assert sorted(bank) == bank.tolist()
    assert bank.max() < 1000
    assert np.array_equal(bank, monitor.bank_images(1000, 100, 0))
    other = monitor.bank_images(1000, 100, 1)
    assert len(np.intersect1d(bank, other)) < 30


# ------------------------------------------------------------------------------------------------- several processes


def _scores(rank, leave_one_out, world_size=2):
    """kNN accuracies and RankMe of features that the processes share."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(6, 9, generator=generator)
    labels = torch.randint(0, 6, (73,), generator=generator)
    features = centres[labels] + 2.5 * torch.randn(73, 9, generator=generator)
    features[20:30] = features[:10]  # ties between processes
    queries = features.clone()
    if not leave_one_out:
        queries[::2] += torch.randn(37, 9, generator=generator)

    def share_of(x, indices):
        mine = indices[rank::world_size]
        return Features({"mean": x[mine]}, labels[mine], mine)

    bank = share_of(features, torch.arange(73))
    moments = moments_of_all(bank.values["mean"])
    scores = {"rankme": moments.rankme(centred=True)}
    protocol = KnnProtocol(6, (1, 5, 20, 80), leave_one_out=leave_one_out)
    shared_queries = share_of(queries, torch.arange(0, 73, 2))
    of_neighbours = knn_accuracy(bank, shared_queries, "mean", protocol, moments)
    for k, accuracies in of_neighbours.items():
        for name, value in accuracies.items():
            scores[f"{k} {name}"] = value
    return scores


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_two_processes_score_as_one(leave_one_out):
    one = _scores(0, leave_one_out, world_size=1)
    assert len(set(one.values())) > 4
    for two in run_in_two_processes(_scores, leave_one_out):
        assert two == pytest.approx(one, rel=1e-6)


def pretrain_in_two_processes(data, folder, *flags):
    """Returns the evaluations."""
    command = pretrain.command(data, folder, *KNN, *flags)
    code, out = run_by_torchrun("main_pretrain.py", *command)
    assert code == 0, out[-3000:]
    return evaluations(folder)


def test_a_run_of_two_processes_logs_what_one_does(data, tmp_path):
    """The processes have unequal shares of the images: 7 batches of 2 and of 1 for 13 training images."""
    small = ("--knn_train", 13, "--max_steps", 3)
    flags = ("--batch_size", 2, "--accum_iter", 2)
    two = pretrain_in_two_processes(data, tmp_path / "two", *small, *flags)
    pretrain(data, tmp_path / "one", *KNN, *small)
    for ours, theirs in zip(two, evaluations(tmp_path / "one"), strict=True):
        for name in ("step", *ACCURACIES):
            assert ours[name] == theirs[name]
        assert ours["rankme"] == pytest.approx(theirs["rankme"], rel=1e-3)


# ------------------------------------------------------------------------------------------------------------- cost


@pytest.mark.gpu
def test_an_evaluation_on_the_gpu_equals_that_of_the_cpu(data, tmp_path):
    for name, flags in (("cpu", ()), ("cuda", ("--device", "cuda", "--precision", "fp32"))):
        pretrain(data, tmp_path / name, *flags, *KNN, "--max_steps", 1)
    (cpu,) = evaluations(tmp_path / "cpu")
    (cuda,) = evaluations(tmp_path / "cuda")
    assert cuda["rankme"] == pytest.approx(cpu["rankme"], rel=1e-3)
    assert cuda["knn_top1"] == pytest.approx(cpu["knn_top1"], abs=10.1)  # one image of ten
