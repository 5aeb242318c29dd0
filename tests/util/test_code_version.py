import subprocess

import pytest

from util.code_version import code_version, source_files, source_hash, write_version


@pytest.fixture
def project(tmp_path):
    """A repository with one commit of two source files."""
    root = tmp_path / "project"
    (root / "util").mkdir(parents=True)
    (root / "main.py").write_text("x = 1\n")
    (root / "util" / "leaf.py").write_text("y = 1\n")
    for arguments in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", "-C", root, *arguments], check=True)
    return root


def version(root):
    return code_version.__wrapped__(root)  # without its cache


def test_the_commit_and_whether_files_differ_from_it(project):
    head = subprocess.run(["git", "-C", project, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    assert version(project) == f"commit {head}, files {source_hash(project)}"
    (project / "notes.txt").write_text("no source")
    assert "+ changes" not in version(project)
    before = source_hash(project)
    (project / "new.py").write_text("z = 1\n")
    assert (
        version(project) == f"commit {head} + changes, files {source_hash(project)}" and source_hash(project) != before
    )


def test_a_copy_reports_the_commit_that_it_was_made_from(project, tmp_path):
    copy = tmp_path / "copy"
    for path in source_files(project):
        (copy / path.relative_to(project)).parent.mkdir(parents=True, exist_ok=True)
        (copy / path.relative_to(project)).write_bytes(path.read_bytes())
    assert version(copy) == f"files {source_hash(project)}"
    write_version(copy, project)
    assert version(copy) == version(project)
    (copy / "util" / "leaf.py").write_text("y = 2\n")
    assert version(copy) != version(project)


def test_a_renamed_file_changes_the_hash(project):
    before = source_hash(project)
    (project / "main.py").rename(project / "main2.py")
    assert source_hash(project) != before
