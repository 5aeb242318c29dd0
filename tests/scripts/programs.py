"""Run scripts and mains like `python FILE`, but in a fork, which has imported torch already."""

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import submitit_launch  # noqa: F401
from downstream.probe import main_probe  # noqa: F401  (imports all libraries before the forks)

ROOT = Path(__file__).resolve().parents[2]
FILES = [*ROOT.glob("scripts/*.py"), *ROOT.glob("tools/*.py")]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in FILES if "__main__" in path.read_text())
MAIN_FILES = [*ROOT.glob("main_*.py"), ROOT / "submitit_launch.py", *ROOT.glob("downstream/*/main_*.py")]
MAINS = sorted(path.relative_to(ROOT).as_posix() for path in MAIN_FILES)


def run_file(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python ROOT/name arguments` in a fork of this process, which imports the project's modules again.

    As in `subprocess`, returncode is negative if a signal ended the program.
    """
    command = [str(ROOT / name), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if (pid := os.fork()) == 0:
            _become(command, cwd, out.fileno(), err.fileno())
        try:
            _, status = os.waitpid(pid, 0)
        except BaseException:  # the time of the test is over
            os.kill(pid, signal.SIGKILL)
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), out.read(), err.read())


def _become(command: list[str], cwd: Path, out: int, err: int) -> None:
    """Run `command` in this process as a new interpreter would, then end the process."""
    code = 1
    try:
        os.chdir(cwd)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        sys.argv = command
        sys.path = [str(Path(command[0]).parent), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(ROOT) and "site-packages" not in file.parts:
                del sys.modules[name]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
