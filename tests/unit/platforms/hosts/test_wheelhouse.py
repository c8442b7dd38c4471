"""A folder of wheels: filled from an index, checked by the lock's digests."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.api.errors import Failed
from lockstep.plan.hosts.wheels import HostTarget, read_lock
from lockstep.platforms.hosts import wheelhouse
from lockstep.platforms.hosts.environment import address_of_python
from lockstep.platforms.hosts.wheelhouse import WheelFile, gather, index_here
from lockstep.programs import ProgramFailed
from unit.virtual_time import VirtualClock

HOST = HostTarget((3, 11), "x86_64", (2, 36))
CONTENT = b"a wheel's bytes" * 1000
NAME = "small-1.0-py3-none-any.whl"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Index:
    """An index of one package, on this machine."""

    def __init__(self) -> None:
        self.files = {NAME: CONTENT}
        self.stated: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        self.cuts = 0
        """So many downloads break in the middle."""
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.requests.append((self.path, self.headers.get("Range", "")))
                name = self.path.rpartition("/")[2]
                if name in index.files:
                    self._file(index.files[name])
                elif self.path in ("/simple/small/", "/simple/evil/"):
                    self._send(200, *index.page())
                else:
                    self._send(404, b"", "text/plain")

            def _file(self, content: bytes) -> None:
                start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
                if index.cuts:
                    index.cuts -= 1
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    return
                self._send(206 if start else 200, content[start:], "application/octet-stream")

            def _send(self, code: int, body: bytes, kind: str) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def page(self) -> tuple[bytes, str]:
        digests = {name: self.stated.get(name, digest(content)) for name, content in self.files.items()}
        links = "".join(f'<a href="../../files/{name}#sha256={one}">{name}</a>' for name, one in digests.items())
        return f"<html><body>{links}</body></html>".encode(), "text/html"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setattr(wheelhouse, "RETRY_SECONDS", 0.01)
    one = Index()
    thread = threading.Thread(target=one.server.serve_forever, args=(0.05,))
    thread.start()
    yield one
    one.server.shutdown()
    thread.join()
    one.server.server_close()


def gathered(index: str, folder: Path, pin: str = "small==1.0", sha256: str = digest(CONTENT)) -> list[WheelFile]:
    text = f"{pin} --hash=sha256:{sha256}"
    return asyncio.run(gather(read_lock(text, "lock"), [HOST], folder, index, lambda _: None))[HOST]


def test_a_file_that_is_not_there_comes_from_the_index_once(index: Index, tmp_path: Path) -> None:
    assert gathered(index.url, tmp_path / "house") == [WheelFile(tmp_path / "house" / NAME, digest(CONTENT))]
    assert (tmp_path / "house" / NAME).read_bytes() == CONTENT
    asked = len(index.requests)
    assert gathered(index.url, tmp_path / "house") == [WheelFile(tmp_path / "house" / NAME, digest(CONTENT))]
    assert len(index.requests) == asked, "a folder that has everything asks no index"


async def test_two_set_ups_at_once_wait_for_each_other(index: Index, tmp_path: Path) -> None:
    text = f"small==1.0 --hash=sha256:{digest(CONTENT)}"
    both = (gather(read_lock(text, "lock"), [HOST], tmp_path, index.url, lambda _: None) for _ in range(2))
    assert await asyncio.gather(*both) == [{HOST: [WheelFile(tmp_path / NAME, digest(CONTENT))]}] * 2
    assert [path for path, _ in index.requests if path.startswith("/files/")] == [f"/files/{NAME}"]


def test_a_download_that_breaks_goes_on_where_it_broke(index: Index, tmp_path: Path) -> None:
    index.cuts = 1
    gathered(index.url, tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert index.requests[-1] == (f"/files/{NAME}", f"bytes={len(CONTENT) // 2}-")


def test_files_that_the_lock_does_not_have_are_passed_over(index: Index, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"no file with a digest of the lock for small 1\.0 for Python 3\.11 on x86_64 with glibc 2\.36"):
        gathered(index.url, tmp_path, sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_what_the_index_states_is_removed(index: Index, tmp_path: Path) -> None:
    index.stated[NAME] = "1" * 64
    with pytest.raises(Failed, match=f"has the SHA-256 {digest(CONTENT)}, and {'1' * 64} is expected"):
        gathered(index.url, tmp_path, sha256="1" * 64)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_folder_that_is_not_the_lock_s_is_refused_with_both_digests(index: Index, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"other")
    with pytest.raises(Failed, match=f"{NAME} has the SHA-256 {digest(b'other')}, but the lock has {digest(CONTENT)} for small 1.0"):
        gathered(index.url, tmp_path)
    assert index.requests == []


def test_an_index_without_the_package_is_told(index: Index, tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"no files for Python 3\.11 on x86_64 with glibc 2\.36: .* none was not found"):
        gathered(index.url, tmp_path, "none==1.0")


def test_a_package_that_the_lock_wants_elsewhere_is_left_out(index: Index, tmp_path: Path) -> None:
    assert gathered(index.url, tmp_path, "small==1.0 ; sys_platform == 'win32'") == []


def test_an_index_that_does_not_answer_is_told_without_its_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(Failed, match=r"http://127\.0\.0\.1:9/simple/small/") as caught:
        gathered("http://ada:secret@127.0.0.1:9/simple", tmp_path)
    assert "secret" not in str(caught.value)


def test_what_a_source_archive_would_run_is_not_run_here(index: Index, tmp_path: Path) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        content = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
        entry = tarfile.TarInfo("evil-1.0/setup.py")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    index.files = {"evil-1.0.tar.gz": written.getvalue()}
    for _ in range(2):  # from the index, then from the folder
        files = gathered(index.url, tmp_path / "house", "evil==1.0", digest(written.getvalue()))
        assert [file.path.name for file in files] == ["evil-1.0.tar.gz"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("stated", "variables", "expected"),
    [
        ("https://lab/simple", {"PIP_INDEX_URL": "https://pip/simple"}, "https://lab/simple"),
        (None, {"PIP_INDEX_URL": "https://pip/simple"}, "https://pip/simple"),
        (None, {"PIP_INDEX_URL": "https://pip/simple", "UV_DEFAULT_INDEX": "https://uv/simple"}, "https://uv/simple"),
        (None, {}, None),
    ],
)
def test_this_machine_asks_the_index_of_the_file_then_its_own(
    monkeypatch: pytest.MonkeyPatch, stated: str | None, variables: dict[str, str], expected: str | None
) -> None:
    for name in wheelhouse.INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert index_here(stated) == expected


async def test_a_file_that_several_hosts_wait_for_is_downloaded_once(index: Index, tmp_path: Path) -> None:
    await asyncio.gather(*(wheelhouse.fetch(f"{index.url}/files/{NAME}", tmp_path / NAME) for _ in range(3)))
    assert (tmp_path / NAME).read_bytes() == CONTENT and len(index.requests) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/20260101/cpython-3.13.tar.gz",
        "https://host/20260101/..%2F..%2Fcpython-3.13.tar.gz",
        "https://host/20260101/.bashrc",
        "https://host/cpython-3.13.tar.gz",
    ],
)
def test_an_answer_of_a_host_that_is_no_address_of_a_python_is_not_downloaded(url: str) -> None:
    with pytest.raises(ProgramFailed, match=r"host lab0: .* is no address of a Python: it is https://"):
        address_of_python("lab0", url)


def test_the_address_of_a_python_has_its_release_and_its_name() -> None:
    url = "https://host/releases/download/20260101/cpython-3.13.1%2B20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz"
    assert address_of_python("lab0", url) == ("20260101", "cpython-3.13.1+20260101-x86_64-unknown-linux-gnu-install_only_stripped.tar.gz")


def test_a_download_that_the_network_breaks_is_tried_four_times_ever_later() -> None:
    clock, tries = VirtualClock(), list[float]()

    async def broken() -> None:
        tries.append(clock.now - 1000.0)
        raise OSError("reset")

    with pytest.raises(Failed, match="can't be downloaded: reset"):
        clock.run(wheelhouse._again(broken, "x"))
    assert tries == [0, 2, 6, 12]


class Answer:
    """An answer of an index, and what was read of it at once."""

    status, content_type, url, content = 200, "application/json", "https://index/", property(lambda self: self)

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.session: Any = SimpleNamespace(get=lambda *_, **__: self)

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def raise_for_status(self) -> None:
        pass

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        self.sizes.append(size)
        yield CONTENT


def test_a_download_is_written_by_pieces_of_a_mebibyte(tmp_path: Path) -> None:
    answer = Answer()
    asyncio.run(wheelhouse.download(answer.session, "https://index/x.whl", tmp_path / "x.whl", digest(CONTENT)))
    assert answer.sizes == [1 << 20] and (tmp_path / "x.whl").read_bytes() == CONTENT
