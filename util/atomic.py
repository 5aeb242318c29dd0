"""Files that are replaced in one step: a reader, or a crash, never meets half of one."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of file systems that cannot sync a folder.
CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def replaced_file(path: str | os.PathLike[str], durable: bool = False) -> Iterator[Path]:
    """Yields a temporary path for the new content. It replaces `path` when the block ends without an error.

    The temporary file lies in the same folder and has the same suffix. If the block raises, `path` stays as it was. A
    link is followed. A path that is no regular file, such as a device, is written to directly.

    durable: wait until the content and the rename are on the disk. OSError of a failed write names `path`.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        yield target
        return
    temporary = target.with_name(f".{target.stem}.tmp-{os.getpid()}{target.suffix}")
    try:
        yield temporary
        if durable:
            sync(temporary)
        os.replace(temporary, target)
    except OSError as error:
        if error.filename not in (None, temporary, str(temporary)):  # an error of another file
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync(target.parent)  # the rename is written with the folder


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk. OSError names it.

    Some mounts cannot do that for folders, whose renames still count.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


@contextmanager
def filled_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder for new files. They move into the folder `path` when the block ends without an error.

    A new `path` appears as a whole. In an existing one the files replace those of the same names one by one, and other
    files stay. If the block raises, nothing has changed. The files are on the disk before they are moved. OSError of a
    failed write names `path`.
    """
    target = Path(path).resolve()
    outer = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))  # only its owner can read it
    temporary = outer / target.name
    try:
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        if target.exists():
            for file in sorted(temporary.iterdir()):
                os.replace(file, target / file.name)
            sync(target)
        else:
            sync(temporary)
            temporary.rename(target)
        sync(target.parent)
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(outer)):  # of another file
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        shutil.rmtree(outer, ignore_errors=True)


def prepare_file(flag: str, path: Path | None) -> None:
    """Creates the folder of a file that `flag` asks for. ValueError or OSError if it cannot be written.

    Programs call it before they compute for minutes. path: None if not given.
    """
    if path is None:
        return
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{flag} {str(path)!r} cannot be written")
