"""Images of several ranks: who lists and reads a folder, and what is refused."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.runs import ROOT
from tests.two_processes import run_in_two_processes
from util.data.folders import folder_identity
from util.data.images import FolderImages
from util.data.open import open_everywhere


def test_a_folder_of_photographs_loads_no_module_of_other_data(photos):
    code = "import sys, main_pretrain, main_finetune; from util.data.open import open_images; "
    code += "open_images('folder', sys.argv[1]).load(0); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, photos], cwd=ROOT, capture_output=True, text=True, check=True)
    others = "hugging_face tars remote remote_tars invalid_pixels survey"
    assert not {f"util.data.{name}" for name in others.split()}.intersection(done.stdout.split())


def flags(data_path, **changed):
    values = dict(
        dataset="folder",
        loader="fast",
        in_chans=3,
        image_column=None,
        label_column=None,
    )
    return argparse.Namespace(data_path=str(data_path), **(values | changed))


def open_and_watch(rank, roots):
    """Opens the images at `roots[rank]`. Returns (them, paths below that were listed or opened) or an error."""
    root = str(roots[rank])
    touched = []

    def note(event, arguments):
        if event in ("os.scandir", "os.listdir", "open") and str(arguments[0]).startswith(root):
            touched.append(str(arguments[0]))

    sys.addaudithook(note)  # of this child process
    try:
        images = open_everywhere(flags(root), "train", max_bad_fraction=0.1)
    except ValueError as error:
        return str(error)
    return images, list(touched)


def test_rank_0_alone_lists_a_shared_folder_and_reads_its_headers(photos):
    (images, touched), (received, touched_by_other) = run_in_two_processes(open_and_watch, [photos, photos])
    assert {str(photos), str(photos / "train" / "dog"), images.path(0), images.path(23)} <= set(touched)
    assert touched_by_other == []
    alone = FolderImages(photos / "train")
    for ours in (images, received):
        assert ours.names.tolist() == alone.names.tolist()
        assert ours.labels.tolist() == alone.labels.tolist()
        assert ours.classes == ["cat", "dog"]
        assert ours.pixel_format == alone.pixel_format
        assert ours.path(13) == alone.path(13)
        assert np.array_equal(ours.load(13)[0], alone.load(13)[0])


def test_each_rank_lists_a_copy_of_its_own(photos, tmp_path):
    """Here at another path. At the same path, on the disks of two nodes, the identity of the folders differs."""
    shutil.copytree(photos, tmp_path / "copy")
    first, second = run_in_two_processes(open_and_watch, [photos, tmp_path / "copy"])
    for root, (images, touched) in ((photos, first), (tmp_path / "copy", second)):
        assert str(root / "train" / "dog") in touched
        assert images.path(13).startswith(str(root))
    assert first[0].fingerprint() == second[0].fingerprint()
    identities = {folder_identity(root / "train") for root in (photos, photos, tmp_path / "copy", tmp_path / "nowhere")}
    assert len(identities) == 3
    assert None in identities


@pytest.mark.parametrize("case", ["no folder", "headers"])
def test_an_error_that_rank_0_finds_ends_all_with_one_sentence(photos, tmp_path, case):
    root = tmp_path / "data"
    message = "data' is not a folder"
    if case != "no folder":
        shutil.copytree(photos, root)
    if case == "headers":
        for path in sorted(Path(root / "train" / "cat").iterdir())[:3]:
            path.write_bytes(b"no image")
        message = "3 of 24 checked images cannot be used"
    first, second = run_in_two_processes(open_and_watch, [root, root])
    assert message in first
    assert first == second
