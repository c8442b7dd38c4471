"""The two lanes of `make test`, played: order, the lane that a failure ends, signals, and what a killed run leaves."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lanes import Record
from support.checkout import ROOT

SCRIPT = ROOT / "scripts/lanes.py"
PARTS = "cluster-programs lint test-unit test-train test-installed test-cluster test-faults test-hosts"
XML = """<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="1" tests="4" time="30">\
<testcase classname="tests.a" time="1"/>\
<testcase classname="tests.a" time="2"/><testcase classname="tests.b" time="3"/></testsuite></testsuites>"""
WAITING = "echo $@ begins >> log; trap 'echo $@ cleaned >> log; exit 1' INT; echo > ready; while :; do sleep 0.05; done"


class Played:
    """A Makefile of the parts; each adds its name to a log and then does what a test says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipes = dict.fromkeys(PARTS.split(), "echo $@ >> log")
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        rules = "".join(f"{part}:\n\t@{recipe.replace('$', '$$').replace('$$@', '$@')}\n" for part, recipe in self.recipes.items())
        (self.folder / "Makefile").write_text(f"SHELL := /bin/bash\n{rules}")
        self.started.append(
            subprocess.Popen([sys.executable, str(SCRIPT)], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return self.started[-1]

    def run(self) -> tuple[int, str]:
        started = self.start()
        output = started.communicate(timeout=120)[0]
        return started.returncode, output

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.01)

    def left(self) -> list[str]:
        """Processes that still run in the folder."""
        here = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").readlink() == self.folder:
                    here.append((process / "comm").read_text().strip())
            except OSError:
                continue  # it has ended
        return here


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    lanes = Played(tmp_path.resolve())
    yield lanes
    for process in lanes.started:
        process.kill()
        process.communicate()


def test_parts_of_a_lane_follow_each_other(played: Played) -> None:
    played.recipes["test-unit"] = f"echo $@ >> log; echo '{XML}' > .lockstep/tests/test-unit.xml"
    code, output = played.run()
    assert code == 0, output
    log = played.log
    assert log[0] == "cluster-programs" and sorted(log) == sorted(PARTS.split())
    lanes = [
        [part for part in log if part in lane]
        for lane in (("lint", "test-unit", "test-train"), ("test-cluster", "test-faults", "test-hosts", "test-installed"))
    ]
    assert lanes == [["lint", "test-unit", "test-train"], ["test-cluster", "test-faults", "test-hosts", "test-installed"]]
    assert re.search(r"^ +\d+  test-unit +2 passed, 1 failed, 1 skipped$", output, re.MULTILINE), output
    last = re.search(r"^ +(\d+)  all; at least \d+\.\d GiB of memory were available$", output, re.MULTILINE)
    assert last and int((played.folder / ".lockstep/tests/seconds").read_text()) - int(last[1]) in (0, 1), "the budget's seconds"


def test_a_record_has_the_seconds_of_each_file_and_of_some_of_them(tmp_path: Path) -> None:
    file = tmp_path / "part.xml"
    assert Record.read(file) is None
    file.write_text(XML[:50])
    assert Record.read(file) is None, "what a killed run left"
    file.write_text(XML)
    record = Record.read(file)
    assert record is not None and record.files == {"tests/a.py": 3, "tests/b.py": 3}
    assert record.share(["tests/b.py", "tests/new.py"]) == 15, "half of what its workers did, so half of its 30 s"


def test_lanes_run_side_by_side(played: Played) -> None:
    """Each waits for the other: one after the other, they would wait for ever."""
    played.recipes["lint"] = "echo > a; while [ ! -e b ]; do sleep 0.05; done"
    played.recipes["test-cluster"] = "echo > b; while [ ! -e a ]; do sleep 0.05; done"
    assert played.run()[0] == 0


def test_a_part_that_fails_ends_the_other_lane_once_that_has_cleaned_up(played: Played) -> None:
    played.recipes["test-cluster"] = WAITING
    played.recipes["test-unit"] = "while [ ! -e ready ]; do sleep 0.05; done; echo why; exit 3"
    code, output = played.run()
    assert code == 1, output
    assert "---- test-unit ended with 2 after" in output and "\nwhy\n" in output and "make test-unit ended with 2" in output
    assert "---- test-cluster was interrupted after" in output
    assert sorted(played.log) == ["cluster-programs", "lint", "test-cluster begins", "test-cluster cleaned"]
    assert played.left() == [] and not (played.folder / ".lockstep/tests/seconds").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_both_lanes_clean_up(number: signal.Signals, played: Played) -> None:
    played.recipes["test-cluster"] = played.recipes["lint"] = WAITING.replace("ready", "ready-$@")
    started = played.start()
    for part in ("lint", "test-cluster"):
        played.wait_for(f"ready-{part}")
    started.send_signal(number)
    output = started.communicate(timeout=120)[0]
    assert started.returncode == 130, output
    assert {"lint cleaned", "test-cluster cleaned"} < set(played.log) and played.left() == []


def test_what_a_killed_run_started_ends_too(played: Played) -> None:
    played.recipes["test-cluster"] = WAITING
    started = played.start()
    played.wait_for("ready")
    started.kill()
    started.communicate(timeout=120)
    while played.left():
        time.sleep(0.01)


def test_the_parts_are_targets_and_reach_every_folder_of_tests() -> None:
    """What is run by hand is no part of them: `-m` takes the place of what pyproject.toml deselects."""
    targets = dict(re.findall(r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    recipes = [targets[part] for part in PARTS.split()]
    assert "scripts/lanes.py" in targets["test"]
    for part in PARTS.split():
        assert f'"{part}"' in SCRIPT.read_text()
        assert part == "cluster-programs" or re.search(rf"\bfor part in .*\b{part}\b", (ROOT / ".ci/run").read_text())
    reached = {folder for recipe in recipes for folder in re.findall(r"\btests/(\w+)", recipe)}
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.rglob("test_*.py"))}
    assert folders - {"bench", "gpu", "openshift", "programs", "release"} == reached, (
        "each folder of tests belongs to a part, but for those that run by hand or are long"
    )
    assert not any(re.search(r"PYTEST\).* -m ", recipe) for recipe in recipes)
