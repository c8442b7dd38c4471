"""Run `make lint` and the tests in two lanes side by side: what computes, beside what waits for clusters, disks and hosts.

    scripts/lanes.py [--since COMMIT]

--since runs the tests of what differs from that commit (scripts/touched.py), else all run. A part writes to .lockstep/tests/PART.log,
which is printed when it ends; the first part that fails ends the other lane. At the end stand the seconds and counts of each part; those of
a whole run that passed are held against scripts/budget.yaml by the next `make lint`. Exit code: 1 if one failed, 2 if there is no such
commit, 130 if it was interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(".lockstep/tests")
FOLDERS = {
    "test-unit": ("tests/unit/", "tests/foreign/"),
    "test-train": ("tests/train/", "tests/corpus/"),
    "test-installed": ("tests/installed/",),
    "test-cluster": ("tests/cluster/",),
    "test-faults": ("tests/faults/",),
    "test-hosts": ("tests/hosts/",),
}
"""What is in each part."""
COMPUTES, WAITS = ("lint", "test-unit", "test-train"), ("test-cluster", "test-faults", "test-hosts", "test-installed")
NICE = 10
"""Of what computes: what waits has deadlines of its own."""
END_SECONDS = 120.0
"""Time in which tests that are interrupted remove their clusters."""
_PR_SET_PDEATHSIG = 1


class PartFailed(Exception):
    """`make PART` ended with another code than 0."""


@dataclass(frozen=True)
class Record:
    """What pytest wrote of a run: its seconds, those of each file of tests on its worker, and how many tests passed, failed, ended with an
    error, were skipped.
    """

    seconds: float
    files: Mapping[str, float]
    counts: Mapping[str, int]

    @classmethod
    def read(cls, file: Path) -> Record | None:
        """Read a record; return None if there is none, or only a part of one."""
        try:
            (suite,) = ElementTree.parse(file).getroot()  # noqa: S314 (our own pytest wrote it)
        except (FileNotFoundError, ElementTree.ParseError):
            return None
        files: Counter[str] = Counter()
        for case in suite.iter("testcase"):
            files[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))  # type: ignore[assignment]
        bad = {
            word: int(suite.get(attribute, 0)) for word, attribute in (("failed", "failures"), ("errors", "errors"), ("skipped", "skipped"))
        }
        passed = int(suite.get("tests", 0)) - sum(bad.values())
        return cls(float(suite.get("time", 0)), files, {"passed": passed, **bad})

    def share(self, tests: Iterable[str]) -> float:
        """Estimate the seconds that these files of tests would take."""
        return self.seconds * sum(self.files.get(file, 0) for file in tests) / (sum(self.files.values()) or 1)


@dataclass
class Table:
    """Seconds and counts of each part that ended, and the least memory that was available meanwhile."""

    began: float = field(default_factory=time.monotonic)
    rows: list[str] = field(default_factory=list)
    least_bytes: int = sys.maxsize

    def add(self, part: str, seconds: float, record: Record | None) -> None:
        counts = record.counts if record else {}
        self.rows.append(f"{seconds:7.0f}  {part:18s}{', '.join(f'{count} {word}' for word, count in counts.items() if count)}".rstrip())

    def lines(self) -> Iterator[str]:
        yield from ("", "seconds  part", *self.rows)
        yield f"{time.monotonic() - self.began:7.0f}  all; at least {self.least_bytes / 2**30:.1f} GiB of memory were available"


@dataclass(frozen=True)
class Part:
    """One target of the Makefile, or some files of its tests."""

    name: str
    tests: Sequence[str] = ()
    """Files of tests; none: all of the part."""

    @property
    def record(self) -> Path:
        return FOLDER / f"{self.name}{'-some' if self.tests else ''}.xml"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def run_part(part: Part, table: Table, nice: int = 0) -> None:
    """Run `make PART` and print what it said. Raises PartFailed."""
    began = time.monotonic()
    log = FOLDER / f"{part.name}.log"
    print(f"{part.name} begins: {log}", flush=True)
    part.record.unlink(missing_ok=True)
    how = "was interrupted"
    with log.open("w") as output:
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(
            "nice", "-n", str(nice), "make", "--no-print-directory", part.name, *([f"TESTS={' '.join(part.tests)}"] if part.tests else []),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
        ))  # fmt: skip
        try:
            code = await (await asyncio.shield(starting)).wait()  # (a start that is canceled would kill what has begun, uncleaned)
            how = f"ended with {code}"
        finally:
            process = await starting
            if process.returncode is None:
                await _end(process)
            seconds = time.monotonic() - began
            print(f"---- {part.name} {how} after {seconds:.0f} s\n{log.read_text(encoding='utf-8', errors='replace')}", flush=True)
            table.add(part.name, seconds, Record.read(part.record))
    if code:
        raise PartFailed(f"make {part.name} ended with {code}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt a part's processes, and kill what is left of them."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def run_lane(parts: Iterable[Part], table: Table, nice: int = 0) -> None:
    for part in parts:
        await run_part(part, table, nice)


def available_bytes() -> int:
    line = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    return int(line[1]) * 1024 if line else sys.maxsize


async def watch_memory(table: Table) -> None:
    while True:
        table.least_bytes = min(table.least_bytes, available_bytes())
        await asyncio.sleep(5)


async def run_all(parts: Mapping[str, Part], table: Table) -> None:
    def those(names: Sequence[str]) -> list[Part]:
        return [parts[name] for name in names if name in parts]

    memory = asyncio.create_task(watch_memory(table))
    try:
        if parts.keys() & set(WAITS):
            await run_part(Part("cluster-programs"), table)
        async with asyncio.TaskGroup() as lanes:
            lanes.create_task(run_lane(those(COMPUTES), table, NICE))
            lanes.create_task(run_lane(those(WAITS), table))
    finally:
        memory.cancel()


def parts_since(commit: str) -> dict[str, Part]:
    """The linters and the parts in which tests are touched; say which. Raises CalledProcessError: there is no such commit."""
    from touched import Tree, changed_since

    changed = changed_since(commit)
    tree = Tree()
    chosen = tree.chosen(changed)
    parts = {"lint": Part("lint")}
    for name, folders in FOLDERS.items():
        tests = sorted(file for file in chosen if file.startswith(folders))
        if tests:
            parts[name] = Part(name, tests)
            record = Record.read(Part(name).record)
            print(
                f"{name}: {len(tests)} of {len([file for file in tree.tests('tests/') if file.startswith(folders)])} files"
                + (f", {record.share(tests):.0f} s" if record else "")
            )
            print("".join(f"    {file}\n" for file in tests if name != "test-unit"), end="")
    return parts


def _interrupt(*_: object) -> None:
    """End with all cleaning up, as asyncio.run does at the first SIGINT; what is sent again (`timeout` signals the group, too) changes
    nothing.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", help="run the tests of what differs from this commit")
    since = parser.parse_args(arguments).since
    try:
        parts = parts_since(since) if since else {name: Part(name) for name in ("lint", *FOLDERS)}
    except subprocess.CalledProcessError as error:
        print(f"--since {since}: {error.stderr.strip()}", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    table = Table()
    try:
        asyncio.run(run_all(parts, table))
    except* PartFailed as failed:
        print(*failed.exceptions, sep="\n", file=sys.stderr)
        code = 1
    except* KeyboardInterrupt:
        code = 130
    else:
        code = 0
    print("\n".join(table.lines()), flush=True)
    if code == 0 and not since:
        (FOLDER / "seconds").write_text(f"{time.monotonic() - table.began:.0f}\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
