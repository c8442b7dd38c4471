"""Fetching from an object store, with a real S3 server beside."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyarrow import fs

from lockstep_spec.modelnames import FETCHED
from lockstep_train.base.errors import ConfigError, TrainerError
from lockstep_train.data.read.remote import data_remote as data_remote_of
from lockstep_train.fetch import fetch as fetching
from lockstep_train.fetch import objects
from lockstep_train.fetch.fetch import Fetched, fetch, pin_of
from lockstep_train.fetch.model import model_files, model_remote
from lockstep_train.fetch.remote import MayPass, RemoteFile
from support.s3_server import bucket, running_s3

LARGE = os.urandom(12_000_000)
FILES = {"config.json": b"{}", "tokenizer.json": b"t" * 1000, "model.safetensors": LARGE, "model.bin": b"pickle"}
ADDRESS = "s3://models/team/tiny"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_s3() as address:
        yield address


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pyarrow's file system on the server, with the model there."""
    monkeypatch.setattr(fetching, "BACKOFF_SECONDS", 0.01)
    with bucket(server, "models", {f"team/tiny/{path}": content for path, content in FILES.items()}, monkeypatch) as store:
        yield store


def md5(content: bytes) -> Any:
    return hashlib.md5(content, usedforsecurity=False)


def put(store: Any, name: str, content: bytes) -> None:
    with store.open_output_stream(f"models/team/tiny/{name}") as file:
        file.write(content)


def get(cache: Path, address: str = ADDRESS, pin: str | None = None) -> Fetched:
    remote = model_remote(address)
    return fetch(remote, pin or pin_of(remote, None, cache, print), cache, print, choose=model_files(address))


def test_a_model_of_an_object_store_is_fetched_as_one_of_the_hub(store: Any, tmp_path: Path) -> None:
    fetched = get(tmp_path)
    assert fetched.folder == tmp_path / "models" / "s3--models--team--tiny" / fetched.pin
    assert {path.name for path in fetched.folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors", FETCHED}
    assert (fetched.folder / "model.safetensors").read_bytes() == LARGE
    assert get(tmp_path, pin=fetched.pin) == fetched


def test_a_revision_of_an_object_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{ADDRESS} has no revision v1: an object store has none; leave it out"):
        pin_of(model_remote(ADDRESS), "v1", tmp_path, print)


def test_objects_that_change_are_another_model_and_a_run_is_told(store: Any, tmp_path: Path) -> None:
    before = get(tmp_path / "a")
    put(store, "config.json", b'{"a": 1}')
    assert get(tmp_path / "a", pin=before.pin) == before
    assert get(tmp_path / "a").pin != before.pin
    with pytest.raises(ConfigError, match="s3://models/team/tiny was changed since this job first looked there"):
        get(tmp_path / "b", pin=before.pin)


def test_a_fetch_that_was_cut_goes_on_at_the_byte(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, starts = objects.ObjectFolder.read, []

    def watched(self: Any, file: Any, pin: str, sink: Any, start: int) -> None:
        starts.append((file.path, start))
        if file.path == "model.safetensors" and start == 0:
            sink.write(LARGE[:5_000_000])
            raise KeyboardInterrupt
        real(self, file, pin, sink, start)

    monkeypatch.setattr(objects.ObjectFolder, "read", watched)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path)
    starts.clear()
    assert (get(tmp_path).folder / "model.safetensors").read_bytes() == LARGE
    assert ("model.safetensors", 5_000_000) in starts


def test_a_wrong_byte_is_seen_by_the_etag(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, wrong = objects.ObjectFolder.read, [1]

    def changed(self: Any, file: Any, pin: str, sink: Any, start: int) -> None:
        if file.path == "model.safetensors" and wrong.pop() if wrong else False:
            sink.write(bytes(file.size))
        else:
            real(self, file, pin, sink, start)

    monkeypatch.setattr(objects.ObjectFolder, "read", changed)
    monkeypatch.setattr(fetching, "TRANSFERS", 1)  # the largest file is the first
    assert (get(tmp_path).folder / "model.safetensors").read_bytes() == LARGE
    assert wrong == []


def test_an_etag_that_is_no_digest_costs_a_second_read(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(objects, "_is_etag", lambda path, size, tag: False)
    assert (get(tmp_path).folder / "model.safetensors").read_bytes() == LARGE
    assert (
        "model.safetensors of s3://models/team/tiny has an ETag that is no MD5 of it: two equal reads are taken for right"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (
            "s3://nobody/tiny",
            r"s3://nobody/tiny can't be read \(NO_SUCH_BUCKET\); check the address, and that the key may read it: AWS_ACCESS_KEY_ID",
        ),
        ("s3://models/none", "s3://models/none holds nothing; check the address"),
        ("ftp://models/tiny", "ftp://models/tiny can't be fetched: addresses must begin with s3://, gs://"),
    ],
)
def test_an_address_that_can_not_be_is_one_sentence_and_final(store: Any, tmp_path: Path, address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        get(tmp_path, address)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("region", ["", "us-east-1"])
@pytest.mark.parametrize(
    "address",
    [
        "s3://key:word@models/tiny",
        "s3://key:a/word+@models/tiny",
        "s3://word@models/tiny",
        "gs://:word@models/tiny",
        "abfs://container:a/word==@account/tiny",
        "abfs://container@account/tiny?sv=1&sig=word",
        "https://key:word@models/tiny",
    ],
)
def test_a_password_in_an_address_is_refused_and_not_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, region: str
) -> None:
    monkeypatch.setenv("AWS_REGION", region)
    words = f"an address of {address.partition(':')[0]}:// holds a password or a port .*; take it out"
    for remote, path in ((model_remote, ""), (data_remote_of, ""), (data_remote_of, "/*.parquet"), (data_remote_of, "/*/a.csv")):
        with pytest.raises(ConfigError, match=words) as refused:
            remote(address + path)
        assert "word" not in str(refused.value).replace("password", "")


def test_a_volume_that_is_full_is_no_fault_of_the_store(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, volume = objects.ObjectFolder.read, SimpleNamespace(write=full)
    monkeypatch.setattr(objects.ObjectFolder, "read", lambda self, file, pin, sink, start: real(self, file, pin, volume, start))
    with pytest.raises(TrainerError, match="No space left on device; free space on the volume or use a larger claim") as failed:
        get(tmp_path)
    assert failed.value.exit_code == 1


def full(data: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A store that answers everything with the status, the code and the message that the list holds."""
    answer: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code, message = answer
            text = f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>1</RequestId></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test", "AWS_REGION": "us-east-1"}
    for variable, value in {**variables, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}.items():
        monkeypatch.setenv(variable, value)
    yield answer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "message", "reason"),
    [
        (301, "PermanentRedirect", "Use the specified endpoint.", "PermanentRedirect: Use the specified endpoint."),
        (400, "AuthorizationHeaderMalformed", "expecting eu-central-1", "AuthorizationHeaderMalformed: expecting eu-central-1"),
        (400, "ExpiredToken", "The provided token has expired.", "ExpiredToken: The provided token has expired."),
        (403, "AccountProblem", "There is a problem.", "AccountProblem: There is a problem."),
        (403, "", "", "HTTP status 403"),
        (403, "SignatureDoesNotMatch", "x", "SIGNATURE_DOES_NOT_MATCH"),
    ],
)
def test_a_store_that_refuses_is_told_in_its_words_and_final(
    refusing: list[Any], tmp_path: Path, status: int, code: str, message: str, reason: str
) -> None:
    refusing[:] = status, code, message
    with pytest.raises(ConfigError, match=re.escape(f"{ADDRESS} can't be read ({reason}); check the address")):
        get(tmp_path)


def test_a_store_that_is_busy_is_no_final_failure(refusing: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ATTEMPTS", 1)
    refusing[:] = 409, "OperationAborted", "Try again."
    with pytest.raises(TrainerError, match=f"{ADDRESS} can't be read: OperationAborted: Try again") as failed:
        get(tmp_path)
    assert failed.value.exit_code == 1


def test_an_archived_object_is_a_final_refusal() -> None:
    words = "AWS Error [code 136] during GetObject operation: The operation is not valid for the object's storage class"
    assert isinstance(objects.ObjectFolder(ADDRESS)._problem(OSError(words)), ConfigError)


def test_a_region_that_can_not_be_looked_up_now_is_no_final_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreached(address: str) -> Any:
        raise OSError("When resolving region for bucket 'models': AWS Error NETWORK_CONNECTION during HeadBucket operation: no route")

    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=unreached))
    with pytest.raises(MayPass, match=f"{ADDRESS} can't be read: NETWORK_CONNECTION"):
        objects.ObjectFolder(ADDRESS).resolve(None)


def test_a_store_that_is_not_reached_is_no_final_failure(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TrainerError, match="s3://models/team/tiny can't be read: NETWORK_CONNECTION") as failed:
        get(tmp_path)
    assert failed.value.exit_code == 1


@pytest.mark.parametrize(("size", "part"), [(0, 8 << 20), (100, 100), (12_000_000, 8 << 20), (30_000_000, 10 << 20)])
def test_the_etag_of_an_upload_in_parts_is_the_md5_of_their_md5s(tmp_path: Path, size: int, part: int) -> None:
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    pieces = [content[start : start + part] for start in range(0, max(size, 1), part)]
    tag = md5(b"".join(md5(piece).digest() for piece in pieces)).hexdigest() + f"-{len(pieces)}"
    assert objects._is_etag(tmp_path / "a", size, tag)
    assert not objects._is_etag(tmp_path / "a", size, "0" * 32 + f"-{len(pieces)}")
    assert objects._is_etag(tmp_path / "a", size, md5(content).hexdigest())


class Pretending(io.BytesIO):
    """An object of zeros."""

    def metadata(self) -> dict[str, bytes]:
        return {}


def test_an_object_is_read_eight_mebibytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sizes = objects.ObjectFolder(ADDRESS), list[int]()
    system = SimpleNamespace(open_input_file=lambda _: Pretending(bytes(20 << 20)))
    monkeypatch.setattr(folder, "_system", lambda: (system, "models/team/tiny"))
    sink = SimpleNamespace(write=lambda data: sizes.append(len(data)))
    folder.read(RemoteFile("x", 20 << 20, ""), "", cast(Any, sink), 0)
    assert sizes == [8 << 20, 8 << 20, 4 << 20]
