"""Run `make lint` and all parts of the tests in two lanes side by side: what computes, beside what waits for clusters, disks and hosts.

    scripts/lanes.py

Tests marked `alone` come last, by themselves. A part writes to .lockstep/tests/PART.log, which is printed when it ends; the first part that fails ends the
other lane. At the end stand the seconds and counts of each part. Exit code: the one of the part that failed.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

LOGS = Path(".lockstep/tests")
FIRST = ("cluster-programs",)
COMPUTES, WAITS = ("lint", "test-unit", "test-train"), ("test-cluster", "test-faults", "test-hosts")
ALONE = ("test-alone",)
NICE = 10
"""Of what computes: what waits has deadlines of its own."""
END_SECONDS = 120.0
"""Time in which tests that are interrupted remove their clusters."""
_SUMMARY = re.compile(r"^=* ?(?=\d+ (?:passed|failed|error|skipped|deselected)).* in [\d.]+s", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")
_PR_SET_PDEATHSIG = 1


class PartFailed(Exception):
    """`make PART` ended with this code, which is not 0."""

    def __init__(self, part: str, code: int) -> None:
        super().__init__(f"make {part} ended with {code}")
        self.code = code


@dataclass
class Table:
    """Seconds and counts of each part that ended, and the least memory that was available meanwhile."""

    began: float = field(default_factory=time.monotonic)
    rows: list[str] = field(default_factory=list)
    least_bytes: int = sys.maxsize

    def add(self, part: str, seconds: float, output: str) -> None:
        counts: Counter[str] = Counter()
        for summary in _SUMMARY.findall(output):
            for count, word in _COUNT.findall(summary):
                counts[word] += int(count)
        self.rows.append(f"{seconds:7.0f}  {part:18s}{', '.join(f'{count} {word}' for word, count in counts.items())}")

    def lines(self) -> Iterator[str]:
        yield from ("", "seconds  part", *self.rows)
        yield f"{time.monotonic() - self.began:7.0f}  all; at least {self.least_bytes / 2**30:.1f} GiB of memory were available"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def run_part(part: str, table: Table, nice: int = 0) -> None:
    """Run `make PART` and print what it said. Raises PartFailed."""
    began = time.monotonic()
    log = LOGS / f"{part}.log"
    print(f"{part} begins: {log}", flush=True)
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            "nice", "-n", str(nice), "make", "--no-print-directory", part,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
    how = "was interrupted"
    try:
        code = await process.wait()
        how = f"ended with {code}"
    finally:
        if process.returncode is None:
            await _end(process)
        seconds = time.monotonic() - began
        said = log.read_text(encoding="utf-8", errors="replace")
        print(f"---- {part} {how} after {seconds:.0f} s\n{said}", flush=True)
        table.add(part, seconds, said)
    if code:
        raise PartFailed(part, code)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt a part's processes, and kill what is left of them."""
    os.killpg(process.pid, signal.SIGINT)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def run_lane(parts: Sequence[str], table: Table, nice: int = 0) -> None:
    for part in parts:
        await run_part(part, table, nice)


def available_bytes() -> int:
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else sys.maxsize


async def watch_memory(table: Table) -> None:
    while True:
        table.least_bytes = min(table.least_bytes, available_bytes())
        await asyncio.sleep(5)


async def run_all(table: Table) -> None:
    memory = asyncio.create_task(watch_memory(table))
    try:
        await run_lane(FIRST, table)
        async with asyncio.TaskGroup() as lanes:
            lanes.create_task(run_lane(COMPUTES, table, NICE))
            lanes.create_task(run_lane(WAITS, table))
        await run_lane(ALONE, table)
    finally:
        memory.cancel()


def _interrupt(*_: object) -> None:
    """End with all cleaning up, as asyncio.run does at the first SIGINT; what is sent again (`timeout` signals the group, too) changes nothing."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    table = Table()
    LOGS.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        asyncio.run(run_all(table))
    except (PartFailed, BaseExceptionGroup) as error:
        failed = error if isinstance(error, PartFailed) else next(each for each in error.exceptions if isinstance(each, PartFailed))
        print(failed, file=sys.stderr)
        return failed.code
    except KeyboardInterrupt:
        return 130
    finally:
        print("\n".join(table.lines()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
