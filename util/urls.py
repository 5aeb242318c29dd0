"""URLs of data. User names, passwords and queries in them are secrets: messages, logs and files never show them."""

import argparse
import re

# Characters at which `redact` takes a URL to end are not in it. An @ behind the ? may be that of a login.
HTTP_URL = re.compile(
    r"https?://([^\s/?#@'\"]*@)?([A-Za-z\d_.-]+|\[[\da-f:]+\])(:\d{1,5})?(/[!$-&(->@-~]*)?(\?[!$-&(->A-~]*)?"
)

_secret_urls: dict[str, str] = {}  # {what is shown of a URL: the URL}, of this process's command line


def is_url(path: object) -> bool:
    """Whether a path is a URL, such as s3://bucket/folder."""
    return re.match(r"[A-Za-z][\w+.-]*://", str(path)) is not None


def redact(text: str) -> str:
    """Returns a text without the user names, passwords, queries and fragments of the URLs in it."""
    text = re.sub(r"(\w://)[^\s/'\"]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", text)


def data_path(text: str) -> str:
    """The type of a flag: a path, or a URL, of which the flag's value has no secrets; see `with_secrets`."""
    if not is_url(text):
        return text
    is_http = text.startswith(("http://", "https://"))
    if is_http and not HTTP_URL.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected is a URL with a host; write spaces, quotes and letters beyond ASCII as %20, ..., and / ? # @ of "
            "a password as %2F %3F %23 %40"
        )
    if redact(text) == text:
        return text
    if not is_http:
        raise argparse.ArgumentTypeError(
            f"{redact(text)!r} holds credentials: give them as the library of its protocol expects them, such as in "
            "environment variables"
        )
    _secret_urls[redact(text)] = text
    return redact(text)


def local_path(text: str) -> str:
    """The type of a flag: a path, where no URL is read."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"expected is a local folder, and no URL, such as {redact(text)!r}")
    return text


def with_secrets(url: str) -> str:
    """Returns a URL as it was on the command line of this process."""
    return _secret_urls.get(url, url)
