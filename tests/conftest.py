import functools
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from tests.patches import MonkeyPatch

torch.set_num_threads(1)  # the models are tiny; threads that wait for each other would cost more than they give
# As in a terminal, also if nohup, a CI or the background of a script has started the tests. Children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def monkeypatch():
    with MonkeyPatch.context() as patch:
        yield patch


# Files that wait for other processes come first, so that no worker ends with a long one.
LONGEST_FILES = {"test_slurm.py", "test_submitit_launch.py", "test_processes.py", "test_shard.py"}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)
    for item in items:
        # No keywords: the folder of a clone is one, too.
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("long") and not os.environ.get("PRMIM_LONG_TESTS"):
            item.add_marker(pytest.mark.skip(reason="takes long: set PRMIM_LONG_TESTS=1"))


def write_photo(path, size=(48, 40), seed=0):
    """A smooth random picture, so that crops and resizes have something to show."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    coarse.resize(size, Image.BICUBIC).save(path)


def read_photo(path):
    """[3, H, W] of uint8, by Pillow."""
    pixels = np.array(Image.open(path).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """ROOT/train/{cat,dog}/*.jpg, 24 images of several sizes."""
    root = tmp_path_factory.mktemp("photos")
    for label, name in enumerate(("cat", "dog")):
        folder = root / "train" / name
        folder.mkdir(parents=True)
        for i in range(12):
            write_photo(folder / f"{i}.jpg", size=(36 + 4 * i, 60 - 2 * i), seed=100 * label + i)
    return root


@pytest.fixture(scope="session")
def labelled(photos, tmp_path_factory):
    """24 training images of two classes, and 4 + 3 to evaluate on."""
    root = tmp_path_factory.mktemp("labelled")
    shutil.copytree(photos / "train", root / "train")
    for name, count in (("cat", 4), ("dog", 3)):
        (root / "val" / name).mkdir(parents=True)
        for i in range(count):
            write_photo(root / "val" / name / f"{i}.png", seed=1000 + len(name + str(i)) + i)
    return root


@pytest.fixture(scope="session")
def pretrained(photos, tmp_path_factory):
    """The folder of a finished run of MAE with PR-MIM."""
    from tests.runs import pretrain  # here: most tests need no main

    output_dir = tmp_path_factory.mktemp("pretrained")
    pretrain(photos, output_dir, "--epochs", 1, "--warmup_epochs", 0)
    return output_dir


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory):
    """Returns the folder of a run to compare with, which is made once for all tests and is not to be changed."""

    @functools.cache
    def folder_of(program, data_path, *flags):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        program(data_path, folder, *flags)
        return folder

    return folder_of


@pytest.fixture
def before_step(monkeypatch):
    """Returns a function: before_step(number, happen) has `happen` called once, before that step (from 0) of a run."""
    from util.run.train.loop import TrainLoop

    set_rates = TrainLoop.set_rates

    def install(number, happen):
        def step(loop, now):
            if now == number:
                monkeypatch.setattr(TrainLoop, "set_rates", set_rates)
                happen()
            set_rates(loop, now)

        monkeypatch.setattr(TrainLoop, "set_rates", step)

    return install
