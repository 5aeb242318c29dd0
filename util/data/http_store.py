"""Files of web servers that answer range requests, by `requests`: certificates, proxies and ~/.netrc are as there.

fsspec's HTTP is not used: it reads an answer to its end, also a whole shard from a server without ranges, and takes the
bytes of another range. Its file system of the Hub reads one range after another.
"""

import errno
import os
import re
from functools import cache
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from urllib3.exceptions import HTTPError

from util.data.remote import MAX_READS, TIMEOUT, joined
from util.urls import redact, with_secrets

STATUS_ERRORS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 410: errno.ENOENT}


class BearerAuth(AuthBase):
    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


class HttpStore:
    """See `Store`. There is no listing.

    url: may hold a user name and a password, and a query that is appended to each file's address. auth: a login instead
    of the URL's. Without any, `requests` looks into ~/.netrc. Other hosts, to which the server redirects, get neither.
    """

    def __init__(self, url: str, auth: AuthBase | None = None) -> None:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        self.url = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self.query = parts.query
        self.auth = auth
        if auth is None and parts.username is not None:
            self.auth = HTTPBasicAuth(unquote(parts.username).encode(), unquote(parts.password or "").encode())

    def sizes(self, folder: str) -> dict[str, int] | None:
        return None

    def read(self, name: str, offset: int, size: int, file_size: int | None = None) -> bytes:
        if size == 0:
            return b""
        place = f"{self.url}/{name}"
        address = f"{self.url}/{quote(name)}"
        if self.query:
            address += f"?{self.query}"
        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        try:
            with session_of(os.getpid()).get(
                address, headers=headers, auth=self.auth, timeout=TIMEOUT, stream=True
            ) as response:
                check_answer(response, place, offset, size, file_size)
                data = response.raw.read(size + 1)
        except (requests.RequestException, HTTPError, ValueError) as error:  # a ValueError of a redirect's address
            reason = re.sub(r"\?\S*", "", redact(str(error)))  # without the query
            raise OSError(errno.EIO, f"{place}: {type(error).__name__}: {reason}") from error
        if len(data) != size:
            raise OSError(errno.EIO, f"{place}: the server sent {len(data)} bytes instead of {size}")
        return data


@cache
def session_of(process: int) -> requests.Session:
    """Returns the session of a process: a forked one must neither use nor close the connections of its parent."""
    session = requests.Session()
    session.hooks["response"].append(refuse_plain_text)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=MAX_READS))
    return session


def refuse_plain_text(response: requests.Response, **_: Any) -> None:
    """OSError if an answer redirects from https to another protocol. A hook, since `requests` would follow."""
    target = urlsplit(urljoin(response.url, response.headers.get("Location", "")))
    if response.is_redirect and response.url.startswith("https:") and target.scheme != "https":
        raise OSError(errno.EIO, f"{redact(response.url)} redirects to {target.scheme}://{target.hostname}")


def check_answer(response: requests.Response, place: str, offset: int, size: int, file_size: int | None) -> None:
    """OSError unless an answer announces exactly the bytes that were asked for, of a file of `file_size`."""
    answer = f"{place}: the server answers {response.status_code} {response.reason}"
    if response.status_code != 206:
        number = STATUS_ERRORS.get(response.status_code, errno.EIO)
        raise OSError(number, f"{answer} to a request of a range, which needs 206")
    content_range = response.headers.get("Content-Range", "none")
    span, _, total = content_range.partition("/")
    if span != f"bytes {offset}-{offset + size - 1}" or (file_size is not None and total not in ("*", str(file_size))):
        wanted = f"bytes {offset}-{offset + size - 1}/{file_size or '*'}"
        raise OSError(errno.EIO, f"{answer} with the range {content_range} instead of {wanted}")


def open_store(url: str) -> HttpStore:
    """Returns the files below an http, https or hf URL. ValueError if it is none, or if a package is missing."""
    if not url.startswith("hf:"):
        return HttpStore(with_secrets(url))
    import huggingface_hub  # an ImportError names it

    parts = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/?(.*)", url)
    if parts is None:
        raise ValueError(f"--data_path {url!r}: expected is hf://datasets/OWNER/NAME or .../NAME@COMMIT, and a folder")
    repository, commit, folder = parts.groups()
    revision = quote(commit or "main", "")
    address = joined(huggingface_hub.HfApi().endpoint, "datasets", repository, "resolve", revision, folder)
    token = huggingface_hub.get_token()
    return HttpStore(address, BearerAuth(token) if token else None)
