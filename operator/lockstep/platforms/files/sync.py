"""`lockstep sync`: send a folder of this machine to all nodes of a job at once, and only what differs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pathspec

from lockstep.api.errors import ConfigError, Failed
from lockstep.platforms.inpod import receiver, source_of
from lockstep.programs import Place, Program, answer_of, lines_in, python_program

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".lockstep/", ".DS_Store", "*.swp")
IGNORE_FILES = (".lockstepignore", ".gitignore")
"""Files of patterns in git's syntax. The first one that exists counts."""
SILENCE_SECONDS = 30.0
LINES_WAITING_MAX = 4
"""Lines of a node that wait to be read. One is asked for at a time."""


@dataclass(frozen=True)
class Synced:
    """Outcome for one node. `problem`: why it didn't get everything."""

    node: str
    """Its name: that of its pod, or of its host."""
    sent: int = 0
    bytes: int = 0
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Files that were changed there since the last sync, and were left as they are."""
    others: tuple[str, ...] = ()
    """Files that another folder's sync put there, and that were left as they are."""
    problem: str | None = None


def scan(folder: Path) -> dict[str, dict[str, Any]]:
    """Every file and link below `folder` that isn't ignored, by its path with slashes. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder to send")
    files = {}
    for name, entry in _walk(str(folder), "", _ignored(folder)):
        content = receiver.digest(entry.path)
        if content is not None:
            link = entry.is_symlink()
            if link:
                _refuse_outside(folder, name, Path(entry.path).readlink())
            files[name] = {"sha256": content, "link": link, "executable": not link and os.access(entry.path, os.X_OK)}
    return files


def _refuse_outside(folder: Path, name: str, target: Path) -> None:
    """Raise ConfigError for a link that leads out of the folder: there, it would lead to something else."""
    if Path(os.path.normpath(Path(name).parent / target)).parts[:1] in ((os.sep,), (os.pardir,)):
        own = next((file for file in IGNORE_FILES if (folder / file).is_file()), IGNORE_FILES[0])
        raise ConfigError(
            f"{folder / name} is a link to {target}, out of the folder that is sent: put a copy in its place, or name it in {folder / own}, and it stays here"
        )


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Times and sizes of the files that are sent: they show an edit without reading the files."""
    files = {}
    with suppress(OSError, ConfigError):  # (a folder that is removed while it is walked: the next look sees it so)
        for name, entry in _walk(str(folder), "", _ignored(folder)):
            with suppress(OSError):
                here = entry.stat(follow_symlinks=False)
                files[name] = (here.st_mtime_ns, here.st_size)
    return files


def _ignored(folder: Path) -> pathspec.GitIgnoreSpec:
    """Patterns of files that stay here. Raises ConfigError."""
    own = next((folder / name for name in IGNORE_FILES if (folder / name).is_file()), None)
    try:
        lines = own.read_text(encoding="utf-8").splitlines() if own is not None else []
        return pathspec.GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *lines])
    except ValueError as error:  # (no UTF-8, or no pattern)
        raise ConfigError(f"{own} is not a valid ignore file in git's syntax: {error}") from None


def _walk(folder: str, below: str, ignored: pathspec.GitIgnoreSpec) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Path with slashes and entry of every file and link, sorted."""
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        name = f"{below}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if not ignored.match_file(f"{name}/"):
                yield from _walk(entry.path, f"{name}/", ignored)
        elif (entry.is_symlink() or entry.is_file()) and not ignored.match_file(name):
            yield name, entry


class Receivers:
    """One receiving program on each node, for as long as this is open, so that the next sync costs no new connection. Use `async with`."""

    def __init__(self, *, own_umask: bool = False) -> None:
        """`own_umask`: who else may read and write what is sent is up to the umask there; else it is the group's, as in pods."""
        self._own_umask = own_umask
        self._open: dict[str, _Receiver] = {}

    async def __aenter__(self) -> Receivers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self._drop(node) for node in list(self._open)))

    @property
    def are_there(self) -> bool:
        """True if none has ended: a node that was restarted may have lost what it was sent."""
        return not any(receiver.has_ended for receiver in self._open.values())

    async def send(self, places: Mapping[str, Place], folder: Path, target: str, *, force: bool = False) -> list[Synced]:
        """Send to all nodes, each by its name, at once. One that can't be sent to has a `problem`, and doesn't stop the others. Raises ConfigError."""
        for gone in self._open.keys() - places.keys():
            await self._drop(gone)
        source = _named(folder)
        scanning = asyncio.ensure_future(asyncio.to_thread(scan, folder))  # while connections are made

        async def one(node: str, place: Place) -> Synced:
            try:
                receiver = await self._receiver(node, place)
                return await receiver.take(node, folder, {"target": target, "source": source, "files": await scanning, "force": force})
            except (Failed, OSError) as error:
                await self._drop(node)
                return Synced(node, problem=" ".join(str(error).split())[:300])

        results = await asyncio.gather(*(one(node, place) for node, place in places.items()), return_exceptions=True)
        await asyncio.gather(scanning, return_exceptions=True)  # (told by every node that got so far)
        return [_raised(result) for result in results]

    async def _receiver(self, node: str, place: Place) -> _Receiver:
        if node in self._open and self._open[node].has_ended:
            await self._drop(node)
        if node not in self._open:
            self._open[node] = await _Receiver.start(place, own_umask=self._own_umask)
        return self._open[node]

    async def _drop(self, node: str) -> None:
        receiver = self._open.pop(node, None)
        if receiver is not None:
            await receiver.close()


def _named(folder: Path) -> str:
    """Name that tells folders apart that send files to the same place."""
    return f"{socket.gethostname()}:{folder.absolute()}"


def _raised(result: Synced | BaseException) -> Synced:
    if isinstance(result, BaseException):
        raise result
    return result


class _Receiver:
    """The program on one node. Its output is read at once, so that its end is noticed, too."""

    def __init__(self, running: Program, stack: AsyncExitStack) -> None:
        self._running, self._stack = running, stack
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(LINES_WAITING_MAX)
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def start(cls, place: Place, *, own_umask: bool) -> _Receiver:
        arguments = [receiver.OWN_UMASK] if own_umask else []
        stack, options = AsyncExitStack(), ("-I", "-S")  # (an image's site-packages would be looked through for nothing)
        program = python_program(place, source_of(receiver), *arguments, options=options, pings=True)
        return cls(await stack.enter_async_context(program), stack)

    @property
    def has_ended(self) -> bool:
        return self._hearing.done()

    async def take(self, node: str, folder: Path, request: dict[str, Any]) -> Synced:
        """Let the node take what it lacks. Raises Failed, with the program's own message if it has one."""
        await self._running.write(json.dumps(request).encode() + b"\n")
        answer = _checked(await self._answer(), request["files"], self._running.place.name)
        size = 0
        if not answer["done"]:
            archive = await asyncio.to_thread(_packed, folder, answer["wanted"], request["files"])
            size = len(archive) if answer["wanted"] else 0
            await self._running.write(f"{len(archive)}\n".encode() + archive)
            await self._answer()
        removed, changed, others = (tuple(answer[key]) for key in ("removed", "changed", "others"))
        return Synced(node, len(answer["wanted"]), size, removed, changed, others)

    async def _answer(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                line = await self._lines.get()
        except TimeoutError:
            raise Failed(f"it has not answered for {SILENCE_SECONDS:.0f} s") from None
        if line is None:
            raise self._running.failure()
        return answer_of(line, self._running.place.name)

    async def _hear(self) -> None:
        """Queue lines while there is room: a program that prints more than it was asked for waits until it is read, or left."""
        try:
            async for line in lines_in(self._running):
                await self._lines.put(line)
        finally:
            if self._lines.full():
                self._lines.get_nowait()
            self._lines.put_nowait(None)

    async def close(self) -> None:
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        await self._stack.aclose()


def _checked(answer: dict[str, Any], files: dict[str, Any], where: str) -> dict[str, Any]:
    """The node's first answer: what it wants is offered, and what else it names are names. Raises Failed."""
    wanted, *more = (answer.get(key) for key in ("wanted", "removed", "changed", "others"))
    lists = all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in (wanted, *more))
    if not (
        lists and len(set(wanted or ())) == len(wanted or ()) and set(wanted or ()) <= files.keys() and isinstance(answer.get("done"), bool)
    ):
        raise Failed(f"python3 in {where} asks for files that were not offered: check the image's python3")
    return answer


def _packed(folder: Path, names: Sequence[str], files: dict[str, dict[str, Any]]) -> bytes:
    """Archive of the files. Raises Failed when one has changed since it was scanned: half of an edit must not travel."""
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
