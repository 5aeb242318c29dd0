"""Files of object storage and others, by fsspec, with the credentials that the library of each protocol finds."""

import errno
import os
from functools import cache
from typing import Any

import fsspec

from util.data.remote import MAX_READS, joined
from util.urls import redact


class ObjectStore:
    """See `Store`. ValueError if a package is missing."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        scheme = url.partition("://")[0]
        try:
            fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:  # a missing package, an unknown protocol
            raise ValueError(f"--data_path {url!r} cannot be read: {error}") from error

    def read(self, name: str, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        try:
            system, root = system_of(self.url, os.getpid())
            data = system.cat_file(joined(root, name), start=offset, end=offset + size)
        except FileNotFoundError as error:
            raise OSError(errno.ENOENT, f"{self.url}: there is no {redact(str(error))}") from error
        except Exception as error:  # of many types, those of the library
            number = errno.EIO
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                number = errno.EACCES
            raise OSError(number, f"{self.url}: {type(error).__name__}: {redact(str(error))}") from error
        if len(data) != size:
            raise OSError(errno.EIO, f"{self.url}/{name}: {len(data)} bytes came instead of {size}")
        return data


@cache
def system_of(url: str, process: int) -> tuple[Any, str]:
    """Returns (file system, folder in it) of a process: a forked one must not use the connections of its parent."""
    options: dict[str, Any] = {"skip_instance_cache": True}
    if url.startswith("s3:"):
        options["config_kwargs"] = {"max_pool_connections": MAX_READS}
    return fsspec.core.url_to_fs(url, **options)
