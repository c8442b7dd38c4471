"""A small server of the Hugging Face hub's protocol, on loopback: what huggingface_hub asks of it, and the faults that networks and hubs
have.

Facts: https://huggingface.co/docs/hub/api and the requests that huggingface_hub 2.4 makes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LFS_BYTES = 4096
PAGE = 5
TOKEN = "hf_testtokentesttokentest"
READING = "hf_readingreadingreading"
"""Token that may not write."""
CHUNK = 64 << 10


def git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    readers: set[str] = field(default_factory=lambda: {TOKEN})
    """Tokens whose accounts have access."""

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch; its id."""
        sha = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode(), usedforsecurity=False).hexdigest()
        self.commits[sha] = dict(files)
        self.revisions[branch] = sha
        return sha


@dataclass
class Faults:
    """Each counts down: so many times, then no more."""

    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Part of a path → what its next requests are answered with."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """Name of a file → after how many bytes its next transfers end."""
    wrong: dict[str, int] = field(default_factory=dict)
    """Name of a file → how many of its next transfers have a wrong byte."""
    hold: threading.Event = field(default_factory=threading.Event)
    """Event for which transfers of the file in `held` wait in the middle."""
    held: str = ""
    bytes_per_second: float | None = None
    pages: dict[str, bytes] = field(default_factory=dict)
    """Name of a file → what is sent in its place, every time."""
    retry_after: str = "0"
    """Header sent with 429."""
    ranges: bool = True
    """True: ranges are served; False: always the whole file."""


class Hub:
    """The server's state, for tests to read and change while it runs."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.faults = Faults()
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self.kept: dict[str, bytes] = {}
        """SHA-256 of a large file → its bytes, as they were sent to the storage."""
        self.sent: dict[str, int] = {}
        """Name of a file → bytes sent of it."""
        self.moved: dict[str, str] = {}
        """Name of a repository → the one that it has now: it is redirected there."""
        self.endpoint = ""
        self.storage = ""
        """Address to which large files are redirected."""
        self.lock = threading.Lock()

    def add(self, name: str, files: Mapping[str, bytes], kind: str = "models", **options: Any) -> Repository:
        repository = self.repositories[kind, name] = Repository(**options)
        repository.commit(files)
        return repository


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that ends in the middle
            super().handle()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_PUT(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        self._answer(body=True)

    def _sent(self) -> bytes:
        """What the client sends; a fault ends the connection in the middle of it."""
        size, file = int(self.headers.get("Content-Length", 0)), urlsplit(self.path).path.split("/")[1]
        cut = self.hub.faults.cuts.get(file)
        if not cut:
            return self.rfile.read(size)
        self.rfile.read(min(size, cut.pop(0)))
        raise ConnectionError

    def _answer(self, body: bool) -> None:
        hub, path, sent = self.hub, unquote(urlsplit(self.path).path), self._sent()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with hub.lock:
            hub.requests.append(f"{self.command} {path}")
            hub.tokens.append(token)
            planned = next((statuses for part, statuses in hub.faults.statuses.items() if part in path and statuses), None)
            status = planned.pop(0) if planned else None
        if status is not None:
            return self._send(status, {"Retry-After": hub.faults.retry_after} if status == 429 else {})
        if self.command in ("POST", "PUT"):
            return self._write_access(path, sent, token)
        if path.startswith("/cdn/"):
            return self._content(path.split("/")[-1], self._stored(path.split("/")[2]), body, {})
        kind = "datasets" if path.startswith(("/api/datasets/", "/datasets/")) else "models"
        if path.startswith("/api/"):
            return self._api(kind, path.removeprefix(f"/api/{kind}/"), token)
        return self._resolve(kind, path.lstrip("/").removeprefix("datasets/"), token, body)

    def _repository(self, kind: str, name: str, token: str) -> Repository | None:
        """None when it has been refused already."""
        if name in self.hub.moved:
            self._send(307, {"Location": self.path.replace(f"/{name}", f"/{self.hub.moved[name]}", 1)})
            return None
        repository = self.hub.repositories.get((kind, name))
        if repository is None or (repository.private and token not in repository.readers):
            if token:
                self._send(404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            else:
                self._send(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."})
            return None
        return repository

    def _commit(self, repository: Repository, revision: str) -> str | None:
        sha = revision if revision in repository.commits else repository.revisions.get(revision)
        if sha is None:
            self._send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        return sha

    def _api(self, kind: str, path: str, token: str) -> None:
        name, what, revision = path, "revision", "main"
        for separator in ("/revision/", "/tree/"):
            if separator in path:
                name, revision = path.split(separator, 1)
                what = separator.strip("/")
        repository = self._repository(kind, name, token)
        sha = None if repository is None else self._commit(repository, revision)
        if repository is None or sha is None:
            return
        if what == "revision":  # a gated repository's description is public
            return self._json(
                {
                    "id": name,
                    "modelId": name,
                    "sha": sha,
                    "private": repository.private,
                    "gated": repository.gated,
                    "siblings": [],
                    "tags": [],
                }
            )
        files = sorted(repository.commits[sha].items())
        query = parse_qs(urlsplit(self.path).query)
        start = int(query.get("cursor", ["0"])[0])
        link = f'<{self.hub.endpoint}/api/{kind}/{name}/tree/{sha}?recursive=true&cursor={start + PAGE}>; rel="next"'
        self._json(
            [_entry(path, content) for path, content in files[start : start + PAGE]], {"Link": link} if start + PAGE < len(files) else {}
        )

    def _write_access(self, path: str, sent: bytes, token: str) -> None:
        """Make a repository, take files to keep, and commit them."""
        hub, name = self.hub, path.removeprefix("/api/models/").partition("/preupload/")[0].partition("/commit/")[0]
        if path.startswith("/lfs/"):
            hub.kept[path.removeprefix("/lfs/")] = sent
            self._json({})
        elif path == "/api/validate-yaml":
            self._json({})
        elif token not in (TOKEN, READING):
            self._send(401, {"X-Error-Message": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(sent), token)
        elif path.endswith(".git/info/lfs/objects/batch"):
            places = [(item, {"upload": {"href": f"{hub.storage}/lfs/{item['oid']}"}}) for item in json.loads(sent)["objects"]]
            self._json({"transfer": "basic", "objects": [{**item, "actions": actions} for item, actions in places]})
        elif "/preupload/" in path:
            modes = [("lfs" if file["size"] >= LFS_BYTES else "regular", file["path"]) for file in json.loads(sent)["files"]]
            self._json({"files": [{"path": file, "uploadMode": mode, "shouldIgnore": False} for mode, file in modes]})
        else:
            lines = [(line["key"], line["value"]) for line in map(json.loads, sent.splitlines())]
            files = {value["path"]: base64.b64decode(value["content"]) for key, value in lines if key == "file"}
            files |= {value["path"]: hub.kept[value["oid"]] for key, value in lines if key == "lfsFile"}
            sha = hub.repositories["models", name].commit(files)
            self._json({"commitUrl": f"{hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})

    def _create(self, wish: dict[str, str], token: str) -> None:
        name = f"{wish['organization']}/{wish['name']}"
        if token == READING:
            self._send(403, {"X-Error-Message": "You don't have the rights to create a model under this namespace"})
            return
        is_new = ("models", name) not in self.hub.repositories
        if is_new:
            self.hub.add(name, {}, private=wish["visibility"] == "private")
        self._json({"url": f"{self.hub.endpoint}/{name}"}, status=200 if is_new else 409)

    def _resolve(self, kind: str, path: str, token: str, body: bool) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        repository = self._repository(kind, name, token)
        if repository is None:
            return
        if repository.gated and token not in repository.readers:
            return self._send(
                403 if token else 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {kind} {name} is restricted"}
            )
        sha = self._commit(repository, revision)
        if sha is None:
            return
        content = repository.commits[sha].get(file)
        if content is None:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        headers = {"X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if len(content) < LFS_BYTES:
            return self._content(file, content, body, headers | {"ETag": f'"{git_sha(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content)), "ETag": f'"{digest}"'}
        self._send(302, headers | linked | {"Location": f"{self.hub.storage}/cdn/{digest}/{file}?signature=secret"})

    def _stored(self, digest: str) -> bytes:
        every = (
            content for repository in self.hub.repositories.values() for files in repository.commits.values() for content in files.values()
        )
        return next(content for content in every if hashlib.sha256(content).hexdigest() == digest)

    def _content(self, file: str, content: bytes, body: bool, headers: dict[str, str]) -> None:
        faults, start = self.hub.faults, 0
        content = faults.pages.get(file, content)
        asked = self.headers.get("Range") if faults.ranges else None
        if asked is not None:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                return self._send(416, {"Content-Range": f"bytes */{len(content)}"})
            headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        with self.hub.lock:
            cut = faults.cuts[file].pop(0) if faults.cuts.get(file) else None
            wrong = faults.wrong.get(file, 0) > 0
            if wrong and body:
                faults.wrong[file] -= 1
        if wrong:
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(200 if asked is None else 206)
        for key, value in {"Content-Length": str(len(content) - start), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self._write(file, content[start : len(content) if cut is None else start + cut])
            self.close_connection = cut is not None

    def _write(self, file: str, content: bytes) -> None:
        faults = self.hub.faults
        step = CHUNK if faults.bytes_per_second is None else 4096
        for number, start in enumerate(range(0, len(content), step)):
            if number == 1 and file == faults.held:
                faults.hold.wait(60)
            try:
                self.wfile.write(content[start : start + step])
            except OSError:
                return
            with self.hub.lock:
                self.hub.sent[file] = self.hub.sent.get(file, 0) + len(content[start : start + step])
            if faults.bytes_per_second is not None:
                time.sleep(step / faults.bytes_per_second)

    def _json(self, value: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for key, header in {"Content-Type": "application/json", "Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(key, header)
        self.end_headers()
        self.wfile.write(text)

    def _send(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key, value)
        self.end_headers()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_sha(content)}
    if len(content) >= LFS_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


@contextmanager
def running_hub(address: str = "127.0.0.1") -> Iterator[Hub]:
    """A hub that answers until the end of the block. Nothing of it outlives that."""
    hub = Hub()
    server = ThreadingHTTPServer((address, 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = hub.storage = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.faults.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_of_this_process(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """A hub that HF_ENDPOINT names, without a token or a login, whose faults are tried again at once."""
    patch.setattr("lockstep_train.fetch.fetch.BACKOFF_SECONDS", 0.01)
    for variable in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        patch.delenv(variable, raising=False)
    patch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(folder / "no-login"))
    with running_hub() as hub:
        patch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub
