"""How programs end: exit codes, signals, and what a user reads."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import pretrain
from util.run.cli import Parser
from util.run.exits import CheckpointError, is_full_gpu, user_errors


def test_a_full_gpu_ends_a_run_with_one_sentence(photos, tmp_path, capsys, before_step):
    def fill():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1")

    before_step(1, fill)
    message = pretrain.refused(capsys, photos, tmp_path / "out")
    assert "CUDA out of memory, in micro-batches of 8 images: lower --batch_size" in message
    assert len(message.strip().splitlines()) == 1


def test_a_bug_in_training_is_no_error_of_the_user(photos, tmp_path, before_step):
    def fail():
        raise ValueError("a bug")

    before_step(1, fail)
    with pytest.raises(ValueError, match="a bug"):
        pretrain(photos, tmp_path / "out")


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


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("first line\n    second line\n\nthird"), 2, "first line second line third"),
        (FileNotFoundError(2, "No such file or directory", "/no/where"), 2, "/no/where"),
        (CheckpointError("is damaged"), 4, "is damaged"),
        (OSError("the disk is gone"), 75, "the disk is gone"),
        (PermissionError(13, "Permission denied", "/no/where"), 2, "/no/where"),
        (FloatingPointError("not finite"), 3, "not finite"),
        (OSError(28, "No space left on device", "out.pth"), 75, "out.pth"),  # which may pass
        (OSError(5, "Input/output error"), 75, "Input/output error"),
    ],
)
def test_errors_of_users_and_of_the_storage(capsys, error, code, message):
    with pytest.raises(SystemExit) as stop, user_errors(Parser("x.py", "")):
        raise error
    assert stop.value.code == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "--help_all" not in shown  # it is for errors of flags


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), KeyboardInterrupt()])
def test_other_errors_pass(error):
    with pytest.raises(type(error)), user_errors(Parser("x.py", "")):
        raise error


ROOT = Path(__file__).resolve().parents[3]


def run_main(body, **options):
    """Runs a program whose main has this body, and returns the finished process."""
    lines = ["import os, signal, sys, time", "from util.run.exits import run_program", "def main():", f"    {body}"]
    code = "\n".join([*lines, "run_program(main, 'x.py')"])
    options = {"capture_output": True, **options}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=900, **options)


def test_ctrl_c_stops_a_loop_of_a_shell():
    """As on a terminal, the shell gets SIGINT, too. After a program with exit code 130 it would continue."""
    code = "from util.run.exits import run_program\nimport os, signal, time\ndef main():\n"
    code += "    os.killpg(0, signal.SIGINT); time.sleep(60)\nrun_program(main, 'x.py')"
    command = ["bash", "-c", 'for i in 1 2 3; do echo $i; "$0" -c "$1"; done', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, start_new_session=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "1\n", "x.py: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of its parent's death")
@pytest.mark.parametrize(("environment", "number"), [({"TORCHELASTIC_RUN_ID": "none"}, signal.SIGTERM), ({}, 0)])
def test_only_processes_of_torchrun_end_with_their_parent(environment, number):
    """A run that nohup has started outlives its shell."""
    ask = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    done = run_main(ask, env=os.environ | environment)  # 2: PR_GET_PDEATHSIG
    assert (done.returncode, done.stdout) == (0, f"{int(number)}\n"), done.stderr


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(("body", "code"), [("sys.exit(2)", 2), ("raise KeyError('a bug')", 1), ("pass", 0)])
def test_a_failed_process_does_not_wait_for_the_other_ranks_of_nccl(backend, body, code):
    """The interpreter's end, which runs what atexit holds, would wait for them."""
    group = f"SimpleNamespace(is_initialized=lambda: True, get_backend=lambda: '{backend}')"
    begin = "import atexit; from types import SimpleNamespace; atexit.register(print, 'the end'); "
    done = run_main(f"{begin}sys.modules['torch.distributed'] = {group}; {body}")
    assert done.returncode == code
    assert done.stdout == ("" if backend == "nccl" and code else "the end\n")
    assert ("KeyError: 'a bug'" in done.stderr) == (code == 1)


def test_a_closed_pipe_ends_a_program_silently():
    reader, writer = os.pipe()
    os.close(reader)
    inside = "from argparse import ArgumentParser; from util.run.exits import user_errors\n    "
    inside += "with user_errors(ArgumentParser()): print('x' * 99999, flush=True)"
    for body in (inside, "print('x')", "[print('x' * 80) for _ in range(5000)]", "print('x'); sys.exit(0)"):
        done = run_main(body, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")
    os.close(writer)


@pytest.mark.parametrize(("outcome", "code"), [("False", 75), ("None", 0), ("True", 0), ("sys.exit(3)", 3)])
def test_exit_codes(outcome, code):
    done = run_main(f"return {outcome}")
    assert (done.returncode, done.stderr) == (code, "")
