"""`lockstep sync`: send a folder of this machine to all nodes of a job at once, and only what differs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pathspec

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.platforms.files.transfer import Wired, wired
from lockstep.platforms.inpod import carry, source_of
from lockstep.platforms.inpod.carry import Stored, give_all, offer
from lockstep.platforms.inpod.entries import DRAFT, Entry, is_plain, stays_below
from lockstep.programs import WORDS_MAX, Place, python_program
from lockstep_machine.wire import Gone, Wire, no_protocol
from lockstep_spec.words import decimal_size, number_of

ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", ".lockstep/", ".DS_Store", "*.swp", f"{DRAFT}*")
GITIGNORE = ".gitignore"
IGNORE_FILES = (".lockstepignore", GITIGNORE)
"""Files of patterns in git's syntax. The first one that exists counts."""
NAMED_MAX = 3
SILENCE_SECONDS = 30.0
Files = dict[str, Entry]
FOLDER: Entry = {"name": "", "dir": True}


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


@dataclass
class Changes:
    """Answer of a node about a folder. `done`: it waits for nothing more."""

    done: bool
    names: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in ("wanted", "removed", "changed", "others")})
    theirs: dict[str, list[str]] = field(default_factory=dict)


def scan(folder: Path) -> Files:
    """Entry of every file and link below `folder` that isn't ignored, by its path with slashes. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the folder to send")
    files: Files = {}
    for name, entry in _walk(str(folder), "", _ignored(folder)):
        if entry.is_symlink():
            target = Path(entry.path).readlink()
            _refuse_outside(folder, name, target)
            files[name] = {"name": name, "link": str(target)}
            continue
        with suppress(FileNotFoundError), open(entry.path, "rb") as file:  # noqa: PTH123 (thousands of them)
            content = file.read()
            mode, sha256 = 0o777 if os.access(entry.path, os.X_OK) else 0o666, hashlib.sha256(content).hexdigest()
            files[name] = {"name": name, "path": entry.path, "size": len(content), "mode": mode, "sha256": sha256}
    return files


def _refuse_outside(folder: Path, name: str, target: Path) -> None:
    """Raise ConfigError for a link that leads out of the folder: there, it would lead to something else."""
    if not stays_below(name, str(target)):
        own = next((file for file in IGNORE_FILES if (folder / file).is_file()), IGNORE_FILES[0])
        raise ConfigError(
            f"{folder / name} is a link to {target}, out of the folder that is sent: put a copy in its place, or name it in {folder / own},"
            " and it stays here"
        )


def left_out(folder: Path) -> str:
    """Return what the folder's ignore file keeps here, in words; '' if nothing. Files that are never sent don't count."""
    sizes = {name: size for name, (_, size) in stamps(folder, pathspec.GitIgnoreSpec.from_lines(ALWAYS_IGNORED)).items()}
    names = sorted(sizes.keys() - stamps(folder).keys())
    rule = next((file for file in IGNORE_FILES if (folder / file).is_file()), None)
    if not names or rule is None:  # (a file that has gone since the first look is not left out)
        return ""
    more = ", …" if len(names) > NAMED_MAX else ""
    size = decimal_size(sum(sizes[name] for name in names))
    return f"left out by {rule}: {number_of(len(names), 'file')}, {size} ({', '.join(names[:NAMED_MAX])}{more})"


def stamps(folder: Path, ignored: pathspec.GitIgnoreSpec | None = None) -> dict[str, tuple[int, int]]:
    """Times and sizes of the files that are sent: they show an edit without reading the files. `ignored`: other patterns than the folder's
    own.
    """
    files = {}
    with suppress(OSError, ConfigError):  # (a folder that is removed meanwhile: the next look sees it so; patterns: said where it is sent)
        for name, entry in _walk(str(folder), "", ignored or _ignored(folder)):
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
        self._open: dict[str, tuple[Wired, AsyncExitStack]] = {}

    async def __aenter__(self) -> Receivers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self._drop(node) for node in list(self._open)))

    @property
    def are_there(self) -> bool:
        """True if none has ended: a node that was restarted may have lost what it was sent."""
        return not any(one.has_ended for one, _ in self._open.values())

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

        async def ask(node: str) -> Changes:
            one = await self._receiver(node, places[node])
            return await one.run(partial(_asked, {**request, "take": targets[node]}, await scanning))

        async def take(node: str) -> Synced:
            return await _taken(node, self._open[node][0], folder, await scanning, answers[node])

        try:
            answers = await self._each(places, ask)
        finally:
            await asyncio.gather(scanning, return_exceptions=True)  # (told by every node that got so far)
        results = {node: answer for node, answer in answers.items() if isinstance(answer, Synced)}
        asked = [node for node in places if node not in results]
        if any(answers[node].theirs for node in asked):
            await asyncio.gather(*(self._drop(node) for node in asked if not answers[node].done))  # (they wait for files)
            results |= {node: Synced(node, theirs=answers[node].theirs) for node in asked}
        else:
            results |= await self._each(asked, take)
        return [results[node] for node in places]

    async def _each(self, nodes: Iterable[str], work: Callable[[str], Awaitable[Any]]) -> dict[str, Any]:
        """Work on all nodes at once, and return each one's result: for a node that fails, its problem."""

        async def one(node: str) -> Any:
            try:
                return await work(node)
            except (Failed, Gone, OSError) as error:
                await self._drop(node)
                return Synced(node, problem=" ".join(str(error).split())[:WORDS_MAX])

        names = [*nodes]
        results = await asyncio.gather(*map(one, names), return_exceptions=True)
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error
        return dict(zip(names, results, strict=True))

    async def _receiver(self, node: str, place: Place) -> Wired:
        """Return the program on the node, which is started where there is none, or it has ended."""
        if node in self._open and self._open[node][0].has_ended:
            await self._drop(node)
        if node not in self._open:
            request = json.dumps({"syncs": True, "roots": ["/"], "ownUmask": self._own_umask})
            options = ("-I", "-S")  # (an image's site-packages would be looked through for nothing)
            async with AsyncExitStack() as stack:
                program = python_program(place, source_of(carry), request, options=options, pings=True)
                one = await stack.enter_async_context(wired(await stack.enter_async_context(program), SILENCE_SECONDS))
                self._open[node] = one, stack.pop_all()
        return self._open[node][0]

    async def _drop(self, node: str) -> None:
        if node in self._open:
            await self._open.pop(node)[1].aclose()


def sender_of(path: Path) -> str:
    """Name that tells folders of people's machines apart that send files to the same place."""
    return f"{socket.gethostname()}:{os.path.abspath(path)}"  # noqa: PTH100 (without .., and a link by its own name)


def own_folders(folder: Path) -> tuple[str, str]:
    """Return folders of its own for a folder below /workspace: by its name, and by its sender too, where another one has that. They stay
    the same.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip(".-") or "project"
    return f"{WORKSPACE}/{name}", f"{WORKSPACE}/{name}-{hashlib.sha256(sender_of(folder).encode()).hexdigest()[:6]}"


async def _taken(node: str, one: Wired, folder: Path, files: Files, changes: Changes) -> Synced:
    """Let the node take what it lacks. Raises Failed, Gone."""
    wanted, removed, changed, others = (tuple(changes.names[kind]) for kind in ("wanted", "removed", "changed", "others"))
    keep = [name for name in removed if (path := folder / name).is_file() or path.is_symlink()]  # (those that are only ignored by now)
    size = 0 if changes.done else await one.run(partial(_sent, files, wanted, keep))
    return Synced(node, len(wanted), size, tuple(name for name in removed if name not in keep), changed, others)


def _asked(request: Mapping[str, Any], files: Files, wire: Wire) -> Changes:
    """Say what there is, and return what the node lacks, and what it leaves. Raises CarryError, Gone."""
    wire.say({**request})
    offer(wire, Stored([FOLDER, *files.values()], ""))
    changes = Changes(wire.hear().get("done") is True)
    for item, _ in wire.hear_all("changes"):
        kind, name = item if isinstance(item, list) and len(item) == 2 else ("", "")
        is_valid = isinstance(kind, str) and kind in changes.names and isinstance(name, str) and is_plain(name)
        if not is_valid or (kind == "wanted" and name not in files):
            raise no_protocol("it asks for files that were not offered")
        changes.names[kind].append(name)
    for item, _ in wire.hear_all("theirs"):
        name, senders = item if isinstance(item, list) and len(item) == 2 else ("", None)
        if not (isinstance(name, str) and isinstance(senders, list) and all(isinstance(sender, str) for sender in senders)):
            raise no_protocol("it names no senders")
        changes.theirs[name] = senders
    return changes


def _sent(files: Files, wanted: Sequence[str], keep: Sequence[str], wire: Wire) -> int:
    """Send these files, and return their bytes. Raises CarryError when one has changed since it was scanned: half of an edit must not
    travel.
    """
    wire.say_all("keep", keep)
    return int(give_all(wire, Stored([FOLDER, *(files[name] for name in wanted)], ""))["bytes"])
