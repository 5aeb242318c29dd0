"""Packed shards behind a URL: the data are those of the folder, whatever the server does. No file tells a secret."""

import base64
import errno
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from downstream.detection import main_detection
from downstream.segmentation import main_segmentation
from scripts import pack_dataset
from tests.range_server import FAULTS, SLOW, RangeServer
from tests.runs import (
    assert_same_state,
    evaluate,
    finetune,
    losses,
    pretrain,
    refused,
    reports_without_times,
    state,
)
from util.data import http_store, remote, remote_tars, workers
from util.data.folders import MissingSplit
from util.data.http_store import HttpStore
from util.data.images import ImageError
from util.data.object_store import system_of
from util.data.open import open_images
from util.data.tars import INDEX
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
    """No login, and no waits between tries."""
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.02))
    monkeypatch.setattr(workers, "_signal_time", workers._signal_time)
    workers.expect_signal()


@pytest.fixture
def server(packed):
    with RangeServer(packed) as running:
        yield running


@pytest.fixture
def set_timeout(monkeypatch):
    """set_timeout(seconds): of the library, and of our own"""

    def patch(seconds):
        monkeypatch.setattr(http_store, "TIMEOUT", 3600)  # of a packet
        monkeypatch.setattr(remote_tars, "TIMEOUT", seconds)

    return patch


@pytest.fixture
def try_often(monkeypatch):
    """On a busy machine good answers may be slow, too."""
    monkeypatch.setattr(remote, "WAITS", (0.01,) * 100)
    monkeypatch.setattr(remote, "LAST_TRY", 3600)


def once(fault, ending=".tar"):
    """The fault, at the first request of a file with this ending."""
    struck = []

    def strike(number, name):
        if struck or not name.endswith(ending):
            return None
        struck.append(number)
        return fault

    return strike


def read_all(images, indices=range(24)):
    """The bytes of images, read as a batch."""
    images.prepare(indices)
    return [images.read(i) for i in indices]


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
    assert read_all(ours, range(len(local))) == [local.read(i) for i in range(len(local))]
    assert np.array_equal(ours.load(3)[0], local.load(3)[0])
    sizes = sum(request.size for request in server.named(".tar")[checked:])
    assert sizes == sum(len(local.read(i)) for i in [*range(len(local)), 3])


def test_which_images_a_split_has(packed, server, tmp_path):
    assert len(open_images("folder", f"{server.url}/train/")) == 24
    with pytest.raises(MissingSplit):
        open_images("folder", f"{server.url}/train", labelled=True)
    shutil.copytree(packed / "val", tmp_path / "renamed" / "test")
    with RangeServer(tmp_path / "renamed") as other:
        assert len(open_images("folder", other.url, "val", labelled=True)) == 7


@pytest.mark.parametrize("fault", [*FAULTS, *SLOW])
def test_a_fault_of_one_answer_is_survived(packed, server, set_timeout, try_often, fault):
    local = open_images("folder", packed)
    ours = open_images("folder", server.url)
    if fault in SLOW:
        set_timeout(1)
    server.trouble = once(fault)
    assert read_all(ours) == [local.read(i) for i in range(24)]


@pytest.mark.parametrize("fault", [*FAULTS, *SLOW, "flip", "401", "403", "404"])
def test_a_fault_that_stays_is_the_storage_s(server, set_timeout, fault):
    """In the middle of a run, where another image would not help. Changed bytes alone are an unreadable image."""
    ours = open_images("folder", server.url)
    if fault in SLOW:
        set_timeout(1)
    server.trouble = lambda number, name: fault
    expected = ImageError if fault == "flip" else OSError
    with pytest.raises(expected) as error:
        read_all(ours, [5, 7, 9])
    assert type(error.value) is (TimeoutError if fault in SLOW else expected)
    if fault != "flip":
        assert error.value.errno in (errno.EIO, errno.ETIMEDOUT)


@pytest.mark.parametrize("fault", ["200", "503", "cut", "closed", "silent", "continue"])
def test_a_fault_at_the_start_ends_with_75(server, tmp_path, set_timeout, capsys, fault):
    set_timeout(1)
    server.trouble = lambda number, name: fault
    pretrain.refused(capsys, server.url, tmp_path / "out", code=75)


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_data_that_are_not_there_or_denied_are_the_user_s_error(server, tmp_path, capsys, status):
    server.trouble = lambda number, name: status
    assert "--data_path" in pretrain.refused(capsys, server.url, tmp_path / "out")


@pytest.mark.parametrize("fault", ["silent", "503", "cut"])
def test_after_a_signal_no_read_begins_again(server, set_timeout, monkeypatch, fault):
    """A read that waits for an answer for hours ends as well."""
    ours = open_images("folder", server.url)
    set_timeout(3600)
    monkeypatch.setattr(remote, "GRACE", 0.1)
    monkeypatch.setattr(remote, "WAITS", (3600,))
    server.trouble = lambda number, name: fault
    num_requests = len(server.requests)
    workers.note_signal()
    with pytest.raises(OSError):
        read_all(ours, range(5))
    assert len(server.requests) <= num_requests + 5


def test_a_signal_between_two_tries_is_the_end(server, monkeypatch):
    ours = open_images("folder", server.url)
    server.trouble = lambda number, name: "503"
    monkeypatch.replace_in(remote, "time.sleep", lambda seconds: workers.note_signal())
    num_requests = len(server.requests)
    with pytest.raises(OSError):
        ours.read(0)
    assert len(server.requests) == num_requests + 1


def test_a_signal_is_known_in_workers_that_are_forked_later():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    asked = context.Event()

    def tell():
        asked.wait(60)
        results.put(remote.is_ending())

    context.Process(target=tell, daemon=True).start()
    assert not remote.is_ending()
    workers.note_signal()
    asked.set()
    assert results.get(timeout=60)


def test_many_reads_wait_at_once(packed, server):
    """The server answers when eight have asked."""
    together = threading.Barrier(8)
    ours = open_images("folder", server.url)
    local = open_images("folder", packed)
    server.trouble = lambda number, name: together.wait(60) and None
    assert read_all(ours) == [local.read(i) for i in range(24)]
    server.trouble = lambda number, name: None
    assert read_all(ours, [3, 5, 3]) == [local.read(i) for i in (3, 5, 3)]  # a batch may have an image twice


def test_labels_are_those_of_the_index_that_is_there_now(labelled, server, tmp_path):
    """The header of an index stays the same if images change their class."""
    assert sum(open_images("folder", server.url).labels) == 12
    shutil.copytree(labelled, tmp_path / "photos")
    last_of_cat = max((tmp_path / "photos" / "train" / "cat").iterdir())
    last_of_cat.rename(tmp_path / "photos" / "train" / "dog" / f"!{last_of_cat.name[1:]}")
    pack_dataset.main([str(tmp_path / "photos"), str(tmp_path / "other"), "--workers", "1"])
    server.folder = tmp_path / "other"
    ours = open_images("folder", server.url)
    assert sum(ours.labels) == 13
    assert ours.load(11)[1] == 1
    index = tmp_path / "other" / "train" / INDEX
    whole = index.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"?", whole[:50]):
        index.write_bytes(damaged)
        with pytest.raises((ValueError, OSError), match=f"{server.url}/train/{INDEX}"):
            open_images("folder", server.url)


# ----------------------------------------------------------------------------------------------------- object storage


@pytest.fixture
def bucket(packed):
    """The shards in fsspec's file system in memory, which stands for object storage."""
    system = MemoryFileSystem()
    system.put(str(packed), "/bucket/data", recursive=True)
    yield system
    system_of.cache_clear()
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_object_storage(packed, bucket):
    local = open_images("folder", packed, "val", labelled=True)
    ours = open_images("folder", "memory://bucket/data", "val", labelled=True)
    assert read_all(ours, range(7)) == [local.read(i) for i in range(7)]
    path = "/bucket/data/val/shard-000000.tar"
    whole = bucket.cat(path)
    bucket.pipe(path, whole[:1000])
    with pytest.raises(OSError, match="val/shard-000000.tar"):
        read_all(ours, range(7))
    bucket.rm(path)
    with pytest.raises(OSError, match="val/shard-000000.tar"):
        ours.read(0)

    class TooMuchAsked(Exception):
        pass

    def fail(*_, **__):
        raise TooMuchAsked("of https://user:secret@host/?token=secret")

    system, _ = system_of(ours.storage.store.url, os.getpid())
    system.cat_file = fail
    with pytest.raises(OSError, match="TooMuchAsked: of https://host/$") as error:
        ours.read(0)
    assert error.value.errno == errno.EIO


@pytest.mark.parametrize(
    ("url", "missing", "message"),
    [
        ("https://host/x", "requests", "pip install requests"),
        ("gs://bucket/data", "gcsfs", "gcsfs"),
        ("hf://datasets/owner/name", "huggingface_hub", "pip install huggingface_hub"),
        ("nothing://bucket", "nothing", "Protocol not known: nothing"),
        ("hf://owner/name", "nothing", "hf://datasets/OWNER/NAME"),
    ],
)
def test_urls_that_cannot_be_read(url, missing, message, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "util.data.http_store")
    with pytest.raises(ValueError, match=message):
        open_images("folder", url)


def test_the_hub(packed, tmp_path, monkeypatch):
    """Without its network: a server has the addresses of a data set's files."""
    place = tmp_path / "hub" / "datasets" / "me" / "photos" / "resolve" / "v1"
    shutil.copytree(packed, place / "packed")
    with RangeServer(tmp_path / "hub") as hub:
        hub.login = "Bearer hf_token"
        library = SimpleNamespace(HfApi=lambda: SimpleNamespace(endpoint=hub.url), get_token=lambda: "hf_token")
        monkeypatch.setitem(sys.modules, "huggingface_hub", library)
        ours = open_images("folder", "hf://datasets/me/photos@v1/packed")
        assert ours.read(9) == open_images("folder", packed).read(9)


# -------------------------------------------------------------------------------------------------------- credentials

LOGIN = f"Basic {base64.b64encode(b'me:pa/ss').decode()}"


def test_a_login_of_the_url_or_of_netrc_goes_to_no_other_host(packed, server, tmp_path):
    with RangeServer(packed) as other:
        server.login = LOGIN
        url = server.url.replace("//", "//me:pa%2Fss@") + "/train?token=secret"
        images = open_images("folder", url)
        assert {request.query for request in server.requests} == {"token=secret"}
        assert "secret" not in f"{images.root} {images.path(0)}"
        with pytest.raises(ValueError, match="--data_path"):
            open_images("folder", server.url)
        host = server.url.removeprefix("http://").partition(":")[0]
        (tmp_path / "netrc").write_text(f"machine {host} login me password pa/ss\n")
        assert len(open_images("folder", server.url)) == 24
        server.login = f"Basic {base64.b64encode('tökén€:'.encode()).decode()}"  # as some servers want it
        assert len(open_images("folder", server.url.replace("//", f"//{quote('tökén€')}@"))) == 24
        server.login = LOGIN
        (tmp_path / "netrc").unlink()
        server.redirect = other.url
        images.read(3)
        assert server.requests[-1].headers["Authorization"] == LOGIN
        assert "Authorization" not in other.requests[-1].headers
        other.redirect = server.url  # in a circle
        with pytest.raises(OSError, match="TooManyRedirects") as error:
            images.read(4)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("place", ["http://host:port", "http://[", "ftp://host/?token=secret", "//host:0"])
def test_redirects_that_lead_nowhere(server, place):
    store = HttpStore(server.url + "?token=secret")
    server.redirect = place
    with pytest.raises(OSError) as error:
        store.read(f"train/{INDEX}", 0, 8)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pa%2Fss@host/data?sig=a&b=c rest", "https://host/data rest"),
        ("https://me:p#ss@host/data https://me:p?ss@host/data", "https://host/data https://host/data"),
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
        "https://me:1#secret@host/x",
        "https://me:1?secret@host/x",
        "https:///secret@x",
        "https://host/a b?sig=secret",
        "https://host/it's?sig=secret",
        "https://host/x?sig=a secret",
        "https://host/\u00e9?sig=secret",
    ],
)
def test_credentials_where_they_are_not_read_are_refused(url, tmp_path, capsys):
    assert "secret" not in pretrain.refused(capsys, url, tmp_path / "out")


@pytest.mark.parametrize("main", [main_segmentation, main_detection])
def test_programs_that_read_no_url_refuse_it(main, capsys):
    message = refused(capsys, main.main, "--resume", "x", "--data_path", "https://me:secret@host/x?sig=secret")
    assert "--data_path" in message
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_on_a_url_is_that_on_the_disk(packed, server, tmp_path, undisturbed_run, try_often, num_workers):
    whole = undisturbed_run(pretrain, packed)
    server.trouble = some_fail
    flags = ["--num_workers", num_workers]
    pretrain(server.url, tmp_path / "out", "--max_steps", 4, *flags)
    assert_same_state(pretrain(server.url, tmp_path / "out", *flags), state(whole))
    assert losses(tmp_path / "out") == losses(whole)


@pytest.mark.parametrize(
    ("num_workers", "fault", "is_signalled"),
    [(0, "503", False), (1, "503", False), (0, "401", False), (1, "403", False), (1, "200", True), (1, "cut", True)],
)
def test_an_outage_ends_with_75_and_the_same_command_goes_on(
    packed, server, tmp_path, capsys, undisturbed_run, before_step, num_workers, fault, is_signalled
):
    def lose():
        server.trouble = lambda number, name: fault
        if is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    flags = ["--num_workers", num_workers, "--max_bad_fraction", 0.5, "--save_steps", 1]
    many_epochs = ["--epochs", 2 if num_workers == 0 else 5]  # batches are loaded ahead
    whole = undisturbed_run(pretrain, packed, *many_epochs)
    before_step(3, lose)
    if is_signalled:
        pretrain(server.url, tmp_path / "out", *flags, *many_epochs)  # whose step is saved
    else:
        pretrain.refused(capsys, server.url, tmp_path / "out", *flags, *many_epochs, code=75)
    server.trouble = lambda number, name: None
    assert_same_state(pretrain(server.url, tmp_path / "out", *flags, *many_epochs), state(whole))
    assert losses(tmp_path / "out") == losses(whole)


def test_other_programs_read_urls(packed, server, tmp_path):
    finetune(packed, tmp_path / "local", "--epochs", 1, "--warmup_epochs", 0)
    finetune(server.url, tmp_path / "remote", "--epochs", 1, "--warmup_epochs", 0)
    assert reports_without_times(tmp_path / "remote") == reports_without_times(tmp_path / "local")
    assert evaluate(server.url, tmp_path / "remote") == evaluate(packed, tmp_path / "remote")
