"""Packed shards behind a URL: the data are those of the folder, whatever the server does. No file tells a secret."""

import base64
import errno
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from downstream.detection import main_detection
from downstream.probe.engine_probe import ImageSubset
from downstream.robustness import main_robustness
from downstream.segmentation import main_segmentation
from scripts import pack_dataset
from tests.conftest import write_photo
from tests.range_server import FAULTS, RangeServer
from tests.runs import (
    assert_same_state,
    evaluate,
    finetune,
    finish,
    losses,
    pretrain,
    refused,
    reports_without_times,
    start,
    state,
    wait_for_step,
)
from util.data import images as images_module
from util.data import remote, remote_tars
from util.data.folders import MissingSplit
from util.data.images import ImageError
from util.data.open import open_images
from util.data.remote import HttpStore, ReadAhead, open_store
from util.data.remote_tars import DataCache
from util.data.tars import CHECKSUM, INDEX, read_index, write_index
from util.urls import data_path, redact


@pytest.fixture(scope="module")
def packed(labelled, tmp_path_factory):
    """train/ and val/ in several shards."""
    root = tmp_path_factory.mktemp("remote") / "packed"
    with pytest.MonkeyPatch.context() as patch:
        exact = pack_dataset.shard_bounds
        patch.setattr(pack_dataset, "shard_bounds", lambda sizes, _: exact(sizes, 5000))
        pack_dataset.main([str(labelled), str(root), "--workers", "1"])
    return root


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of its own, no login, and no waits between tries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    slept = []
    monkeypatch.replace_in(images_module, "time.sleep", slept.append)
    return slept


@pytest.fixture
def server(packed):
    with RangeServer(packed) as running:
        yield running


def once(fault, ending=".tar"):
    """The fault, at the first request of a file with this ending."""
    struck = []

    def strike(number, name):
        if struck or not name.endswith(ending):
            return None
        struck.append(number)
        return fault

    return strike


# -------------------------------------------------------------------------------------------------------------- reads


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_images_of_a_url_are_those_of_the_folder(packed, server, split):
    local = open_images("folder", packed, split, labelled=True)
    ours = open_images("folder", server.url, split, labelled=True)
    checked = len(server.named(".tar"))
    assert checked <= 2 * 16  # headers, and not each tar
    assert ours.fingerprint() == local.fingerprint()
    assert ours.classes == local.classes
    assert ours.labels.tolist() == local.labels.tolist()
    assert ours.path(3) == local.path(3).replace(str(packed), server.url)
    copy = pickle.loads(pickle.dumps(ours))
    for i in range(len(local)):
        assert ours.read(i) == local.read(i) == copy.read(i)
        assert np.array_equal(ours.load(i)[0], local.load(i)[0])
    sizes = sum(request.size for request in server.named(".tar")[checked:])
    assert sizes == 3 * sum(len(local.read(i)) for i in range(len(local)))


def test_which_images_a_split_has(packed, server, tmp_path):
    assert len(open_images("folder", f"{server.url}/train/")) == 24
    with pytest.raises(MissingSplit, match="has no packed shards for train: expected is train/prmim-index.safetensors"):
        open_images("folder", f"{server.url}/train", labelled=True)
    with pytest.raises(ValueError, match="nowhere' has no packed shards: expected"):
        open_images("folder", f"{server.url}/nowhere")
    with pytest.raises(ValueError, match="--dataset hf reads no URL, such as"):
        open_images("hf", server.url)
    shutil.copytree(packed / "val", tmp_path / "renamed" / "test")
    with RangeServer(tmp_path / "renamed") as other:
        assert open_images("folder", other.url, "val", labelled=True).notes == [
            "test/ is read as val, because there is no val"
        ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_answer_is_survived(packed, server, home, fault):
    local = open_images("folder", packed)
    ours = open_images("folder", server.url)
    server.trouble = once(fault)
    with ours.reading_ahead(range(24)):
        assert [ours.read(i) for i in range(24)] == [local.read(i) for i in range(24)]
    assert home == [0.1] or (fault == "closed" and not home)  # an old connection is opened again at once


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_outage", [False, True])
def test_a_fault_that_stays(server, home, fault, is_outage):
    """One range alone is an unreadable image, unless the server says that it is in need. An outage is the storage's."""
    ours = open_images("folder", server.url)
    server.trouble = lambda number, name: fault if is_outage or name.endswith(".tar") else None
    expected = ImageError
    if (is_outage and fault not in ("flip", "total")) or fault in ("429", "503", "closed", "garbage"):
        expected = OSError
    with pytest.raises(expected) as error:
        ours.read(5)
    assert type(error.value) is expected
    if expected is ImageError:
        assert ours.path(5) in str(error.value)
    assert home[:6] == [0.1, 0.3, 1.0, 3.0, 8.0, 10.0]


@pytest.mark.parametrize("fault", ["200", "503", "endless", "flip"])
def test_a_server_that_cannot_be_used_is_refused_at_the_start(server, fault):
    server.trouble = lambda number, name: fault
    expected = OSError if fault == "503" else ValueError
    with pytest.raises(expected) as error:
        open_images("folder", server.url)
    if fault == "200":
        assert "the server answers 200 OK to a request of a range, which needs 206" in str(error.value)


def test_a_server_that_denies(server, packed, home, tmp_path):
    """One tar is an unreadable image. Where the index is denied as well, the login may have expired, which may pass."""
    ours = open_images("folder", server.url)
    local = open_images("folder", packed)
    denied = ours.span(5).tar
    server.trouble = lambda number, name: "403" if name.endswith(denied) else None
    with pytest.raises(ImageError, match=f"{denied}: the server answers 403"):
        ours.read(5)
    server.trouble = lambda number, name: "403"
    with pytest.raises(OSError, match="the server answers 403") as error:
        ours.read(5)
    assert error.value.errno == errno.EIO
    assert not home
    shutil.copytree(packed / "train", tmp_path / "root")
    with RangeServer(tmp_path / "root") as other:  # object storage denies what it does not have
        other.trouble = lambda number, name: "403" if "/" in name else None
        assert open_images("folder", other.url).read(5) == local.read(5)
        other.trouble = lambda number, name: "403"
        with pytest.raises(PermissionError):
            open_images("folder", other.url)


def test_a_shard_that_was_replaced_costs_one_round_of_waits(server, packed, home):
    ours = open_images("folder", server.url)
    local = open_images("folder", packed)
    i, j = np.flatnonzero(ours.rows["tar"] == 1)[:2]
    other = ours.rows["tar"].tolist().index(0)
    server.trouble = lambda number, name: "total" if name.endswith("shard-000001.tar") else None
    for k in (i, j, i):
        with pytest.raises(ImageError, match="bytes were indexed"):
            ours.read(k)
        assert ours.read(other) == local.read(other)
    assert home == [*remote.WAITS]
    server.trouble = lambda number, name: None
    assert ours.read(i) == local.read(i)
    server.trouble = once("cut")
    assert ours.read(i) == local.read(i)
    assert home == [*remote.WAITS, 0.1]


@pytest.mark.parametrize("place", ["http://host:port", "http://[", "https://" + 80 * "a", "ftp://host", "//host:0"])
def test_redirects_that_lead_nowhere(server, place):
    store = HttpStore(server.url + "?token=secret")
    server.redirect = place
    with pytest.raises(OSError, match="redirects to|does not answer") as error:
        store.read(f"train/{INDEX}", 0, 8)
    assert "secret" not in str(error.value)


def test_a_redirect_may_hold_spaces_and_other_letters(server):
    with RangeServer(server.folder) as other:
        server.redirect = f"{other.url}/\u00e9 \u00e9/..".encode().decode("latin-1")
        with pytest.raises(OSError, match="404"):
            HttpStore(server.url).read(f"train/{INDEX}", 0, 8)
        assert other.requests[0].name == f"\u00e9 \u00e9/../train/{INDEX}"


def test_a_certificate_that_is_not_trusted_is_refused_at_the_start(home, monkeypatch):
    def refuse(*_, **__):
        raise ssl.SSLCertVerificationError("self-signed")

    monkeypatch.setattr(remote, "make_connection", lambda site: SimpleNamespace(sock=None, request=refuse, close=list))
    with pytest.raises(ValueError, match="does not answer: SSLCertVerificationError"):
        open_images("folder", "https://127.0.0.1:1/x")
    assert not home


def test_https_goes_through_a_proxy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:hid%2Fden@127.0.0.1:{proxy.getsockname()[1]}/")
        monkeypatch.setenv("no_proxy", "direct")
        asked = []

        def answer():
            connection, _ = proxy.accept()
            asked.append(connection.recv(10_000).decode())
            connection.sendall(b"HTTP/1.1 407 no\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(OSError, match="https://host does not answer.* 407") as error:
            HttpStore("https://you:secret@host/x").read("y", 0, 8)
        thread.join(60)
    assert asked[0].startswith("CONNECT host:443 HTTP/1.")
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'me:hid/den').decode()}" in asked[0]
    assert asked[0].count("uthorization") == 1
    assert "hid" not in str(error.value)
    assert remote.make_connection(("https", "direct")).host == "direct"
    assert remote.make_connection(("http", "host")).host == "host"


def test_slow_answers_end(server, monkeypatch):
    store = open_store(server.url)
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    server.delay = 0.5
    with pytest.raises(OSError, match="does not answer: TimeoutError"):
        store.read(f"train/{INDEX}", 0, 8)
    server.delay = 0
    monkeypatch.setattr(remote, "TIMEOUT", 10)
    monkeypatch.replace_in(remote, "time.monotonic", iter([0, 1000]).__next__)
    with pytest.raises(OSError, match="sends less than 100000 bytes per second"):
        store.read(f"train/{INDEX}", 0, 8)


def test_a_server_that_never_answers_is_asked_twice(home, monkeypatch):
    now = [1000.0]
    asked = []

    def wait(*_, **__):
        asked.append(now[0])
        now[0] += remote.TIMEOUT
        raise TimeoutError

    monkeypatch.setattr(remote, "make_connection", lambda site: SimpleNamespace(sock=None, request=wait, close=list))
    monkeypatch.replace_in(images_module, "time.monotonic", lambda: now[0])
    with pytest.raises(OSError, match="does not answer: TimeoutError"):
        open_images("folder", "http://127.0.0.1:1/x")
    assert asked == [1000, 1012]


def test_a_connection_is_used_again_and_replaced_when_it_is_stale(server):
    store = HttpStore(server.url)
    for _ in range(3):
        store.read(f"train/{INDEX}", 0, 8)
    (connection,) = store._idle[("http", server.url.removeprefix("http://"))]
    connection.sock.shutdown(2)
    assert len(store.read(f"train/{INDEX}", 0, 8)) == 8


def test_a_fork_opens_connections_of_its_own(server, packed):
    ours = open_images("folder", server.url)
    local = open_images("folder", packed)
    assert ours.storage.store._idle

    def read(results):
        results.put((dict(ours.storage.store._idle), ours.read(7)))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    context.Process(target=read, args=(results,), daemon=True).start()
    assert results.get(timeout=60) == ({}, local.read(7))
    assert ours.read(8) == local.read(8)


def test_many_reads_wait_at_once(packed, server):
    """The server answers when eight have asked."""
    together = threading.Barrier(8)
    ours = open_images("folder", server.url)
    local = open_images("folder", packed)
    server.trouble = lambda number, name: together.wait(60) and None
    with ours.reading_ahead([*range(24), 3]):  # a batch may have an image twice
        for i in range(24):
            assert ours.read(i) == local.read(i)
        server.trouble = lambda number, name: None
        assert ours.read(3) == local.read(3)


def test_no_more_bytes_are_read_ahead_than_allowed(monkeypatch):
    monkeypatch.setattr(remote, "MAX_BYTES", 100)
    sizes = dict(enumerate([30, 60, 10, 500, 20, 20, 90, 5]))
    seen = []

    def read(i):
        seen.append(i)
        return bytes(sizes[i])

    with ReadAhead(read, sizes) as ahead:
        for i, size in sizes.items():
            assert sum(sizes[k] for k in ahead.begun) <= 100 or len(ahead.begun) == 1
            assert ahead.take(i) == bytes(size)
    assert sorted(seen) == [*sizes]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_signal_does_not_wait_for_reads(kind):
    released = threading.Event()
    ended = threading.Event()

    def work():
        with suppress(kind), ReadAhead(lambda i: released.wait(60) and b"", {0: 1, 1: 1}):
            raise kind
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert ended.wait(60 if kind is KeyboardInterrupt else 0.2) == (kind is KeyboardInterrupt)
    released.set()
    thread.join(60)


# ---------------------------------------------------------------------------------------------------------- checksums


def test_changed_bytes_are_unreadable_and_an_index_without_checksums_does_not_notice(packed, server, tmp_path):
    shutil.copytree(packed, tmp_path / "copy")
    images = open_images("folder", tmp_path / "copy")
    span = images.span(5)
    path = tmp_path / "copy" / "train" / span.tar
    data = bytearray(path.read_bytes())
    data[span.offset + span.size - 20] ^= 1
    path.write_bytes(data)
    server.folder = tmp_path / "copy"
    for root in (tmp_path / "copy", server.url):
        with pytest.raises(ImageError, match=r"bytes in shard-00000\d.tar have changed since it was packed"):
            open_images("folder", root).read(5)
    index = tmp_path / "copy" / "train" / INDEX
    rows, content = read_index(index)
    del rows[CHECKSUM]
    names = rows["name"]
    write_index(index, rows | {"name": names.view(f"S{names.shape[1]}")[:, 0]}, content)
    for root in (tmp_path / "copy", server.url):
        assert len(open_images("folder", root).read(5)) == span.size


# ----------------------------------------------------------------------------------------------------- object storage


@pytest.fixture
def bucket(packed):
    """The shards in fsspec's file system in memory, which stands for object storage."""
    system = MemoryFileSystem()
    system.put(str(packed), "/bucket/data", recursive=True)
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_object_storage(packed, bucket):
    local = open_images("folder", packed, "val", labelled=True)
    ours = open_images("folder", "memory://bucket/data", "val", labelled=True)
    with ours.reading_ahead(range(7)):
        assert [ours.read(i) for i in range(7)] == [local.read(i) for i in range(7)]
    path = "/bucket/data/val/shard-000000.tar"
    bucket.pipe(path, bucket.cat(path)[:-1])
    with pytest.raises(
        ValueError, match=r"val/shard-000000.tar' has \d+ bytes; \d+ bytes were indexed. It was packed by"
    ):
        open_images("folder", "memory://bucket/data", "val", labelled=True)
    bucket.rm(path)
    with pytest.raises(ValueError, match="val/shard-000000.tar' is missing"):
        open_images("folder", "memory://bucket/data", "val", labelled=True)
    with pytest.raises(ImageError, match="cannot be read: memory://bucket/data: there is no /bucket/data/val/shard"):
        ours.read(0)
    bucket.rm("/bucket/data", recursive=True)
    with pytest.raises(OSError, match="memory://bucket/data: there is no /bucket/data/val/prmim-index"):
        ours.read(0)


def test_errors_of_libraries_are_the_storage_s(packed, bucket, monkeypatch):
    class TooMuchAsked(Exception):
        pass

    def fail(*_, **__):
        raise TooMuchAsked("of https://user:secret@host/?token=secret")

    ours = open_images("folder", "memory://bucket/data")
    ours.storage.store._open()[0].cat_file = fail
    with pytest.raises(OSError, match="TooMuchAsked: of https://host/$") as error:
        ours.read(0)
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/data", "'gs://bucket/data' cannot be read: .* pip install gcsfs"),
        ("nothing://bucket", "cannot be read: Protocol not known: nothing"),
        ("hf://owner/name", "expected is hf://datasets/OWNER/NAME"),
    ],
)
def test_urls_that_cannot_be_read(url, message):
    with pytest.raises(ValueError, match=message):
        open_images("folder", url)


def test_the_hub(packed, tmp_path, monkeypatch):
    """Without its network: a server has the addresses of a data set's files."""
    place = tmp_path / "hub" / "datasets" / "me" / "photos" / "resolve" / "v1"
    shutil.copytree(packed, place / "packed")
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with RangeServer(tmp_path / "hub") as hub:
        hub.login = "Bearer hf_token"
        monkeypatch.replace_in(remote, "hub.HfApi", lambda: SimpleNamespace(endpoint=hub.url))
        ours = open_images("folder", "hf://datasets/me/photos@v1/packed")
        assert ours.read(9) == open_images("folder", packed).read(9)


# -------------------------------------------------------------------------------------------------------- credentials

LOGIN = f"Basic {base64.b64encode(b'me:pa/ss').decode()}"


def test_a_login_of_the_url_or_of_netrc_goes_to_no_other_host(packed, server, tmp_path):
    with RangeServer(packed) as other:
        server.login = LOGIN
        server.trouble = lambda number, name: None
        url = server.url.replace("//", "//me:pa%2Fss@") + "/train?token=secret"
        images = open_images("folder", url)
        assert {request.query for request in server.requests} == {"token=secret"}
        assert "secret" not in f"{images.root} {images.path(0)}"
        with pytest.raises(PermissionError, match="401"):
            open_images("folder", server.url)
        host = server.url.removeprefix("http://").partition(":")[0]
        (tmp_path / "netrc").write_text(f"machine {host} login me password pa/ss\n")
        assert len(open_images("folder", server.url)) == 24
        (tmp_path / "netrc").unlink()
        server.redirect = other.url
        images.read(3)
        assert server.requests[-1].headers["Authorization"] == LOGIN
        assert "Authorization" not in other.requests[-1].headers
        other.redirect = server.url  # in a circle
        with pytest.raises(OSError, match="is redirected too often") as error:
            images.read(4)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa%2Fss@host/data?sig=a&b=c rest", "https://host/data rest"),
        ("'https://host/data?sig=a'; b", "'https://host/data'; b"),
        ("--data_path=http://me@host:80/x#y", "--data_path=http://host:80/x"),
        ("s3://bucket/a b@c.d", "s3://bucket/a b@c.d"),
        ("hf://datasets/me/photos@v1/x", "hf://datasets/me/photos@v1/x"),
    ],
)
def test_what_is_shown_of_urls(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/x",
        "https://me:a/secret@host/x",
        "https:///secret@x",
        "https://host/a b?sig=secret",
        "https://host/it's?sig=secret",
        "https://host/x?sig=a secret",
        "https://host/\u00e9?sig=secret",
    ],
)
def test_credentials_where_they_are_not_read_are_refused(url, tmp_path, capsys):
    assert "secret" not in pretrain.refused(capsys, url, tmp_path / "out")


@pytest.mark.parametrize(
    ("main", "flag"),
    [(main_segmentation, "--data_path"), (main_detection, "--data_path"), (main_robustness, "--imagenet_a")],
)
def test_programs_that_read_no_url_refuse_it(main, flag, capsys):
    message = refused(capsys, main.main, "--resume", "x", flag, "https://me:secret@host/x?sig=secret")
    assert "expected is a local folder, and no URL, such as 'https://host/x'" in message
    assert "secret" not in message


def test_no_file_of_a_run_holds_a_secret(server, tmp_path, capfd):
    server.login = LOGIN
    url = server.url.replace("//", "//me:pa%2Fss@") + "?token=hidden"
    pretrain(url, tmp_path / "out", "--max_steps", 3)
    shown = "".join(capfd.readouterr())
    assert data_path(server.url) in shown
    for path in [*Path(tmp_path).rglob("*")]:
        if path.is_file():
            shown += path.read_bytes().decode(errors="ignore")
    for secret in ("pa%2Fss", "pa/ss", "hidden", LOGIN.partition(" ")[2]):
        assert secret not in shown


# ----------------------------------------------------------------------------------------------------------- training


def some_fail(number, name):
    """One request in 25, in turn of each kind."""
    if number % 25 == 7:
        return FAULTS[number // 25 % len(FAULTS)]
    return None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_a_url_is_that_on_the_disk(packed, server, tmp_path, undisturbed_run, workers):
    whole = undisturbed_run(pretrain, packed)
    server.trouble = some_fail
    flags = ["--num_workers", workers]
    pretrain(server.url, tmp_path / "out", "--max_steps", 4, *flags)
    assert_same_state(pretrain(server.url, tmp_path / "out", *flags), state(whole))
    assert losses(tmp_path / "out") == losses(whole)


def test_two_processes_that_are_killed_and_requests_that_fail(packed, server, tmp_path):
    finish(packed, tmp_path / "whole", processes=2)
    server.trouble = some_fail
    killed = start(server.url, tmp_path / "out", "--num_workers", 1, "--save_steps", 1, fault=("hold", 5, 0, "-"))
    wait_for_step(tmp_path / "out", 5, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    finish(server.url, tmp_path / "out", "--num_workers", 1)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert_same_state(state(tmp_path / "out"), state(tmp_path / "whole"))


@pytest.mark.parametrize(("workers", "status"), [(0, "503"), (1, "503"), (0, "401"), (1, "403")])
def test_an_outage_ends_with_75_and_the_same_command_goes_on(
    packed, server, tmp_path, capsys, undisturbed_run, before_step, workers, status
):
    whole = undisturbed_run(pretrain, packed)

    def lose():
        server.trouble = lambda number, name: status

    flags = ["--num_workers", workers, "--max_bad_fraction", 0.5, "--save_steps", 1]
    before_step(3, lose)
    many_epochs = ["--epochs", 2] if workers == 0 else ["--epochs", 5]  # batches are loaded ahead
    if workers:
        whole = undisturbed_run(pretrain, packed, *many_epochs)
    message = pretrain.refused(capsys, server.url, tmp_path / "out", *flags, *many_epochs, code=75)
    assert status in message
    server.trouble = lambda number, name: None
    assert_same_state(pretrain(server.url, tmp_path / "out", *flags, *many_epochs), state(whole))
    assert losses(tmp_path / "out") == losses(whole)


def test_the_heads_of_a_probe_read_some_images_ahead(packed, server):
    ours = ImageSubset(open_images("folder", server.url), np.array([20, 3, 9]))
    local = open_images("folder", packed)
    num_requests = len(server.requests)
    with ours.reading_ahead([2, 0]):
        assert np.array_equal(ours.load(2)[0], local.load(9)[0])
        assert np.array_equal(ours.load(0)[0], local.load(20)[0])
    assert len(server.requests) == num_requests + 2


def test_other_programs_read_urls(packed, server, tmp_path):
    finetune(packed, tmp_path / "local", "--epochs", 1, "--warmup_epochs", 0)
    finetune(server.url, tmp_path / "remote", "--epochs", 1, "--warmup_epochs", 0)
    assert reports_without_times(tmp_path / "remote") == reports_without_times(tmp_path / "local")
    assert evaluate(server.url, tmp_path / "remote") == evaluate(packed, tmp_path / "remote")
    for root, name in ((packed, "a"), (server.url, "b")):
        pretrain(root, tmp_path / name, "--epochs", 1, "--warmup_epochs", 0, "--knn_every", 1)
    assert reports_without_times(tmp_path / "a") == reports_without_times(tmp_path / "b")


# -------------------------------------------------------------------------------------------------------------- cache


def copy_all(images, cache, monkeypatch):
    """Copies in this process, which keeps its signals and priority."""
    monkeypatch.setattr(remote_tars, "begin_beside_gpu", lambda worker: None)
    remote_tars.copy_shards(images.storage, images.content["tars"], cache)


def open_cached(url, cache, split="train"):
    store = open_store(url)
    return remote_tars.open_remote_tars(store, split, True, [], cache)


def test_copied_shards_are_read_locally(packed, server, tmp_path, monkeypatch):
    cache = DataCache(tmp_path / "copies", 1)
    ours = open_cached(server.url, cache)
    assert ours.notes == [f"0 of {len(ours.tars)} shards are in --data_cache {cache.root}"]
    server.trouble = some_fail
    copy_all(ours, cache, monkeypatch)
    num_requests = len(server.requests)
    local = open_images("folder", packed)
    with ours.reading_ahead(range(24)):
        assert [ours.read(i) for i in range(24)] == [local.read(i) for i in range(24)]
    copy_all(ours, cache, monkeypatch)
    assert len(server.requests) == num_requests
    for path in cache.root.glob("*/*.tar"):
        assert path.read_bytes() == (packed / "train" / path.name).read_bytes()
        path.unlink()  # another run makes space
    assert ours.read(3) == local.read(3)  # by the file that is open
    assert pickle.loads(pickle.dumps(ours)).read(3) == local.read(3)
    assert len(server.requests) > num_requests


def test_a_failing_cache_costs_no_waits(packed, server, tmp_path, monkeypatch, home):
    def fail(*_):
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(remote_tars.RemoteTars, "_read_at", fail)
    ours = open_cached(server.url, DataCache(tmp_path / "copies", 1))
    assert ours.read(3) == open_images("folder", packed).read(3)
    assert not home


def test_a_cache_that_is_smaller_than_a_shard(server, tmp_path, monkeypatch, capsys):
    cache = DataCache(tmp_path / "copies", 1e-6)
    copy_all(open_cached(server.url, cache), cache, monkeypatch)
    assert not [*cache.root.glob("*/*.tar")]
    assert "--data_cache_gb 1e-06 has no space for http://" in capsys.readouterr().err


def test_a_damaged_shard_is_not_kept(packed, server, tmp_path, monkeypatch, capsys):
    cache = DataCache(tmp_path / "copies", 1)
    ours = open_cached(server.url, cache)
    server.trouble = lambda number, name: "flip" if name.endswith("shard-000001.tar") else None
    copy_all(ours, cache, monkeypatch)
    assert {path.name for path in cache.root.glob("*/*")} == {INDEX, "shard-000000.tar"}
    assert "shard-000001.tar and others: it is not what was packed" in capsys.readouterr().err
    server.trouble = lambda number, name: None
    copy_all(ours, cache, monkeypatch)
    assert {path.name for path in cache.root.glob("*/*")} == {INDEX, *ours.tars}


def test_what_was_used_longest_ago_leaves_and_what_this_run_uses_stays(packed, server, tmp_path, monkeypatch):
    sizes = {path: path.stat().st_size for path in sorted((packed / "train").glob("*.tar"))}
    val_bytes = sum(path.stat().st_size for path in (packed / "val").glob("*.tar"))
    cache = DataCache(tmp_path / "copies", sum(sizes.values()) / 1e9)
    ours = open_cached(server.url, cache)
    copy_all(ours, cache, monkeypatch)
    val = open_cached(server.url, cache, "val")
    copy_all(val, cache, monkeypatch)  # nothing leaves
    assert not (val.storage.folder / "shard-000000.tar").exists()
    copies = sorted(ours.storage.folder.glob("*.tar"))
    for age, path in enumerate(copies):  # of an earlier run
        os.utime(path, (1000 - age, 1000 - age))
    leftover = ours.storage.folder / ".shard-000009.tmp-1.tar"
    leftover.touch()
    copy_all(val, cache, monkeypatch)
    assert (val.storage.folder / "shard-000000.tar").exists()
    assert not leftover.exists()
    gone = [path for path in copies if not path.exists()]
    assert gone == copies[-len(gone) :]  # the oldest
    freed = [path.stat().st_size for path in sizes if path.name in {path.name for path in gone}]
    assert sum(freed) >= val_bytes > sum(freed) - freed[0]  # and no more than needed
    opened = open_cached(server.url, cache)  # which marks what it will use
    assert all(path.stat().st_mtime > 1000 for path in copies if path.exists())
    assert opened.notes[0].startswith(f"{len(copies) - len(gone)} of {len(copies)} shards")


def test_one_process_copies_at_a_time(server, tmp_path, monkeypatch):
    cache = DataCache(tmp_path / "copies", 1)
    ours = open_cached(server.url, cache)
    done = threading.Event()

    def copy():
        copy_all(ours, cache, monkeypatch)
        done.set()

    with cache.lock(".tar"):
        open_cached(server.url, cache, "val")  # its index does not wait for shards
        thread = threading.Thread(target=copy)
        thread.start()
        before = len(server.requests)
        assert not done.wait(0.3)
        assert len(server.requests) == before
    thread.join(60)
    assert done.is_set()
    wanted = len(server.named(".tar"))
    first, second = (threading.Thread(target=copy) for _ in range(2))
    first.start()
    second.start()
    first.join(60)
    second.join(60)
    assert len(server.named(".tar")) == wanted  # all are there


def test_a_run_with_a_cache_is_that_on_the_disk(packed, server, tmp_path, undisturbed_run):
    whole = undisturbed_run(pretrain, packed)
    flags = ["--data_cache", tmp_path / "node", "--data_cache_gb", 0.5, "--num_workers", 1]
    pretrain(server.url, tmp_path / "out", "--max_steps", 3, *flags)
    assert_same_state(pretrain(server.url, tmp_path / "out", *flags), state(whole))
    assert {*(tmp_path / "node").iterdir()} == {tmp_path / "node" / "prmim"}


def test_a_cache_of_a_folder_is_refused(packed, tmp_path, capsys):
    message = pretrain.refused(capsys, packed, tmp_path / "out", "--data_cache", tmp_path / "node")
    assert "--data_cache has no effect" in message


def test_an_index_that_claims_to_be_endless_is_refused(server, tmp_path):
    header = b'{"__metadata__": {}, "x": {"data_offsets": [0, 9000000000000000000]}}'
    (tmp_path / INDEX).write_bytes(len(header).to_bytes(8, "little") + header)
    server.folder = tmp_path
    with pytest.raises(ValueError, match="is not a valid index"):
        open_images("folder", server.url)


def test_the_index_is_copied_again_when_it_has_changed(labelled, packed, server, tmp_path):
    open_images("folder", server.url)
    before = sum(request.size for request in server.named(INDEX))
    open_images("folder", server.url)
    again = sum(request.size for request in server.named(INDEX)) - before
    assert again < before  # the header alone
    for path in (tmp_path / "cache").rglob(INDEX):
        path.write_bytes(path.read_bytes()[:-1])
    assert len(open_images("folder", server.url)) == 24
    shutil.copytree(labelled, tmp_path / "photos")
    write_photo(tmp_path / "photos" / "train" / "cat" / "new.jpg")
    pack_dataset.main([str(tmp_path / "photos"), str(tmp_path / "other"), "--workers", "1"])
    server.folder = tmp_path / "other"
    assert len(open_images("folder", server.url)) == 25
