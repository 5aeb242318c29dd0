"""Files that are replaced in one step."""

import errno
import os
import stat

import pytest

from util import atomic
from util.atomic import filled_folder, replaced_file


def test_a_file_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "picture.png"
    path.write_text("older")
    with replaced_file(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "older" and temporary.parent == tmp_path and temporary.suffix == ".png"
    assert path.read_text() == "newer" and os.listdir(tmp_path) == ["picture.png"]
    with pytest.raises(KeyboardInterrupt), replaced_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "newer" and os.listdir(tmp_path) == ["picture.png"]


def test_links_and_devices_are_not_replaced_themselves(tmp_path):
    link, target = tmp_path / "link.png", tmp_path / "target.png"
    target.write_text("older")
    link.symlink_to(target)
    with replaced_file(link) as temporary:
        temporary.write_text("newer")
    assert link.is_symlink() and target.read_text() == "newer"
    os.mkfifo(tmp_path / "pipe")
    with replaced_file(tmp_path / "pipe") as path:
        assert path == tmp_path / "pipe"
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("durable", [False, True])
def test_a_failed_write_names_the_file(tmp_path, durable):
    path = tmp_path / "state.pth"
    for error in (OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError(2, "missing", "other")):
        with pytest.raises(OSError) as found, replaced_file(path, durable):
            raise error
        assert found.value.errno == error.errno and found.value.filename == (error.filename or str(path))
    assert not any(tmp_path.iterdir())


def test_a_durable_file_is_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.replace_in(atomic, "os.fsync", lambda descriptor: (calls.append("fsync"), fsync(descriptor)))
    monkeypatch.replace_in(atomic, "os.replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    with replaced_file(tmp_path / "state.pth", durable=True) as temporary:
        temporary.write_text("x")
    assert calls == ["fsync", "replace", "fsync"] and (tmp_path / "state.pth").read_text() == "x"


def test_a_new_folder_appears_as_a_whole(tmp_path):
    with filled_folder(tmp_path / "new") as temporary:
        (temporary / "a").write_text("1")
        assert temporary.parent.parent == tmp_path and not (tmp_path / "new").exists()
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "usual").rmdir()
    assert os.listdir(tmp_path) == ["new"] and (tmp_path / "new" / "a").read_text() == "1"


def test_files_of_an_existing_folder_stay(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    for name in ("a", "mine"):
        (folder / name).write_text("older")
    with pytest.raises(KeyboardInterrupt), filled_folder(folder) as temporary:
        (temporary / "a").write_text("never")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["old"] and (folder / "a").read_text() == "older"
    with filled_folder(folder) as temporary:
        (temporary / "a").write_text("newer")
        (temporary / "b").write_text("newer")
        assert (folder / "a").read_text() == "older"
    assert {name: (folder / name).read_text() for name in os.listdir(folder)} == dict(
        a="newer", b="newer", mine="older"
    )
    assert os.listdir(tmp_path) == ["old"]
