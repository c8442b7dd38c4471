"""Starts of a job on one host, one beside the other: the program that keeps jobs there, as a process of its own."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.onhost import install, keep, readings

JOBS = "lockstep/jobs"


class Keeping:
    """The program that keeps jobs, begun with a line of a request."""

    def __init__(self, request: dict[str, Any], home: Path | None = None) -> None:
        """`home`: the folder of its state, where it isn't that of the test's own environment."""
        environment = os.environ if home is None else {**os.environ, "XDG_STATE_HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, str(keep.__file__)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.write(json.dumps(request).encode() + b"\n")

    def write(self, data: bytes) -> None:
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())

    def leave(self) -> None:
        self.process.communicate(timeout=30)


class Keeper(Keeping):
    """A start that has its files, and waits for the word."""

    def __init__(self, home: Path, command: str = "sleep", *, supervised: bool = True, unit: str = "", **request: Any) -> None:
        record = {
            "workspace": str(home / "workspace"),
            "datasets": str(home / "datasets"),
            "supervised": supervised,
            "unit": unit,
            "command": [command, "60"],
            "environment": {},
            "job": {"metadata": {"uid": "u1"}},
        }
        files = {"job.json": base64.b64encode(json.dumps(record).encode()).decode()}
        super().__init__({"do": "start", "job": "x", "fresh": True, "files": files, "witness": None, "ran": False, **request}, home)


def placed(home: Path, *command: str, **request: Any) -> Keeper:
    keeper = Keeper(home, *command, **request)
    assert keeper.answer() == {"placed": True}
    return keeper


def environment(home: Path, digit: str) -> Path:
    """Program of an environment, as a setup has made it."""
    program = home / "lockstep" / f"env-{digit * 16}" / "bin/python"
    program.parent.mkdir(parents=True)
    program.symlink_to("/bin/sleep")
    return program


@contextmanager
def later_setup(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """A setup that has made another environment, and is about to remove those that no job names."""
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    environment(home, "1")
    request = {"environment": f"env-{'1' * 16}", "folders": [], "files": [], "keep": [], "linger": False}
    thread = threading.Thread(target=install.make, args=(request,))
    try:
        yield thread
    finally:
        thread.join(30)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    yield tmp_path
    pid = keep.supervisor("x")
    if pid is not None:
        keep.stop({"job": "x", "now": True, "wait": True})


def test_a_second_start_is_refused_while_one_waits_and_leaves_it_alone(home: Path) -> None:
    first = placed(home)
    second = Keeper(home)
    assert second.answer()["problem"].startswith("another start of job x is under way there: see what came of it, or try again in ")
    first.write(b"go\n")
    assert first.answer() == {"started": True}
    third = Keeper(home)
    assert third.answer() == {"problem": "job x runs there already"}
    for keeper in (first, second, third):
        keeper.leave()
    assert keep.supervisor("x") is not None


def test_a_start_that_has_waited_for_long_makes_room_and_begins_nothing(home: Path) -> None:
    first = placed(home)
    (draft,) = (home / JOBS).glob(".x.start.*")
    long_ago = draft.stat().st_mtime - 40.0
    os.utime(draft, (long_ago, long_ago))
    second = placed(home)
    first.write(b"go\n")
    assert first.answer() == {"problem": "a later start of this job has taken its place"}
    second.write(b"go\n")
    assert second.answer() == {"started": True}
    for keeper in (first, second):
        keeper.leave()


def start_and_stop(home: Path) -> None:
    keeper = placed(home)
    keeper.write(b"go\n")
    assert keeper.answer() == {"started": True}
    keeper.leave()
    assert keep.stop({"job": "x", "now": True, "wait": True}) == {"stopped": True}


def test_a_unit_that_is_new_or_has_changed_is_read_when_it_is_enabled_and_needs_no_word_of_its_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = home / "told"
    systemctl = home / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    keeper = placed(home, supervised=False, unit="[Service]\n")
    assert not told.exists() and not keep.unit_path("x").exists(), "nothing is to be seen before the word"
    keeper.write(b"go\n")
    assert keeper.answer() == {"started": True}
    keeper.leave()
    assert told.read_text().splitlines() == ["--user enable --quiet lockstep-x.service", "--user restart --no-block lockstep-x.service"]


def test_of_two_resumes_at_once_the_later_one_leaves_the_agent_of_the_first_alone(home: Path) -> None:
    start_and_stop(home)
    first = placed(home, fresh=False)
    first.write(b"go\n")
    assert first.answer() == {"started": True}
    pid = keep.supervisor("x")
    assert pid is not None, "the supervisor is there once the start has answered"
    second = Keeper(home, fresh=False)
    assert second.answer() == {"problem": "job x runs there already"}
    knowing = placed(home, fresh=False, ran=True)
    for keeper in (first, second, knowing):
        keeper.leave()
    assert keep.supervisor("x") == pid


def test_an_agent_that_nothing_can_keep_is_not_called_started(home: Path) -> None:
    start_and_stop(home)
    log = home / JOBS / "x/agent.log"
    log.unlink()
    log.mkdir()
    keeper = placed(home, fresh=False)
    keeper.write(b"go\n")
    assert keeper.answer() == {"problem": f"{log}: Is a directory"}
    keeper.leave()
    assert keep.supervisor("x") is None


def test_a_start_and_a_deletion_remove_what_a_power_cut_left_of_starts(home: Path) -> None:
    def plant() -> list[Path]:
        left = [home / JOBS / name for name in ("..0123456789ab", "..0123456789ab.before", ".other.start.0123456789ab")]
        for folder in left:
            folder.mkdir(parents=True)
            (folder / "key").write_text("secret")
        long_ago = left[-1].stat().st_mtime - 2 * 3600.0
        os.utime(left[-1], (long_ago, long_ago))
        return left

    left = plant()
    waiting = home / JOBS / ".waiting.start.0123456789ab"
    waiting.mkdir()
    keeper = placed(home)
    assert not any(folder.exists() for folder in left)
    assert len(list((home / JOBS).glob(".x.start.*"))) == 1 and waiting.exists(), "its own stays, and that of a start that goes on"
    keeper.leave()
    left = plant()
    keep.remove({"job": "x", "now": True})
    assert not any(folder.exists() for folder in left)


def test_a_setup_keeps_the_environment_of_a_start_that_waits_for_the_word(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(home, "0")
    keeper = placed(home, str(python))
    with later_setup(home, monkeypatch) as thread:
        thread.start()
    keeper.write(b"go\n")
    assert keeper.answer() == {"started": True}
    keeper.leave()
    assert python.exists()


def test_a_setup_waits_for_a_start_that_is_about_to_write_its_record(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(home, "0")
    with later_setup(home, monkeypatch) as thread, readings.alone():
        thread.start()
        thread.join(1)
        assert python.exists()
        draft = home / JOBS / ".x.start.0123456789ab"
        draft.mkdir()
        (draft / "job.json").write_text(json.dumps({"command": [str(python)]}))
    assert python.exists()


def test_a_start_whose_environment_a_setup_has_removed_is_refused_and_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(home, "0")
    with later_setup(home, monkeypatch) as thread:
        thread.start()
    assert not python.exists()
    keeper = Keeper(home, str(python))
    assert keeper.answer() == {"problem": f"there is no {python} any more, which job x was to run with: start it anew by lockstep run"}
    keeper.leave()
    assert list((home / JOBS).iterdir()) == []


@pytest.mark.parametrize("deleted", [False, True])
def test_what_waits_for_a_job_that_is_over_ends_without_a_key_and_another_start_is_left_alone(home: Path, deleted: bool) -> None:
    keeper = placed(home)
    keeper.write(b"go\n")
    assert keeper.answer() == {"started": True}
    keeper.leave()
    folder = home / JOBS / "x"
    (folder / "key").write_text("secret")
    assert keep.end_over({"job": "x", "uid": "u0", "deleted": deleted}) == {"ended": False}
    assert keep.supervisor("x") is not None and (folder / "key").exists()
    assert keep.end_over({"job": "x", "uid": "u1", "deleted": deleted}) == {"ended": True}
    assert keep.supervisor("x") is None
    assert sorted(path.name for path in folder.iterdir()) == ["agent.log", "job.json"] if not deleted else not folder.exists()
