"""A folder of this machine that is sent to a job's pods or hosts: once or again and again, and what is said of it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError, LockstepError
from lockstep.platforms.output import put, tell

if TYPE_CHECKING:
    from lockstep.platforms.files.sync import Receivers, Synced
    from lockstep.programs import Place

Stamps = dict[str, tuple[int, int]]
WATCH_SECONDS = 0.2
NAMES_MAX, NAME_MAX = 50, 500
"""Limits of the names that are shown: it is the pod that sends them."""
AGAIN_SECONDS = 2.0
"""Seconds until a pod that lacks something is tried again."""


class SentByOthers(ConfigError):
    """Other folders sent files of this one's, which are different there."""


@dataclass(frozen=True)
class Sending:
    """A folder of this machine, and where it goes: `to` in the pods of a job, or on its hosts."""

    job: str
    folder: Path
    to: str
    again: str
    """Words that lead to the job again on a command line."""
    force: bool = False
    watch: bool = False
    alone: bool = False
    """True if what is at `to` must be of this folder alone."""

    def line(self, to: str) -> str:
        """Return the command that sends the folder to another one there."""
        return f"lockstep sync {self.job} {shlex.quote(str(self.folder))} --to {shlex.quote(to)} {self.again}".rstrip()


async def send_once(receivers: Receivers, places: Mapping[str, Place], targets: Mapping[str, str], sending: Sending) -> list[Synced]:
    """Send once. Raises SentByOthers where other folders sent files of this one's: then nothing was sent."""
    from lockstep.platforms.files.sync import own_folders
    from lockstep_spec.words import listed

    results = await receivers.send(places, sending.folder, targets, force=sending.force, alone=sending.alone)
    theirs = {name or "a file": senders for result in results for name, senders in result.theirs.items()}
    if theirs:
        own = next(folder for folder in own_folders(sending.folder) if folder != sending.to)
        senders = sorted({sender for each in theirs.values() for sender in each}) or ["another folder"]
        raise SentByOthers(
            f"nothing was sent: {listed(sorted(theirs))} in {sending.to} {'was' if len(theirs) == 1 else 'were'} sent from"
            f" {listed(senders)}, and would be another file: give {sending.folder} a folder of its own: {sending.line(own)}, and in the job"
            f" script.folder: {own}; if it is the same project, which was moved or is on another machine, --force takes its files over"
        )
    return results


async def send_all(
    sending: Sending,
    receivers: Receivers,
    send: Callable[[], Awaitable[list[Synced]]],
    is_over: Callable[[], Awaitable[bool]] | None = None,
) -> bool:
    """Send the folder, say what stays here, and return True if everything arrived; with `watch` send whatever changes, until nothing can be
    sent any more, and again what a place lacks: one that couldn't be reached, or that was restarted meanwhile. The same trouble is said
    once. `is_over`: asked where nothing can be sent; None: it never is.
    """
    from lockstep.platforms.files.sync import GITIGNORE, left_out, stamps

    said, is_begun = list[str](), False
    sent: Stamps | None = None  # (what every place has; an empty folder is sent once, too)
    while True:
        now = await asyncio.to_thread(stamps, sending.folder)
        if now != sent or not receivers.are_there:
            try:
                results = await send()
                lines = [line for result in results for line in _lines(result)]
                if lines != said or any(result.sent or result.removed for result in results):
                    put(*lines, flush=True)
                complete = all(result.problem is None and not result.changed for result in results)
            except (LockstepError, OSError) as error:  # (a pod that is away for a moment, a folder that is being replaced)
                if not is_begun or (is_over is not None and await is_over()):
                    raise
                lines, complete = [f"not sent: {error}"], False
                if lines != said:
                    tell(*lines)
            said = lines
            if not is_begun and (line := await asyncio.to_thread(left_out, sending.folder)):
                put(f"{line}; an empty .lockstepignore sends them" if f"{GITIGNORE}:" in line else line, flush=True)
            if not sending.watch:
                return complete
            is_begun, sent = True, now if complete else None
        await asyncio.sleep(AGAIN_SECONDS if sent is None else WATCH_SECONDS)


def _lines(result: Synced) -> list[str]:
    if result.problem is not None:
        return [f"{result.node}: not sent: {result.problem}"]
    done = f"{result.sent} sent ({result.bytes} bytes), {len(result.removed)} removed" if result.sent or result.removed else "nothing to do"
    groups = (
        (result.removed, "was removed: it is not in the folder any more", "were removed"),
        (result.changed, "was changed there since the last sync and stays as it is; --force overwrites it", "were changed there"),
        (result.others, "was sent from another folder and stays; --force removes it", "were sent from another folder"),
    )
    return [f"{result.node}: {line}" for line in (done, *(line for group in groups for line in _named(*group)))]


def _named(names: tuple[str, ...], each: str, more: str) -> list[str]:
    lines = [f"{name[:NAME_MAX]} {each}" for name in names[:NAMES_MAX]]
    return lines if len(names) <= NAMES_MAX else [*lines, f"{len(names) - NAMES_MAX} more files {more}, too"]
