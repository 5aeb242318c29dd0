"""A web server on the loopback interface that answers range requests, counts them, and fails on demand.

with RangeServer(folder) as server:
    server.trouble = lambda number, name: "cut" if number == 3 else None
    read(server.url)
"""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

FAULTS = ("cut", "closed", "200", "429", "503", "short", "longer", "endless", "garbage")
SLOW = ("silent", "drip", "continue", "slow body")  # they last until the server ends, each byte by byte


@dataclass
class Request:
    name: str
    query: str
    first: int
    size: int
    headers: dict[str, str] = field(repr=False)


class RangeServer:
    """Serves the files of a folder. trouble(number, name): one of FAULTS or SLOW, "flip", a status, or None."""

    def __init__(self, folder, delay=0.0):
        self.folder = Path(folder)
        self.delay = delay
        self.requests: list[Request] = []
        self.trouble: Callable[[int, str], str | None] = lambda number, name: None
        self.redirect = ""  # the address of another server
        self.login = ""  # the Authorization that is wanted
        self.lock = threading.Lock()
        self.most_at_once = 0
        self.at_once = 0
        self.released = threading.Event()  # ends what is endless
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"owner": self}))
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that was killed
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def named(self, ending):
        return [request for request in self.requests if request.name.endswith(ending)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: RangeServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        owner = self.owner
        parts = urlsplit(self.path)
        assert parts.path.startswith("/")  # as servers demand it
        name = unquote(parts.path).lstrip("/")
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        with owner.lock:
            number = len(owner.requests)
            owner.requests.append(Request(name, parts.query, first, last + 1 - first, dict(self.headers)))
            owner.at_once += 1
            owner.most_at_once = max(owner.most_at_once, owner.at_once)
        try:
            time.sleep(owner.delay)
            with suppress(BrokenPipeError, ConnectionResetError):
                self.answer(name, first, last, owner.trouble(number, name))
        finally:
            with owner.lock:
                owner.at_once -= 1

    def answer(self, name, first, last, fault):
        owner = self.owner
        path = owner.folder / name
        if owner.redirect:
            return self.begin(302, 0, Location=owner.redirect + self.path)
        if owner.login and self.headers["Authorization"] != owner.login:
            return self.begin(401, 0)
        if not path.is_file():
            return self.begin(404, 0)
        whole = path.read_bytes()
        data = whole[first : last + 1]
        total = len(whole)
        content_range = f"bytes {first}-{first + len(data) - 1}/{total}"
        if fault in ("401", "403", "404", "429", "503"):
            return self.begin(int(fault), 0)
        if fault in SLOW:
            if fault == "slow body":
                self.begin(206, len(data), Content_Range=content_range)
            if fault == "drip":
                self.wfile.write(b"HTTP/1.1 206 OK\r\nX: ")
            piece = {"silent": b"", "continue": b"HTTP/1.1 100 Continue\r\n\r\n"}.get(fault, b"x")
            while not owner.released.wait(0.02):
                self.wfile.write(piece)
            return None
        if fault == "closed":
            self.close_connection = True
            return None
        if fault == "garbage":
            self.wfile.write(b"garbage\r\n\r\n")
            self.close_connection = True
            return None
        if fault == "200":
            self.begin(200, len(whole))
            return self.wfile.write(whole)
        if fault == "endless":
            self.begin(206, None, Content_Range=content_range)
            while not owner.released.is_set():
                self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            return None
        if fault == "short":
            data = data[:-1]
        if fault == "longer":
            data += b"?"
        if fault == "flip":
            data = bytes([data[0] ^ 1]) + data[1:]
        self.begin(206, len(data), Content_Range=content_range)
        if fault == "cut":
            self.close_connection = True
            data = data[: len(data) // 2]
        return self.wfile.write(data)

    def begin(self, status, length, **headers):
        self.send_response(status)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
