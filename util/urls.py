"""URLs of data. User names, passwords and queries in them are secrets: messages, logs and files never show them."""

import argparse
import re

_secret_urls: dict[str, str] = {}  # {what is shown of a URL: the URL}, of this process's command line


def is_url(path: object) -> bool:
    """Whether a path is a URL, such as s3://bucket/folder."""
    return re.match(r"[A-Za-z][\w+.-]*://", str(path)) is not None


def redact(text: str) -> str:
    """Returns a text without the user names, passwords, queries and fragments of the URLs in it."""
    text = re.sub(r"(\w://)[^\s/?#]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", text)


def data_path(text: str) -> str:
    """The type of a flag: a path, or a URL, of which the flag's value has no secrets; see `with_secrets`."""
    if not is_url(text):
        return text
    is_http = text.startswith(("http://", "https://"))
    if is_http and not re.match(r"https?://([^\s/@]*@)?([\w.-]+|\[[\da-f:]+\])(:\d+)?([/?#]|$)", text):
        raise argparse.ArgumentTypeError("expected is a URL with a host; write / and @ of a password as %2F and %40")
    if redact(text) == text:
        return text
    if not is_http:
        raise argparse.ArgumentTypeError(
            f"{redact(text)!r} holds credentials: give them as the library of its protocol expects them, such as in "
            "environment variables"
        )
    _secret_urls[redact(text)] = text
    return redact(text)


def with_secrets(url: str) -> str:
    """Returns a URL as it was on the command line of this process."""
    return _secret_urls.get(url, url)
