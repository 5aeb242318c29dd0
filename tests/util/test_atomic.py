"""Files that are replaced in one step."""

import errno
import os
import stat

import pytest

from util import atomic
from util.atomic import filled_folder, prepare_file, replaced_file


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("older")
    with replaced_file(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "older"
        assert temporary.parent == tmp_path
        assert temporary.suffix == ".png"
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["picture.png"]
    with pytest.raises(KeyboardInterrupt), replaced_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "newer"
    assert os.listdir(tmp_path) == ["picture.png"]


def test_links_and_devices_are_not_replaced_themselves(tmp_path):
    target = tmp_path / "target.png"
    target.write_text("older")
    link = tmp_path / "link.png"
    link.symlink_to(target)
    with replaced_file(link) as temporary:
        temporary.write_text("newer")
    assert link.is_symlink()
    assert target.read_text() == "newer"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with replaced_file(pipe) as temporary:
        assert temporary == pipe
    assert pipe.is_fifo()


@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_write_names_the_file(tmp_path, durable):
    path = tmp_path / "state.pth"
    with pytest.raises(OSError, match="No space left") as found, replaced_file(path, durable):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert found.value.errno == errno.ENOSPC
    assert found.value.filename == str(path)
    assert not any(tmp_path.iterdir())


def test_a_durable_file_is_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    path = tmp_path / "state.pth"
    existed = []  # at each sync

    def fsync(descriptor):
        existed.append(path.exists())
        os.fsync(descriptor)

    monkeypatch.replace_in(atomic, "os.fsync", fsync)
    with replaced_file(path, durable=True) as temporary:
        temporary.write_text("x")
    assert existed == [False, True]
    assert path.read_text() == "x"


@pytest.fixture
def fail_to_sync_folders(monkeypatch):
    """Returns a function: from its call on, the sync of a folder fails with this number."""

    def install(number):
        def fsync(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            os.fsync(descriptor)

        monkeypatch.replace_in(atomic, "os.fsync", fsync)

    return install


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_mount_that_cannot_sync_folders_is_written_to(tmp_path, fail_to_sync_folders, number):
    fail_to_sync_folders(number)
    with replaced_file(tmp_path / "state.pth", durable=True) as temporary:
        temporary.write_text("x")
    assert (tmp_path / "state.pth").read_text() == "x"


def test_a_new_folder_appears_as_a_whole(tmp_path):
    with filled_folder(tmp_path / "new") as temporary:
        (temporary / "a").write_text("1")
        assert temporary.parent.parent == tmp_path
        assert not (tmp_path / "new").exists()
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "usual").rmdir()
    assert os.listdir(tmp_path) == ["new"]
    assert (tmp_path / "new" / "a").read_text() == "1"


@pytest.fixture
def old_folder(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "a").write_text("older")
    (folder / "mine").write_text("older")
    return folder


def test_an_interrupted_filling_changes_nothing(tmp_path, old_folder):
    with pytest.raises(KeyboardInterrupt), filled_folder(old_folder) as temporary:
        (temporary / "a").write_text("never")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["old"]
    assert (old_folder / "a").read_text() == "older"


def test_why_a_path_cannot_be_written(tmp_path):
    prepare_file("--csv", None)
    prepare_file("--csv", tmp_path / "a" / "b" / "new.csv")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="^--csv"):
        prepare_file("--csv", tmp_path)
    with pytest.raises(OSError, match="file"):
        prepare_file("--csv", tmp_path / "file" / "b" / "new.csv")
