"""Which checkpoint a run resumes from if the record of one is missing."""

import errno
import os

import pytest
import torch

from tests.locks import held_by_another_process
from tests.runs import info_of_run
from tests.two_processes import run_in_two_processes
from util import collectives
from util.run.errors import CheckpointError
from util.run.files import checkpoint, lock
from util.run.files.checkpoint import prune_checkpoints, read_checkpoint, save_checkpoint
from util.run.files.lock import is_held, lock_folder
from util.run.start.begin import refuse_separate_folders, remove_leftovers
from util.run.start.resume import find_checkpoint


def save(folder, step, value=0.0):
    """A checkpoint with all that a run saves."""
    folder.mkdir(exist_ok=True)
    state = {"model": {"w": torch.full((9,), value)}, "optimizer": {}}
    return save_checkpoint(folder, step, state, info_of_run(step).to_json())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-50])


def test_a_checkpoint_without_its_record_is_not_used_and_stays(tmp_path):
    """A kill between file and record costs the steps since the save before."""
    out = tmp_path / "out"
    path = save(out, 7, 3.5)
    path.with_suffix(".json").unlink()
    found, remarks = find_checkpoint(out, "auto")
    assert found is None
    assert "its .json is missing" in remarks[0]
    assert remarks[-1] == "warning: the run starts from step 0"
    start = save(tmp_path / "start", 2)
    found, remarks = find_checkpoint(out, str(start))
    assert found == start
    assert "warning: the run starts from step 0" not in remarks
    older = save(out, 5)
    assert find_checkpoint(out, "auto")[0] == older
    for step in (8, 9, 10):
        save(out, step)
        prune_checkpoints(out, [step - 1, step])
    assert read_checkpoint(path).weights["w"][0] == 3.5
    assert "checkpoint-8.pth" not in names(out)


def test_a_record_that_cannot_be_read_now_is_not_missing(tmp_path):
    """The next start may read it. An older checkpoint would cost the steps since then."""
    save(tmp_path, 5)
    record = save(tmp_path, 7).with_suffix(".json")
    record.unlink()
    record.mkdir()  # to read it is an error, and not that it is missing
    with pytest.raises(IsADirectoryError):
        find_checkpoint(tmp_path, "auto")


def test_a_finished_checkpoint_that_is_damaged_never_leads_to_a_start_from_scratch(tmp_path):
    cut_off(save(tmp_path, 3))
    torch.save({}, tmp_path / "checkpoint-6.pth")
    with pytest.raises(CheckpointError, match="is intact .*checkpoint-6.pth: its .json is missing.*remove them"):
        find_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize(
    ("rank", "is_named", "num_hashes"),
    [
        (0, False, 1),
        (1, False, 2),
        (0, True, 1),
    ],
)
def test_rank_0_hashes_a_checkpoint_once(tmp_path, monkeypatch, rank, is_named, num_hashes):
    """As it chooses the file. Other ranks hash it as they read it."""
    saved = save(tmp_path / "first", 7)
    out = saved.parent
    if is_named:
        out = tmp_path / "out"
        out.mkdir()
    sha256 = checkpoint.sha256
    hashed = []

    def note(path):
        hashed.append(path)
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", note)
    path, _ = find_checkpoint(out, str(saved))
    checkpoint.read_checkpoint(path, is_verified=rank == 0)
    assert hashed == [saved] * num_hashes


def test_a_folder_that_cannot_be_written_to_is_the_users_error(tmp_path, monkeypatch):
    monkeypatch.replace_in(lock, "tempfile.TemporaryFile", fails_with(errno.EROFS))
    with pytest.raises(ValueError, match="cannot be written to .*choose another folder"):
        lock.make_writable_folder(tmp_path)


def test_a_storage_that_fails_may_work_later(tmp_path, monkeypatch):
    monkeypatch.replace_in(lock, "tempfile.TemporaryFile", fails_with(errno.ESTALE))
    with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
        lock.make_writable_folder(tmp_path)


def fails_with(number):
    def fail(**_):
        raise OSError(number, os.strerror(number))

    return fail


def _outcomes_of_failures_on_rank_1(rank):
    """The error of each rank after another kind of error on rank 1."""
    outcomes = []
    for error in (OSError(errno.ESTALE, "stale"), PermissionError(errno.EACCES, "denied"), ValueError("wrong")):

        def work(error=error):
            if rank == 1:
                raise error

        try:
            collectives.run_everywhere(work)
        except (ValueError, OSError) as raised:
            outcomes.append(type(raised))
    return outcomes


def test_a_storage_that_fails_on_one_rank_is_no_error_of_the_user_on_another():
    assert run_in_two_processes(_outcomes_of_failures_on_rank_1)[0] == [OSError, ValueError, ValueError]


def test_a_killed_export_into_the_folder_of_a_run_does_not_end_its_next_start(tmp_path):
    (tmp_path / ".checkpoint-7.tmp-1.pth").touch()
    (tmp_path / ".encoder.tmp-x1").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".encoder.tmp-x1"]


def _outcomes_of_folders(rank, shared, disks):
    """What each rank says of folders, of which rank 0 has locked its own."""
    outcomes = []
    locked = []
    for folder in (shared, disks[rank]):
        if rank == 0:
            locked.append(lock_folder(folder))
        try:
            refuse_separate_folders(folder)
            outcomes.append("shared")
        except ValueError:
            outcomes.append("not shared")
        if rank == 1:  # rank 0 still has its lock
            outcomes.append(is_held(folder))
    return outcomes


def test_the_lock_of_an_earlier_run_on_a_disk_of_its_own_is_not_that_of_rank_0(tmp_path):
    shared, *disks = [tmp_path / name for name in ("shared", "disk0", "disk1")]
    for folder in (shared, *disks):
        folder.mkdir()
        (folder / ".lock").write_text("process 1 on another-node\n")
    ours, theirs = run_in_two_processes(_outcomes_of_folders, shared, disks)
    assert ours == ["shared", "not shared"]
    assert theirs == ["shared", True, "not shared", False]


def test_a_folder_that_another_host_has_may_be_free_later(tmp_path):
    """A file server may keep the lock of a lost node: the launcher starts the run again."""
    with held_by_another_process(tmp_path / "out"):
        (tmp_path / "out" / ".lock").write_text("process 7 on another-node\n")
        with pytest.raises(OSError, match="in use by process 7 on another-node"):
            lock_folder(tmp_path / "out")


def test_a_look_at_a_lock_does_not_take_it(tmp_path):
    assert not is_held(tmp_path / "none")
    with held_by_another_process(tmp_path / "out"):
        assert is_held(tmp_path / "out")
        with pytest.raises(ValueError, match="in use by process"):
            lock_folder(tmp_path / "out")
    assert not is_held(tmp_path / "out")
    lock_folder(tmp_path / "out")[0].close()
