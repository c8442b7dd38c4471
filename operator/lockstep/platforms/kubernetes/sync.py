"""`lockstep sync`: a folder of this machine to the pods of a job, only what differs, all pods at once."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pathspec

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER
from lockstep.platforms.kubernetes import receiver
from lockstep.platforms.kubernetes.cluster import Cluster
from lockstep.platforms.kubernetes.exec import BOOT, Place, Program, program

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".lockstep/", ".DS_Store", "*.swp")
IGNORE_FILES = (".lockstepignore", ".gitignore")
"""The first that is there counts, in the words of git."""
SILENCE_SECONDS = 30.0


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


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """What tells an edit without reading the files: their times and sizes. Of files that are sent only."""
    found = {}
    with suppress(OSError):  # (a folder that is removed while it is walked: the next look sees it so)
        for path in _walk(folder, folder, _ignored(folder)):
            with suppress(OSError):
                here = path.lstat()
                found[path] = (here.st_mtime_ns, here.st_size)
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


async def send(cluster: Cluster, namespace: str, pods: Sequence[str], folder: Path, target: str, *, force: bool = False) -> list[Synced]:
    """To all pods at once, each by a connection of its own. What can't be sent to a pod is its `problem`, and doesn't stop the others."""
    request = {"target": target, "files": await asyncio.to_thread(scan, folder), "force": force}

    async def one(pod: str) -> Synced:
        try:
            return await _to_pod(cluster, Place(namespace, pod, CONTAINER), folder, request)
        except (Failed, OSError) as error:
            return Synced(pod, problem=" ".join(str(error).split())[:300])

    return await asyncio.gather(*map(one, pods))


async def _to_pod(cluster: Cluster, place: Place, folder: Path, request: dict[str, Any]) -> Synced:
    text = _receiver()
    async with program(cluster, place, ["python3", "-c", BOOT, str(len(text))]) as running:
        lines = _Lines(running)
        await running.write(text + json.dumps(request).encode() + b"\n")
        answer = json.loads(await lines.next())
        archive = await asyncio.to_thread(_packed, folder, answer["wanted"], request["files"])
        await running.write(f"{len(archive)}\n".encode() + archive)
        await lines.next()
    return Synced(
        place.pod, len(answer["wanted"]), len(archive) if answer["wanted"] else 0, len(answer["removed"]), tuple(answer["changed"])
    )


@cache
def _receiver() -> bytes:
    return Path(receiver.__file__).read_bytes()


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


class _Lines:
    """What the program in the pod says, line by line. Raises Failed with its own words, or after a silence."""

    def __init__(self, running: Program) -> None:
        self._running = running
        self._heard = b""

    async def next(self) -> bytes:
        while b"\n" not in self._heard:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    data = await self._running.read()
            except TimeoutError:
                raise Failed(f"nothing heard for {SILENCE_SECONDS:.0f} s") from None
            if not data:
                raise self._running.failure()
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line
