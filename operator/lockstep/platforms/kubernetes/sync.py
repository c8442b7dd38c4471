"""`lockstep sync`: a folder of this machine to the pods of a job, only what differs, all pods at once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspec

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER
from lockstep.platforms.kubernetes import receiver

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".lockstep/", ".DS_Store", "*.swp")
IGNORE_FILES = (".lockstepignore", ".gitignore")
"""The first that is there counts, in the words of git."""
SILENCE_SECONDS = 30.0
_FRAME_BYTES = 1 << 20


@dataclass(frozen=True)
class Synced:
    """What became of one pod. `problem`: why it didn't get everything."""

    pod: str
    sent: int = 0
    bytes: int = 0
    removed: int = 0
    changed: tuple[str, ...] = ()
    """Files that were changed in the pod since the last sync, and were left as they are."""
    problem: str | None = None


def scan(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file and link below `folder` that isn't ignored, by its path with slashes. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name the one to send")
    ignored = _ignored(folder)
    found = {}
    for path in _walk(folder, folder, ignored):
        name = path.relative_to(folder).as_posix()
        content = receiver.digest(path)
        if content is not None:
            link = path.is_symlink()
            found[name] = {"sha256": content, "link": link, "executable": not link and os.access(path, os.X_OK)}
    return found


def _ignored(folder: Path) -> pathspec.GitIgnoreSpec:
    own = next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)
    lines = own.read_text(encoding="utf-8").splitlines() if own is not None else []
    return pathspec.GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *lines])


def _walk(root: Path, folder: Path, ignored: pathspec.GitIgnoreSpec) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        if entry.is_dir(follow_symlinks=False):
            if not ignored.match_file(f"{name}/"):
                yield from _walk(root, path, ignored)
        elif (entry.is_symlink() or entry.is_file()) and not ignored.match_file(name):
            yield path


def send(
    connect: Callable[[], Any], namespace: str, pods: Sequence[str], folder: Path, target: str, *, force: bool = False
) -> list[Synced]:
    """To all pods at once, each by a connection of its own. What can't be sent to a pod is its `problem`, and doesn't stop the others."""
    files = scan(folder)

    def one(pod: str) -> Synced:
        try:
            with connect() as client:
                return _to_pod(client, (namespace, pod), folder, {"target": target, "files": files, "force": force})
        except Exception as error:  # (of the client library's many: any keeps this pod only from its files)
            return Synced(pod, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    with ThreadPoolExecutor(max(1, len(pods))) as threads:
        return list(threads.map(one, pods))


def _to_pod(client: Any, place: tuple[str, str], folder: Path, request: dict[str, Any]) -> Synced:
    with _Session(client, *place) as session:
        session.write(json.dumps(request).encode() + b"\n")
        answer = json.loads(session.line())
        archive = _packed(folder, answer["wanted"], request["files"])
        session.write(f"{len(archive)}\n".encode() + archive)
        session.line()
    return Synced(
        place[1], len(answer["wanted"]), len(archive) if answer["wanted"] else 0, len(answer["removed"]), tuple(answer["changed"])
    )


def _packed(folder: Path, names: Sequence[str], files: dict[str, dict[str, Any]]) -> bytes:
    """Raises Failed when a file has changed since it was looked at: half of an edit must not travel."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            path, member = folder / name, tarfile.TarInfo(name)
            if files[name]["link"]:
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                archive.addfile(member)
                continue
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != files[name]["sha256"]:
                raise Failed(f"{path} was changed while it was sent: sync again")
            member.size, member.mode = len(content), 0o775 if files[name]["executable"] else 0o664
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class _Session:
    """The receiver in one pod: bytes to it, lines from it. Raises Failed with its own words, or after a silence."""

    def __init__(self, client: Any, namespace: str, pod: str) -> None:
        from kubernetes.client import CoreV1Api
        from kubernetes.stream import stream

        program = Path(receiver.__file__).read_text(encoding="utf-8")
        self._socket = stream(
            CoreV1Api(client).connect_get_namespaced_pod_exec, pod, namespace, container=CONTAINER, command=["python3", "-c", program],
            stdin=True, stdout=True, stderr=True, tty=False, _preload_content=False, binary=True, _request_timeout=SILENCE_SECONDS,
        )  # fmt: skip
        self._at_end = ExitStack()
        self._at_end.callback(self._socket.sock.shutdown)  # close() leaves the socket open when the peer closed first
        self._at_end.callback(self._socket.close)
        self._lines = b""

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._at_end.close()

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), _FRAME_BYTES):
            self._socket.write_stdin(data[start : start + _FRAME_BYTES])

    def line(self) -> bytes:
        errors, heard = b"", time.monotonic()
        while b"\n" not in self._lines:
            self._socket.update(timeout=1)
            got = self._socket.read_stdout() if self._socket.peek_stdout() else b""
            said = self._socket.read_stderr() if self._socket.peek_stderr() else b""
            self._lines, errors = self._lines + got, errors + said
            if got or said:
                heard = time.monotonic()
            elif not self._socket.is_open():
                raise Failed(
                    errors.decode(errors="replace").strip().splitlines()[-1] if errors else "the program in the pod ended without a word"
                )
            elif time.monotonic() - heard > SILENCE_SECONDS:
                raise Failed(f"nothing heard for {SILENCE_SECONDS:.0f} s")
        line, _, self._lines = self._lines.partition(b"\n")
        return line
