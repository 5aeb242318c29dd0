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
    assert version(project) == f"commit {head} + changes, files {source_hash(project)}"
    assert source_hash(project) != before


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


@pytest.mark.parametrize("start", ["__init__.py", "laplacian.py"])  # a package with and without __init__.py
def test_a_user_s_own_package_belongs_to_the_code(project, start):
    before = source_hash(project)
    (project / "mypkg" / "deep").mkdir(parents=True)
    for name in (start, "deep/loss.py"):
        (project / "mypkg" / name).write_text("x = 1\n")
    names = {str(path.relative_to(project)) for path in source_files(project)}
    assert names == {"main.py", "util/leaf.py", f"mypkg/{start}", "mypkg/deep/loss.py"}
    assert source_hash(project) != before


def test_data_results_environments_and_tests_are_no_code(project):
    before = source_files(project)
    for name in (
        "output/run/code/0123456789ab/main.py",
        "images/train/cat/walk.py",
        ".venv/setup.py",
        "venv/lib/python3.12/site-packages/torch/__init__.py",
        "tests/test_main.py",
        "util/__pycache__/leaf.pyc",
    ):
        (project / name).parent.mkdir(parents=True)
        (project / name).touch()
    assert source_files(project) == before
