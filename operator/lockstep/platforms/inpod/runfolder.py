"""Log and measurements of a run's folder and its node: read here for `--local`, and in pods by the same program.

So nothing is imported but the standard library. `python3 -c THIS '{"what": "log", "root": "/workspace/runs/x", …}'` prints lines of a
node's log; `summary` prints one line of JSON with the run's measurements; `watch` answers every line on standard input with one line of
JSON, and ends with its input: nothing runs in a pod when nobody looks.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from lockstep.platforms.inpod.rankload import Load, answer_questions
from lockstep_machine.network import interface_bytes
from lockstep_machine.rdma import rdma_ports
from lockstep_machine.readings import file_words

OUTPUT = "logs/output"
BEGINS = "[lockstep] this agent begins: job "
NEAR_BYTES = 1 << 16
"""Part of a log that is read without looking for a nearer beginning."""
MEASURED = ("loss", "tokensPerSecond", "stepSeconds", "mfu", "gradientNorm", "learningRate")
Json = dict[str, Any]


def parts(root: str, node: int) -> list[Path]:
    """Files of a node's log, oldest first."""
    path = Path(root) / OUTPUT / f"node-{node}.log"
    return [part for part in (path.with_name(f"{path.name}.1"), path) if part.is_file()]  # (a FIFO would hold the reader up)


_STARTS = re.compile(r"\[lockstep\] attempt (\d{1,9}) starts: ")
PREFLIGHT = "[lockstep] preflight: "


def log(
    root: str, node: int, uid: str = "", rank: int = -1, attempt: int = -1, since: str = "", tail: int = -1, **_: object
) -> Iterable[str]:
    """Lines of a node's log without their time and attempt. `uid`: of this job; '': of the newest of this name. `rank`, `attempt`: -1: of
    any.
    """
    files = parts(root, node)
    uid = uid or newest_job(files)
    chosen = (line for _, _, line in _chosen(files, uid, attempt, since) if rank < 0 or line.startswith(f"[rank {rank}] "))
    return chosen if tail < 0 else deque(chosen, maxlen=tail)


def news(root: str, node: int, after: str = "", seen: int = 0, **options: Any) -> Iterator[tuple[str, str]]:
    """Time and line of what `log` has since a look before, whose newest lines, `seen` of them, were of the time `after`.

    Only the end of a log is read then: it is asked for every second, on a machine that trains.
    """
    files = parts(root, node)
    uid, rank, since = options.get("uid") or newest_job(files), options.get("rank", -1), max(after, options.get("since", ""))
    for stamp, _, line in _chosen(files, uid, options.get("attempt", -1), since, start=after):
        if rank >= 0 and not line.startswith(f"[rank {rank}] "):
            continue
        if stamp == after and seen > 0:
            seen -= 1
            continue
        yield stamp, line


def newest_job(files: list[Path]) -> str:
    """Uid of the job that was the last to write; '' if no line names one."""
    for path in reversed(files):
        with path.open("rb") as file, contextlib.suppress(ValueError), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            place = content.rfind(f" {BEGINS}".encode())  # (a file without a byte can't be mapped)
            if place >= 0:
                content.seek(place)
                return content.readline().decode(errors="replace").split()[-1]
    return ""


def _chosen(files: list[Path], uid: str, attempt: int, since: str, start: str = "") -> Iterator[tuple[str, int, str]]:
    """Time, attempt and line of what was asked for."""
    return (entry for entry in _numbered(files, uid, start) if attempt in (-1, entry[1]) and entry[0] >= since)


def _opened(path: Path, start: str) -> TextIO:
    """A part of a log, from some line before the first of the time `start` on; '': from its beginning."""
    file = path.open("rb")
    low, high = 0, os.fstat(file.fileno()).st_size if start else 0
    while high - low > NEAR_BYTES:  # every line that begins before `low` is older
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        place = file.tell()
        if place < high and file.readline().split(b" ", 1)[0] < start.encode():
            low = place
        else:
            high = middle
    file.seek(low)
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace")


def _numbered(files: list[Path], uid: str, start: str = "") -> Iterator[tuple[str, int, str]]:
    """Time, attempt and line of a job; what is older than `start` may be left out. What an attempt's beginning says is its own, though the
    ranks of the one before it were the last to be numbered; so is the preflight before it, whose attempt is known by the next line.
    """
    of, begun = uid, 0
    looked: list[tuple[str, int, str]] = []
    for path in files:
        with _opened(path, start) as file:
            for raw in file:
                stamp, number, line = (*raw.rstrip("\n").split(" ", 2), "", "")[:3]
                if line.startswith(BEGINS):
                    of, begun = line[len(BEGINS) :], 0
                elif of == uid and number.isdecimal():
                    if (starts := _STARTS.match(line)) is not None:
                        begun = int(starts[1])
                        looked = [(when, begun, words) for when, _, words in looked]
                    its = max(int(number), begun)
                    if line.startswith(PREFLIGHT):
                        looked.append((stamp, its + 1, line))
                        continue
                    yield from (*looked, (stamp, its, line))
                    looked = []
    yield from looked


class Records:
    """Measurements in a growing file. What a resume has undone is forgotten with the file that it replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = (0, 0)
        self.by_step: dict[int, Json] = {}

    def read(self) -> Records:
        """Read what is new since the last time. A line that isn't complete is read again later."""
        if not self._path.is_file():
            return self
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._place[0] or state.st_size < self._place[1]:
                    self._place, self.by_step = (state.st_ino, 0), {}
                file.seek(self._place[1])
                data = file.read()
        except OSError:
            return self
        whole = data[: data.rfind(b"\n") + 1]
        self._place = (self._place[0], self._place[1] + len(whole))
        for raw in whole.splitlines():
            try:
                record = json.loads(raw)
                self.by_step[int(record["step"])] = record
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        return self

    def thinned(self, points: int, names: Iterable[str]) -> dict[str, Json]:
        """Records of about `points` steps at most: multiples of one number, so that two runs have the same ones, and the last."""
        steps = sorted(self.by_step)
        every = 1
        while len([step for step in steps if step % every == 0]) > points:
            every = every * 2 if every not in (2, 20, 200, 2000, 20000) else every * 5 // 2
        chosen = [step for step in steps if step % every == 0 or step == steps[-1]]
        return {
            str(step): {name: self.by_step[step][name] for name in names if self.by_step[step].get(name) is not None} for step in chosen
        }


def summary(root: str, points: int = 1000, names: Iterable[str] = MEASURED, **_: object) -> Json:
    """Measurements of a run. `names`: values of each step that are read."""
    return {"steps": Records(Path(root) / "logs/train_log.jsonl").read().thinned(points, names)}


def counters(root: Path = Path("/")) -> dict[str, tuple[int, int]]:
    """Map of NIC to bytes in and out since it is up. RDMA devices that may be opened here count their own traffic, which their interfaces
    don't see.
    """
    traffic = interface_bytes(root / "proc")
    for port in rdma_ports(root):
        words = [file_words(port.folder / "counters" / f"port_{way}_data") for way in ("rcv", "xmit")]
        if all(word.isdecimal() for word in words) and port.state == "ACTIVE" and port.openable:
            traffic[port.device] = (int(words[0]) * 4, int(words[1]) * 4)  # counted in words of four bytes
    return dict(list(traffic.items())[:32])


class Watch:
    """Repeated measurements of one node."""

    def __init__(self, root: str, node: int, *, machine: bool = False) -> None:
        """`machine`: the node is a machine that others use, too, and not a container of its own."""
        self._node = node
        self._load = Load(root if machine else "")
        self._train = Records(Path(root) / "logs/train_log.jsonl")
        self._before = (time.monotonic(), counters())

    def answer(self, points: int = 0, **_: object) -> Json:
        """Measure now. `points`: of the loss curve; 0: it is not read."""
        now, traffic = time.monotonic(), counters()
        seconds = max(now - self._before[0], 1e-3)
        rates = {
            nic: [8 * (new - old) / seconds / 1e9 for new, old in zip(traffic[nic], before, strict=True)]
            for nic, before in self._before[1].items()
            if nic in traffic
        }
        self._before = (now, traffic)
        reading = {"node": self._node, "gigabits": rates, **self._load.answer()}
        return {**reading, "curve": self._train.read().thinned(points, ("loss",))} if points else reading


def main(request: Json) -> None:
    what, options = request.pop("what"), request
    if what == "log":
        for line in log(**options):
            sys.stdout.write(f"{line}\n")
    elif what == "news":
        for entry in news(**options):
            sys.stdout.write(f"{json.dumps(entry)}\n")
    elif what == "summary":
        print(json.dumps(summary(**options)))
    else:
        answer_questions(Watch(options["root"], options["node"], machine=options.get("machine", False)).answer)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
