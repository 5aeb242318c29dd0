import os
import signal

from util import host


def test_a_parent_that_has_just_died_is_noticed(monkeypatch):
    parents = [7, 1]
    sent = []
    monkeypatch.replace_in(host, "os.getppid", lambda: parents.pop(0))
    monkeypatch.replace_in(host, "os.kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.replace_in(host, "ctypes.CDLL", lambda name: Nothing())
    host.signal_if_parent_dies(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]


class Nothing:
    def prctl(self, option, number):
        assert (option, number) == (1, 15)
