"""Files that are replaced in one step."""

import errno
import os
import stat

import pytest

from util import atomic
from util.atomic import filled_folder, replaced_file


@pytest.fixture
def path(tmp_path):
    """A file that holds "older", alone in its folder."""
    path = tmp_path / "picture.png"
    path.write_text("older")
    return path


def test_a_file_is_replaced_in_one_step(path):
    with replaced_file(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "older"
        assert temporary.parent == path.parent
        assert temporary.suffix == ".png"
    assert path.read_text() == "newer"
    assert os.listdir(path.parent) == ["picture.png"]


def test_an_interrupted_write_changes_nothing(path):
    with pytest.raises(KeyboardInterrupt), replaced_file(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "older"
    assert os.listdir(path.parent) == ["picture.png"]


def test_a_link_is_followed(path, tmp_path):
    link = tmp_path / "link.png"
    link.symlink_to(path)
    with replaced_file(link) as temporary:
        temporary.write_text("newer")
    assert link.is_symlink()
    assert path.read_text() == "newer"


def test_a_pipe_is_written_to_directly(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with replaced_file(pipe) as path:
        assert path == pipe
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize(
    ("error", "named"),
    [(OSError(errno.ENOSPC, "No space left"), "state.pth"), (FileNotFoundError(2, "missing", "other"), "other")],
)
def test_a_failed_write_names_the_file(tmp_path, durable, error, named):
    with pytest.raises(OSError) as raised, replaced_file(tmp_path / "state.pth", durable):
        raise error
    assert raised.value.errno == error.errno
    assert raised.value.filename.endswith(named)
    assert not any(tmp_path.iterdir())


def test_a_durable_file_is_synced_before_and_after_the_rename(path, monkeypatch):
    calls = []

    def note(name):
        function = getattr(os, name)

        def noted(*arguments):
            calls.append(name)
            return function(*arguments)

        monkeypatch.replace_in(atomic, f"os.{name}", noted)

    note("fsync")
    note("replace")
    with replaced_file(path, durable=True) as temporary:
        temporary.write_text("newer")
    assert calls == ["fsync", "replace", "fsync"]
    assert path.read_text() == "newer"


def test_a_new_folder_appears_as_a_whole(tmp_path):
    folder = tmp_path / "new"
    with filled_folder(folder) as temporary:
        (temporary / "a").write_text("1")
        assert temporary.parent.parent == tmp_path
        assert not folder.exists()
    assert os.listdir(tmp_path) == ["new"]
    assert (folder / "a").read_text() == "1"
    (tmp_path / "usual").mkdir()
    assert folder.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.fixture
def folder(tmp_path):
    """A folder with the files a and mine."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "a").write_text("older")
    (folder / "mine").write_text("older")
    return folder


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_an_interrupted_folder_stays_as_it_was(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt), filled_folder(folder) as temporary:
        (temporary / "a").write_text("never")
        raise KeyboardInterrupt
    assert contents(folder) == {"a": "older", "mine": "older"}
    assert os.listdir(tmp_path) == ["old"]


def test_files_of_an_existing_folder_stay(folder, tmp_path):
    with filled_folder(folder) as temporary:
        (temporary / "a").write_text("newer")
        (temporary / "b").write_text("newer")
        assert contents(folder) == {"a": "older", "mine": "older"}
    assert contents(folder) == {"a": "newer", "b": "newer", "mine": "older"}
    assert os.listdir(tmp_path) == ["old"]
