"""`lockstep sync`: send a folder of this machine to all nodes of a job at once, and only what differs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import socket
import tarfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pathspec

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.platforms.inpod import receiver, source_of
from lockstep.programs import WORDS_MAX, Place, Program, answer_of, lines_in, python_program
from lockstep_spec.words import decimal_size, number_of

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".lockstep/", ".DS_Store", "*.swp")
GITIGNORE = ".gitignore"
IGNORE_FILES = (".lockstepignore", GITIGNORE)
"""Files of patterns in git's syntax. The first one that exists counts."""
NAMED_MAX = 3
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
    """Files that another folder's sync put there, that aren't in this one, and that were left as they are."""
    theirs: Mapping[str, list[str]] = field(default_factory=dict)
    """Files of this folder's that other folders sent, and which: then no node was sent anything."""
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
            f"{folder / name} is a link to {target}, out of the folder that is sent: put a copy in its place, or name it in {folder / own},"
            " and it stays here"
        )


def left_out(folder: Path) -> str:
    """Return what the folder's ignore file keeps here, in words; '' if nothing. Files that are never sent don't count."""
    sizes = {name: size for name, (_, size) in _stamps(folder, pathspec.GitIgnoreSpec.from_lines(ALWAYS_IGNORED)).items()}
    names = sorted(sizes.keys() - stamps(folder).keys())
    rule = next((file for file in IGNORE_FILES if (folder / file).is_file()), None)
    if not names or rule is None:  # (a file that has gone since the first look is not left out)
        return ""
    more = ", …" if len(names) > NAMED_MAX else ""
    size = decimal_size(sum(sizes[name] for name in names))
    return f"left out by {rule}: {number_of(len(names), 'file')}, {size} ({', '.join(names[:NAMED_MAX])}{more})"


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Times and sizes of the files that are sent: they show an edit without reading the files."""
    try:
        return _stamps(folder, _ignored(folder))
    except ConfigError:  # (said where it is sent)
        return {}


def _stamps(folder: Path, ignored: pathspec.GitIgnoreSpec) -> dict[str, tuple[int, int]]:
    files = {}
    with suppress(OSError):  # (a folder that is removed while it is walked: the next look sees it so)
        for name, entry in _walk(str(folder), "", ignored):
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

    async def send(
        self,
        places: Mapping[str, Place],
        folder: Path,
        targets: Mapping[str, str],
        *,
        force: bool = False,
        alone: bool = False,
    ) -> list[Synced]:
        """Send to all nodes, each by its name, at once. One that can't be sent to has a `problem`, and doesn't stop the others; one that
        has files of another folder does. `targets`: the folder on each. `alone`: also where any file in it isn't of this folder. Raises
        ConfigError.
        """
        for gone in self._open.keys() - places.keys():
            await self._drop(gone)
        request = {"source": sender_of(folder), "force": force, "alone": alone}
        scanning = asyncio.ensure_future(asyncio.to_thread(scan, folder))  # while connections are made

        async def ask(node: str) -> dict[str, Any]:
            receiver = await self._receiver(node, places[node])
            return await receiver.ask({**request, "target": targets[node], "files": await scanning})

        async def take(node: str) -> Synced:
            return await self._open[node].take(node, folder, await scanning, answers[node], stop=stop)

        try:
            answers = await self._each(places, ask)
        finally:
            await asyncio.gather(scanning, return_exceptions=True)  # (told by every node that got so far)
        results = {node: answer for node, answer in answers.items() if isinstance(answer, Synced)}
        stop = any(answers[node]["theirs"] for node in answers.keys() - results.keys())
        results |= await self._each([node for node in places if node not in results], take)
        return [results[node] for node in places]

    async def _each(self, nodes: Iterable[str], work: Callable[[str], Awaitable[Any]]) -> dict[str, Any]:
        """Work on all nodes at once, and return each one's result: for a node that fails, its problem."""

        async def one(node: str) -> Any:
            try:
                return await work(node)
            except (Failed, OSError) as error:
                await self._drop(node)
                return Synced(node, problem=" ".join(str(error).split())[:WORDS_MAX])

        names = [*nodes]
        results = await asyncio.gather(*map(one, names), return_exceptions=True)
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error
        return dict(zip(names, results, strict=True))

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


def sender_of(path: Path) -> str:
    """Name that tells folders of people's machines apart that send files to the same place."""
    return f"{socket.gethostname()}:{os.path.abspath(path)}"  # noqa: PTH100 (without .., and a link by its own name)


def own_folders(folder: Path) -> tuple[str, str]:
    """Return folders of its own for a folder below /workspace: by its name, and by its sender too, where another one has that. They stay
    the same.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip(".-") or "project"
    return f"{WORKSPACE}/{name}", f"{WORKSPACE}/{name}-{hashlib.sha256(sender_of(folder).encode()).hexdigest()[:6]}"


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

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what the node lacks, and what it leaves. Raises Failed, with the program's own message if it has one."""
        await self._running.write(json.dumps(request).encode() + b"\n")
        return _checked(await self._answer(), request["files"], self._running.place.name)

    async def take(self, node: str, folder: Path, files: dict[str, Any], answer: dict[str, Any], *, stop: bool) -> Synced:
        """Let the node take what it lacks; with `stop` nothing. Raises Failed."""
        removed, changed, others = (tuple(answer[key]) for key in ("removed", "changed", "others"))
        keep = [name for name in removed if os.path.lexists(folder / name)]  # noqa: ASYNC240 (those that are only ignored by now)
        removed = tuple(name for name in removed if name not in keep)
        archive = b""
        if not answer["done"]:
            archive = b"" if stop else await asyncio.to_thread(_packed, folder, answer["wanted"], files)
            header = {"size": len(archive), "keep": keep, "stop": stop}
            await self._running.write(json.dumps(header).encode() + b"\n" + archive)
        if stop:
            return Synced(node, theirs=answer["theirs"])
        if not answer["done"]:
            await self._answer()
        return Synced(node, len(answer["wanted"]), len(archive) if answer["wanted"] else 0, removed, changed, others)

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
    theirs = answer.get("theirs")
    more += theirs.values() if isinstance(theirs, dict) else [None]
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
