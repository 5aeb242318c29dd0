"""Files of web servers that answer range requests, by `requests`: certificates, proxies and ~/.netrc are as there.

fsspec's HTTP is not used: it reads an answer to its end, also a whole shard from a server without ranges, and takes the
bytes of another range. Its file system of the Hub reads one range after another.
"""

import errno
import os
import re
from functools import cache
from urllib.parse import quote, unquote, urlsplit

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
    """See `Store`.

    url: may hold a user name and a password, and a query that is appended to each file's address. auth: a login instead
    of the URL's. Without any, `requests` looks into ~/.netrc. Other hosts, to which the server redirects, get neither.
    """

    def __init__(self, url: str, auth: AuthBase | None = None) -> None:
        folder, _, self.query = url.partition("?")
        self.url = redact(folder.rstrip("/"))
        self.auth = auth
        login = urlsplit(folder)
        if auth is None and login.username is not None:  # `requests` prefers ~/.netrc, and needs a password in Latin-1
            self.auth = HTTPBasicAuth(unquote(login.username).encode(), unquote(login.password or "").encode())

    def read(self, name: str, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        place = f"{self.url}/{name}"
        address = f"{self.url}/{quote(name)}?{self.query}"
        headers = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        try:
            with session_of(os.getpid()).get(
                address, headers=headers, auth=self.auth, timeout=TIMEOUT, stream=True
            ) as response:
                if response.status_code != 206:
                    number = STATUS_ERRORS.get(response.status_code, errno.EIO)
                    answer = f"{response.status_code} {response.reason}"
                    raise OSError(number, f"{place}: the server answers {answer} to a request of a range, not 206")
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
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=MAX_READS))
    return session


def open_http_store(url: str) -> HttpStore:
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
