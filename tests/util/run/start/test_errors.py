"""What a user reads when an error ends a run."""

import os
import signal
import sys

import pytest
import torch
from torch._utils import ExceptionWrapper

from tests.runs import pretrain
from util.data.images import ImageError
from util.run.cli import Parser
from util.run.start import errors
from util.run.start.errors import exit_on_setup_errors, is_full_gpu, refuse


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("'a.jpg' cannot be decoded: it is empty", "'a.jpg' cannot be decoded: it is empty"),
        ("'a.npy' has a large header.\n Give max_header_size.", "'a.npy' has a large header. Give max_header_size."),
        ("'a.jpg' is no image (OSError: broken)", "'a.jpg' is no image (OSError: broken)"),
    ],
)
def test_an_error_of_a_worker_is_its_whole_message_in_one_line(capsys, message, said):
    try:
        try:
            raise KeyError("before")
        except KeyError as error:
            raise ImageError(message) from error
    except ImageError:
        wrapper = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
    with pytest.raises(ImageError, match="Traceback") as from_worker:
        wrapper.reraise()
    with pytest.raises(SystemExit) as stop:
        refuse(Parser("main.py"), from_worker.value)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"main.py: error: {said}\n"


def test_a_full_gpu_ends_a_run_with_one_sentence(photos, tmp_path, capsys, before_step):
    def fill():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1")

    before_step(1, fill)
    message = pretrain.refused(capsys, photos, tmp_path / "out")
    assert "CUDA out of memory, in micro-batches of 8 images: lower --batch_size" in message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("NCCL error in: ProcessGroupNCCL.cpp: Cuda failure 2 'out of memory'", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("shape '[2, 3]' is invalid for input of size 5", False),
    ],
)
def test_memory_that_a_library_of_a_gpu_did_not_get_is_told_from_bugs(text, expected):
    assert is_full_gpu(RuntimeError(text)) == expected
    assert not is_full_gpu(ValueError(text))


def test_a_signal_in_the_set_up_removes_what_was_created_and_ends_the_process(tmp_path, monkeypatch):
    def die_of(number):
        assert signal.getsignal(number) == signal.SIG_DFL  # a second one would have killed the process
        raise SystemExit(-number)

    monkeypatch.setattr(errors, "die_of", die_of)
    with pytest.raises(SystemExit) as end, exit_on_setup_errors(Parser("main.py")) as set_up:
        set_up.lock_folder(set_up.create_folder(tmp_path / "new" / "deep"))
        set_up.handle_signals()
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == -signal.SIGTERM
    assert not (tmp_path / "new").exists()


def test_signals_have_their_default_action_after_the_set_up_and_other_handlers_stay():
    """submitit and Python itself have handlers."""
    before = signal.signal(signal.SIGUSR2, print)
    try:
        with exit_on_setup_errors(Parser("main.py")) as set_up:
            set_up.handle_signals()
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert signal.getsignal(signal.SIGUSR2) == print
            assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
            set_up.end()
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR2) == print
    finally:
        signal.signal(signal.SIGUSR2, before)
