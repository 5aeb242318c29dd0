"""The version of the code that a run uses: the git commit, and a hash of the source files."""

import functools
import hashlib
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_OF_A_RUN = ("scripts", "tests", "tools")  # no run imports them
VERSION_FILE = "code_version.json"  # in copies of the code, which have no git repository


def source_files(root: Path = ROOT) -> list[Path]:
    """The source files of a training run, sorted: the modules and packages in `root`, a user's own ones included.

    A package is a folder that holds a .py file itself. Folders of data, results and virtual environments do not.
    """
    files = [path for path in root.glob("*.py") if path.is_file()]
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in NOT_OF_A_RUN:
            files += _files_of_package(folder)
    return sorted(files)


def _files_of_package(folder: Path) -> list[Path]:
    """The .py files of a package and its subpackages; none if the folder is no package."""
    if folder.name.startswith("."):
        return []
    try:
        with os.scandir(folder) as entries:  # a folder of a million images is listed, but no file is asked for more
            inside = list(entries)
    except PermissionError:  # it cannot be imported, either
        return []
    files = [folder / entry.name for entry in inside if entry.name.endswith(".py") and entry.is_file()]
    if not files:
        return []
    for entry in inside:
        if entry.is_dir(follow_symlinks=False):  # a link may lead back
            files += _files_of_package(folder / entry.name)
    return files


def source_hash(root: Path = ROOT) -> str:
    """The first 12 digits of the SHA-256 of the names, relative to `root`, and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def code_version(root: Path = ROOT) -> str:
    """Returns "commit 0123456789ab, files 89abcdef0123", or only "files ..." if the commit is unknown."""
    files = source_hash(root)
    commit = _commit(root)
    if commit is None:
        return f"files {files}"
    return f"commit {commit}, files {files}"


def write_version(copy: Path, root: Path = ROOT) -> None:
    """Writes the commit of `root` into a copy of its code."""
    (copy / VERSION_FILE).write_text(json.dumps({"commit": _commit(root)}) + "\n")


def _commit(root: Path) -> str | None:
    """The commit that is checked out, with "+ changes" if source files differ from it. None if unknown."""
    if (root / VERSION_FILE).exists():
        return json.loads((root / VERSION_FILE).read_text())["commit"]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        names = [str(path.relative_to(root)) for path in source_files(root)]
        changes = _git(root, "status", "--porcelain", "--", *names)
    except (OSError, subprocess.SubprocessError):  # git is not installed, or does not trust the repository
        return None
    if changes:
        return f"{head} + changes"
    return head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
