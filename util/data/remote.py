"""Reads ranges of files behind a URL. A failure is an OSError, and nothing longer than a range comes into memory.

http and https have a reader of their own, since fsspec's takes the whole body of any answer. hf:// is read by it, too.
All other protocols are fsspec's.

A process opens connections and file systems for itself: before a fork they are closed.
"""

import asyncio
import atexit
import base64
import errno
import gc
import http.client
import netrc
import os
import re
import ssl
import threading
import time
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from util.data.images import retry_io
from util.lazy import LazyModule
from util.urls import redact, with_secrets

fsspec = LazyModule("fsspec")
hub = LazyModule("huggingface_hub")

WAITS = (0.1, 0.3, 1.0, 3.0, 8.0, 10.0)  # seconds between tries; SLURM kills 30 after a signal
MAX_READS = 32  # at once
MAX_BYTES = 2**25  # that are read, or wait to be used, at once
PIECE = 2**23  # bytes of a large file that are read at once
TIMEOUT = 12  # seconds without a byte
SLOWEST = 100_000  # bytes per second, after the first TIMEOUT seconds
PACKAGES = {"s3": ": pip install s3fs", "gs": ": pip install gcsfs", "az": ": pip install adlfs"}
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
STATUS_ERRORS = {401: errno.EACCES, 403: errno.EACCES, 408: errno.EIO, 429: errno.EIO}
CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class WrongAnswer(OSError):
    """The storage answers, but with other bytes than it was asked for, or that there is no such file (ENOENT)."""


def open_store(url: str) -> "Store":
    """Returns the files below a URL. Nothing is read. ValueError if a package is missing."""
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        return HttpStore(with_secrets(url))
    if scheme == "hf":
        return open_hub(url)
    return ObjectStore(url)


def read(store: "Store", name: str, offset: int, size: int, file_size: int | None = None) -> bytes:
    """Reads from a store. Tries again within 22 seconds, with growing waits."""
    return retry_io(lambda: store.read(name, offset, size, file_size), WAITS, sum(WAITS))


def joined(*parts: str) -> str:
    return "/".join(part for part in parts if part)


_open_stores: weakref.WeakSet[Any] = weakref.WeakSet()


def close_stores() -> None:
    """Closes what this process has open: a forked one opens its own."""
    for store in list(_open_stores):
        store.close()


os.register_at_fork(before=close_stores)
atexit.register(close_stores)


# -------------------------------------------------------------------------------------------------------------- http


class HttpStore:
    """Files of a web server that answers range requests. It has no listing.

    url: may hold a user name and a password, and a query that is appended to each file's address. Without them, a login
    of ~/.netrc is used. headers: further ones for this server. Other hosts, to which it redirects, get none of them.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.secret_url = url
        self.headers = dict(headers or {})
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self.site = (parts.scheme, host)
        self.folder = parts.path.rstrip("/")
        self.query = parts.query
        self.url = urlunsplit((parts.scheme, host, self.folder, "", ""))
        login = find_login(parts.hostname or "", parts.username, parts.password)
        if login and "Authorization" not in self.headers:
            self.headers["Authorization"] = basic(login)
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        _open_stores.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return HttpStore, (self.secret_url, self.headers)

    def sizes(self, folder: str) -> dict[str, int] | None:
        """Returns the bytes of the files in a folder, by one listing; None if there is no listing."""
        return None

    def close(self) -> None:
        """Closes connections. The next read opens them again."""
        while self._idle:
            _, connections = self._idle.popitem()
            for connection in connections:
                connection.close()

    def read(self, name: str, offset: int, size: int, file_size: int | None = None) -> bytes:
        """Returns `size` bytes of a file. One try; OSError if it fails.

        WrongAnswer if others come, or if the file is not there or known not to have `file_size` bytes.
        """
        if size == 0:
            return b""
        next_site = self.site
        target = urlunsplit(("", "", f"{self.folder}/{quote(name)}", self.query, ""))
        for _ in range(5):
            site = next_site
            headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
            if site == self.site:
                headers |= self.headers
            connection, response = self._ask(site, target, headers)
            try:
                if response.status in (301, 302, 303, 307, 308):
                    response.read1(PIECE)  # a longer body is not wanted
                    next_site, target = follow(site, target, response)
                    continue
                return read_body(response, f"{self.url}/{name}", offset, size, file_size)
            except http.client.HTTPException as error:
                raise WrongAnswer(errno.EIO, f"{self.url}/{name} cannot be read: {error!r}") from error
            finally:
                is_used_up = response.isclosed() or response.length == 0
                response.close()
                if is_used_up and not response.will_close:
                    self._idle.setdefault(site, []).append(connection)
                else:
                    connection.close()
        raise WrongAnswer(errno.EIO, f"{self.url}/{name} is redirected too often")

    def _ask(
        self, site: tuple[str, str], target: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends a request. A connection that the server has closed meanwhile is replaced."""
        while True:
            try:
                connection = self._idle[site].pop()
            except (KeyError, IndexError):
                connection = make_connection(site)
            is_new = connection.sock is None
            try:
                connection.request("GET", target, headers=dict(headers))
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                connection.close()
                if isinstance(error, ConnectionError) and not is_new:
                    continue
                problem = f"{'://'.join(site)} does not answer: {error!r}"
                if isinstance(error, ssl.SSLCertVerificationError):  # another try would meet it again
                    raise WrongAnswer(errno.EACCES, problem) from error
                raise OSError(errno.EIO, problem) from error


def make_connection(site: tuple[str, str]) -> http.client.HTTPConnection:
    """Returns a connection that is not open yet: of https through the proxy of HTTPS_PROXY, if there is one."""
    scheme, host = site
    proxy = urllib.request.getproxies().get("https")
    parts = urlsplit(f"//{host}")
    if scheme != "https" or not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return CONNECTIONS[scheme](host, timeout=TIMEOUT)
    proxy_parts = urlsplit(f"//{proxy.rpartition('://')[2]}")
    headers = {}
    if proxy_parts.username is not None:
        headers["Proxy-Authorization"] = basic(f"{unquote(proxy_parts.username)}:{unquote(proxy_parts.password or '')}")
    connection = http.client.HTTPSConnection(proxy_parts.hostname or "", proxy_parts.port or 80, timeout=TIMEOUT)
    connection.set_tunnel(parts.hostname or "", parts.port or 443, headers)
    return connection


def basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def find_login(host: str, user: str | None, password: str | None) -> str | None:
    """Returns `user:password` of a URL, or else of ~/.netrc (or NETRC) for its host."""
    if user is not None:
        return f"{unquote(user)}:{unquote(password or '')}"
    with suppress(OSError, netrc.NetrcParseError):
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        if found is not None:
            return f"{found[0]}:{found[2]}"
    return None


def follow(site: tuple[str, str], target: str, response: http.client.HTTPResponse) -> tuple[tuple[str, str], str]:
    """Returns site and target of a redirect. WrongAnswer if it leaves TLS, or leads to no address."""
    scheme, host = site
    place = f"{scheme}://{host}"
    try:
        parts = urlsplit(urljoin(f"{place}{target}", response.headers.get("Location", "")))
        is_address = bool(parts.hostname) and parts.port != 0  # ValueError if the port is no number
        next_target = urlunsplit(("", "", parts.path, parts.query, ""))
        next_target = quote(next_target.encode("latin-1"), safe="%/?#[]@!$&'()*+,;=:~")  # spaces, letters of UTF-8
    except ValueError:
        is_address = False
    if not is_address:
        raise WrongAnswer(errno.EIO, f"{place} redirects to what is no address")
    if parts.scheme not in ("https", scheme):
        raise WrongAnswer(errno.EIO, f"{place} redirects to {parts.scheme}://{parts.hostname}")
    return (parts.scheme, parts.netloc.rpartition("@")[2]), next_target


def read_body(
    response: http.client.HTTPResponse, url: str, offset: int, size: int, file_size: int | None = None
) -> bytes:
    """Returns the `size` bytes of an answer; errors as of `HttpStore.read`. It reads at most one byte more."""
    status = f"{url}: the server answers {response.status} {response.reason}"
    if response.status in STATUS_ERRORS or response.status >= 500:
        raise OSError(STATUS_ERRORS.get(response.status, errno.EIO), status)
    if response.status == 404:
        raise WrongAnswer(errno.ENOENT, status)
    if response.status != 206:
        raise WrongAnswer(errno.EIO, f"{status} to a request of a range, which needs 206")
    content_range = response.headers.get("Content-Range", "none")
    length = response.headers.get("Content-Length", str(size))
    parts = CONTENT_RANGE.fullmatch(content_range)
    if parts is None or (int(parts[1]), int(parts[2])) != (offset, offset + size - 1) or length != str(size):
        raise WrongAnswer(errno.EIO, f"{url}: the server answers with {length} bytes of the range {content_range}")
    if file_size is not None and parts[3] not in ("*", str(file_size)):
        raise WrongAnswer(errno.EIO, f"{url} has {parts[3]} bytes; {file_size} bytes were indexed")
    deadline = time.monotonic() + TIMEOUT + size / SLOWEST
    data = bytearray()
    while len(data) <= size:
        part = response.read1(size + 1 - len(data))
        if not part:
            break
        data += part
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"{url}: the server sends less than {SLOWEST} bytes per second")
    if len(data) != size:
        raise WrongAnswer(errno.EIO, f"{url}: the server sent {len(data)} of {size} bytes")
    return bytes(data)


def open_hub(url: str) -> HttpStore:
    """Returns the files of a folder in a data set of the Hugging Face Hub, whose login is used."""
    parts = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?(.*)", url)
    if parts is None:
        raise ValueError(f"--data_path {url!r}: expected is hf://datasets/OWNER/NAME or .../NAME@COMMIT, and a folder")
    repository, commit, folder = parts.groups()
    try:
        token = hub.get_token()
    except ImportError as error:
        raise ValueError(f"--data_path {url!r} needs a package: pip install huggingface_hub") from error
    headers = {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    address = joined(hub.HfApi().endpoint, "datasets", repository, "resolve", quote(commit or "main", ""), folder)
    return HttpStore(address, headers)


# ------------------------------------------------------------------------------------------------------------ fsspec


class ObjectStore:
    """Files that fsspec reads, with the credentials that its library finds. ValueError if a package is missing."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._lock = threading.Lock()
        self._file_system: Any = None
        self._root = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        scheme = url.partition("://")[0]
        try:
            self._type = fsspec.get_filesystem_class(scheme)
        except (ImportError, ValueError) as error:  # a missing package, an unknown protocol
            advice = PACKAGES.get(scheme, "")
            raise ValueError(f"--data_path {url!r} cannot be read: {error}{advice}") from error
        _open_stores.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.url,)

    def _open(self) -> tuple[Any, str]:
        """Returns the file system, and the root in it. It has a thread of its own, which can be ended before a fork."""
        with self._lock:
            if self._file_system is None:
                options: dict[str, Any] = {"skip_instance_cache": True}
                if self._type.async_impl:
                    self._loop = asyncio.new_event_loop()
                    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
                    self._thread.start()
                    options["loop"] = self._loop
                if self._type.protocol[0] == "s3":
                    options["config_kwargs"] = {"max_pool_connections": MAX_READS}
                self._file_system, self._root = fsspec.core.url_to_fs(self.url, **options)
            return self._file_system, self._root

    def close(self) -> None:
        self._file_system = None
        if self._loop is not None and self._thread is not None:
            gc.collect()  # a file system closes its connections when it is freed, and lies in cycles
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    def sizes(self, folder: str) -> dict[str, int] | None:
        """As of `HttpStore`, and so are `read` and `close`."""
        files = self._try(lambda system, root: system.ls(joined(root, folder), detail=True))
        return {file["name"].rpartition("/")[2]: file["size"] for file in files}

    def read(self, name: str, offset: int, size: int, file_size: int | None = None) -> bytes:
        if size == 0:
            return b""
        data = self._try(lambda system, root: system.cat_file(joined(root, name), start=offset, end=offset + size))
        if len(data) != size:
            raise WrongAnswer(errno.EIO, f"{self.url}/{name}: {len(data)} of {size} bytes came")
        return data

    def _try(self, work: Callable[[Any, str], Any]) -> Any:
        """Calls `work(file system, root)`. Libraries have errors of their own, which become an OSError."""
        try:
            return work(*self._open())
        except FileNotFoundError as error:
            raise WrongAnswer(errno.ENOENT, f"{self.url}: there is no {redact(str(error))}") from error
        except Exception as error:
            number = errno.EIO
            if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                number = errno.EACCES
            raise OSError(number, f"{self.url}: {type(error).__name__}: {redact(str(error))}") from error


Store = HttpStore | ObjectStore


# -------------------------------------------------------------------------------------------------------- read ahead


class ReadAhead:
    """Reads things in their order before they are asked for, at most MAX_READS and MAX_BYTES at once.

    read: returns the bytes of a thing. sizes: of all things, in order.
    """

    def __init__(self, read: Callable[[int], bytes], sizes: Mapping[int, int]) -> None:
        self.read = read
        self.sizes = sizes
        self.waiting = deque(sizes)
        self.begun: dict[int, Future[bytes]] = {}
        self.pool = ThreadPoolExecutor(MAX_READS)  # its threads end before any fork
        self._begin()

    def take(self, thing: int) -> bytes:
        """Returns the bytes of a thing, once; it may be none of those. Raises what its `read` has raised."""
        future = self.begun.pop(thing, None)
        if future is None:
            return self.read(thing)
        try:
            return future.result()
        finally:
            self._begin()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the reads that have begun, unless a signal ends the process: they may take minutes."""
        self.begun.clear()
        self.pool.shutdown(wait=kind is None or issubclass(kind, Exception), cancel_futures=True)

    def _begin(self) -> None:
        while self.waiting and len(self.begun) < MAX_READS:
            thing = self.waiting[0]
            num_bytes = sum(self.sizes[other] for other in self.begun) + self.sizes[thing]
            if self.begun and num_bytes > MAX_BYTES:
                break
            self.begun[self.waiting.popleft()] = self.pool.submit(self.read, thing)
