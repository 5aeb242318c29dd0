"""The version of the code that a run uses: the git commit, and a hash of the source files."""

import functools
import hashlib
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("util", "encoders", "frameworks", "downstream")
RECORD = "code_version.json"  # in copies of the code, which have no git repository


def source_files(root: Path = ROOT) -> list[Path]:
    """The source files of a training run, sorted: the modules of the top level and of PACKAGES."""
    return sorted([*root.glob("*.py"), *(path for name in PACKAGES for path in (root / name).rglob("*.py"))])


def source_hash(root: Path = ROOT) -> str:
    """The hash of `source_files`."""
    return files_hash(source_files(root), root)


def files_hash(paths: Iterable[Path], root: Path) -> str:
    """The first 12 digits of the SHA-256 of the files' names, relative to `root`, and contents."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def code_version(root: Path = ROOT) -> str:
    """Returns "commit 0123456789ab, files 89abcdef0123", or only "files ..." if the commit is unknown."""
    files = source_hash(root)
    commit = _commit(root)
    return f"commit {commit}, files {files}" if commit else f"files {files}"


def write_version(copy: Path, root: Path = ROOT) -> None:
    """Writes the commit of `root` into a copy of its code."""
    (copy / RECORD).write_text(json.dumps({"commit": _commit(root)}) + "\n")


def _commit(root: Path) -> str | None:
    """The commit that is checked out, with "+ changes" if source files differ from it. None if unknown."""
    if (root / RECORD).exists():
        return json.loads((root / RECORD).read_text())["commit"]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        names = [str(path.relative_to(root)) for path in source_files(root)]
        return f"{head} + changes" if _git(root, "status", "--porcelain", "--", *names) else head
    except (OSError, subprocess.SubprocessError):  # git is not installed, or does not trust the repository
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
