"""The Hugging Face Hub is asked once, and only its cache is read if it cannot be reached."""

import socket
import threading
from pathlib import Path

import pytest

from downstream.probe import timm_encoders

ROOT = Path(__file__).resolve().parents[3]


class Server:
    """Accepts connections, counts them, and answers each with `answer`, or not at all if it is empty."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.num_connections = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            connection, _ = self.socket.accept()
            self.num_connections += 1
            with connection:
                if self.answer:
                    connection.recv(1 << 16)
                    connection.sendall(self.answer)


@pytest.mark.parametrize(
    ("answer", "is_reached"),
    [(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", True), (b"", False)],
)
def test_one_request_says_whether_the_hub_is_there(monkeypatch, answer, is_reached):
    server = Server(answer)
    monkeypatch.replace_in(timm_encoders, "huggingface_hub.constants.ENDPOINT", server.endpoint)
    monkeypatch.replace_in(timm_encoders, "huggingface_hub.constants.HF_HUB_OFFLINE", False)
    constants = timm_encoders.huggingface_hub.constants
    assert timm_encoders.can_reach_hub() == is_reached
    assert server.num_connections == 1
    with timm_encoders.hub_or_cache():
        assert constants.HF_HUB_OFFLINE is not is_reached
    assert constants.HF_HUB_OFFLINE is False
