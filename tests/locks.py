"""An output folder that another process holds."""

import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def held_by_another_process(folder):
    """Locks the folder in a process that is killed in the end. Yields what the error of a second run says."""
    folder.mkdir()
    program = f"from util.run.folder import FolderLock\nlock = FolderLock({str(folder)!r})\n"
    program += "print('held', flush=True)\ninput()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) as other:
        assert other.stdout.readline() == "held\n"
        yield f"is in use by process {other.pid} on {socket.gethostname()}: wait"
        other.kill()
