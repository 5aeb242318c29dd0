"""Which code a run is made with: the git commit, and a hash of the source files for code that is in no commit."""

import functools
import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = "code_version.json"  # inside a copy of the code, which has no git


def source_files(root: Path = ROOT) -> list[Path]:
    """The files that a training run is made of, sorted: the modules of the top level and everything in util/."""
    return sorted([*root.glob("*.py"), *(root / "util").rglob("*.py")])


def source_hash(root: Path = ROOT) -> str:
    """The first 12 digits of the SHA-256 over names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(root):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def code_version(root: Path = ROOT) -> str:
    """For people and for comparison: "commit 0123456789ab, files 89abcdef0123", or without a commit where none is known."""
    files = source_hash(root)
    commit = _commit(root)
    return f"commit {commit}, files {files}" if commit else f"files {files}"


def write_version(copy: Path, root: Path = ROOT) -> None:
    """Leaves the commit of `root` in a copy of its code."""
    (copy / RECORD).write_text(json.dumps({"commit": _commit(root)}) + "\n")


def _commit(root: Path) -> str | None:
    """The commit that is checked out, with "+ changes" where files differ from it; None where it is not known."""
    if (root / RECORD).exists():
        return json.loads((root / RECORD).read_text())["commit"]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        names = [str(path.relative_to(root)) for path in source_files(root)]
        return f"{head} + changes" if _git(root, "status", "--porcelain", "--", *names) else head
    except (OSError, subprocess.SubprocessError):  # no git here, or a repository that it does not trust
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
