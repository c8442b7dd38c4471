"""Cuts the power before every system call of a save that changes the disk, and tells what the next start finds.

The ranks are processes of their own. Point k is the k-th of their calls on the disk, over all ranks and threads, and one point more comes
after the save has returned. Every point is tried twice: alone, and after another process of the same file system has synced a file,
which commits the journal: names become durable then, the data behind them doesn't.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from faults import syscalls
from faults.disk import Disk

PATIENCE_SECONDS = 60
VARIANTS = ("alone", "a neighbor syncs")
OTHERWISE = ("mix", "unloadable", "nothing")
"""What a start would find that is neither the old state nor the new one: parts of both; a newest one that it chooses and can't load; none.
"""


class Session(Protocol):
    """One rank, ready to save. Both raise whatever a failing disk makes them raise."""

    def save_old(self, disk: Path) -> None: ...
    def save_new(self, disk: Path) -> None: ...


@dataclass(frozen=True)
class Subject:
    """Something that saves."""

    name: str
    start: Callable[[int, Path], Session]
    """In a rank's process: from the rank and an empty folder that all ranks see."""
    judge: Callable[[Path], str]
    """In a process of its own, from the disk: `old`, `new`, or one of OTHERWISE, a colon, and the reason."""
    ranks: int = 2
    replaces: bool = True
    """Whether what it saves is a newer state."""
    survives: bool = False
    """Whether its ranks go on after a failed save; those of others are started anew for every point."""
    variants: tuple[str, ...] = VARIANTS


@dataclass
class Findings:
    """What was found, by variant."""

    name: str
    points: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    returned: dict[str, str] = field(default_factory=dict)
    """What is found when the power goes right after the save has returned, by variant."""
    notes: list[str] = field(default_factory=list)
    """Every point where a start would find neither old nor new, or old after the save had returned, or where the ranks did not go on."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "points": self.points,
            "verdicts": {name: dict(found) for name, found in self.verdicts.items()},
            "returned": self.returned,
            "notes": self.notes,
        }


class Group:
    """The rank processes of a subject, each watched at every call on the disk."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        folder.mkdir()
        self._selector = selectors.DefaultSelector()
        self._ranks: list[tuple[int, socket.socket]] = []
        for rank in range(subject.ranks):
            mine, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                mine.close()
                _be_rank(subject, rank, folder, theirs)
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(mine, 1, 1)
            self._selector.register(descriptors[0], selectors.EVENT_READ, "calls")
            self._selector.register(mine, selectors.EVENT_READ, rank)
            self._ranks.append((pid, mine))
        self.broken = False
        self.ended = False
        self._last = ""  # a second write to the same file makes nothing durable that the first didn't

    def do(self, order: str, disk: Disk, before_call: Callable[[syscalls.Call], None]) -> list[str]:
        """Every rank's answer to `order`; `before_call` runs while a call on the disk waits."""
        answers: dict[int, str] = {}
        for _, link in self._ranks:
            link.sendall(f"{order} {disk.mount}\n".encode())
        end = time.monotonic() + PATIENCE_SECONDS
        while len(answers) < len(self._ranks):
            if time.monotonic() > end or self._hopeless(answers, end):
                self.broken = True
                return [answers.get(rank, "no answer") for rank in range(len(self._ranks))]
            for key, _ in self._selector.select(0.5):
                if key.data == "calls":
                    self._serve(key.fd, str(disk.mount), before_call)
                else:
                    received = _received(self._ranks[key.data][1])
                    answers[key.data] = received.decode().strip() or "died"
                    if not received:
                        self._selector.unregister(key.fileobj)
                        self.broken = True
        return [answers[rank] for rank in range(len(self._ranks))]

    def _hopeless(self, answers: dict[int, str], end: float) -> bool:
        """Another rank may wait for ever for one that failed: it gets five seconds."""
        return any(answer != "done" for answer in answers.values()) and time.monotonic() > end - PATIENCE_SECONDS + 5

    def _serve(self, listener: int, mount: str, before_call: Callable[[syscalls.Call], None]) -> None:
        call = syscalls.receive(listener)
        if call is None:
            return
        if call.path.startswith(f"{mount}/") and _changes(call) and str(call) != self._last:
            self._last = str(call)
            before_call(call)
        syscalls.let_go(listener, call)

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        for pid, link in self._ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            link.close()
        for key in list(self._selector.get_map().values()):
            if key.data == "calls":
                os.close(key.fd)
        self._selector.close()


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(65536)
    except ConnectionResetError:
        return b""


def _changes(call: syscalls.Call) -> bool:
    """Opening a file that is there changes nothing."""
    return call.name not in {"open", "openat"} or not Path(call.path).exists()


def _be_rank(subject: Subject, rank: int, folder: Path, link: socket.socket) -> None:
    """In the forked child. Never returns."""
    output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    socket.send_fds(link, [b"."], [syscalls.listen()])
    try:
        try:
            session = subject.start(rank, folder)
        except BaseException:
            traceback.print_exc()
            raise
        orders = {"old": session.save_old, "new": session.save_new}
        for line in link.makefile():
            order, _, disk = line.strip().partition(" ")
            try:
                orders[order](Path(disk))
                answer = "done"
            except Exception as error:
                traceback.print_exc()
                answer = f"failed: {type(error).__name__}: {error}".replace("\n", " ")[:2000]
            link.sendall(f"{answer}\n".encode())
    finally:
        os._exit(1)


def try_every_point(subject: Subject, folder: Path, say: Callable[[str], None] = lambda line: None) -> Findings:
    """Makes a folder of its own in `folder`. Raises AssertionError when even an undisturbed save fails."""
    folder /= subject.name.replace(" ", "-")
    folder.mkdir()
    disk = Disk(folder)
    findings = Findings(subject.name)
    groups = 0

    def started() -> Group:
        nonlocal groups
        groups += 1
        return Group(subject, folder / f"group-{groups}")

    group = started()
    try:
        answers = group.do("old", disk, lambda call: None)
        assert set(answers) == {"done"}, f"{answers}: {(folder / 'group-1/rank-0.log').read_text()}"
        disk.keep_as_pristine()
        assert (verdict := _judge(subject, disk)) == "old", verdict
        for variant in subject.variants:
            findings.verdicts[variant] = Counter()
            point, more = 0, True
            while more:
                if group.ended:
                    group = started()
                disk.reset()
                more = _try_point(subject, group, disk, variant, point, findings)
                point += 1
            findings.points += point
            say(f"{subject.name}, {variant}: {point} points, {dict(findings.verdicts[variant])}")
    finally:
        group.end()
        disk.close()
    return findings


def _try_point(subject: Subject, group: Group, disk: Disk, variant: str, point: int, findings: Findings) -> bool:
    """Cut the power at `point`; whether the save made that many calls."""
    seen: list[str] = []

    def before_call(call: syscalls.Call) -> None:
        if len(seen) == point:
            cut(disk, variant)
        seen.append(str(call))

    def cut(disk: Disk, variant: str) -> None:
        if variant != "alone":
            disk.neighbor_syncs()
        disk.cut_power()

    answers = group.do("new", disk, before_call)
    reached = len(seen) > point
    if not reached:
        assert set(answers) == {"done"}, answers
        cut(disk, variant)
    if group.broken or not subject.survives:
        group.end()  # its open files would hold the disk
    disk.power_on()
    verdict = _judge(subject, disk)
    findings.verdicts[variant][verdict.partition(":")[0]] += 1
    if not reached:
        findings.returned[variant] = verdict
    call = seen[point].replace(str(disk.mount), "") if reached else "after the save returned"
    if verdict not in {"old", "new"} or (verdict == "old" and not reached and subject.replaces):
        findings.notes.append(f"{variant}, before {call}: {verdict}" if reached else f"{variant}, {call}: {verdict}")
    if group.broken and subject.survives:
        findings.notes.append(f"{variant}, before {call}: the ranks did not go on: {answers}")
    return reached


def _judge(subject: Subject, disk: Disk) -> str:
    """In a process of its own, so that nothing of it stays open or loaded."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            verdict = subject.judge(disk.mount)
        except BaseException as error:
            verdict = f"the judge failed: {type(error).__name__}: {error}"
            traceback.print_exc()
        os.write(writer, verdict.encode()[:4096])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        verdict = answer.read().decode()
    os.waitpid(pid, 0)
    return verdict


def print_json(found: list[Findings]) -> None:
    json.dump({"results": [findings.to_json() for findings in found]}, sys.stdout, indent=1)
    print()
