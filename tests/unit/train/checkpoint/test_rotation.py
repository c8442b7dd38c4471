"""What rotation may delete, whoever reads, whatever the clocks say and whatever else lies there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lockstep_train.checkpoint.format import readers, volume
from lockstep_train.checkpoint.format.readers import ReaderWatch, reading
from lockstep_train.checkpoint.save.rotation import Quality, Rotation, best_commit, doomed_commits
from support.checkpoint_cases import commits, make_commit, names, record

DEAD_SECONDS = 600.0

CHAIN = commits("step-60.a2", "step-50.a2", "step-40.a1", "step-30.a1", "step-20.a1", "step-10.a1")


def qualities(**losses: float) -> dict[object, Quality | None]:
    return {name: Quality(losses[f"s{name.step}"], 0) if f"s{name.step}" in losses else None for name in CHAIN}


@pytest.mark.parametrize(
    ("keep", "losses", "held", "doomed"),
    [
        (3, {}, [], ["step-30.a1", "step-20.a1", "step-10.a1"]),
        (1, {}, [], ["step-40.a1", "step-30.a1", "step-20.a1", "step-10.a1"]),
        (3, {"s60": 2.0, "s20": 1.5, "s10": 1.9}, [], ["step-30.a1", "step-10.a1"]),
        (3, {"s60": 1.0, "s20": 1.5}, [], ["step-30.a1", "step-20.a1", "step-10.a1"]),
        (3, {"s20": 1.5}, ["step-10.a1"], ["step-30.a1"]),
        (9, {}, [], []),
    ],
)
def test_the_newest_the_best_and_what_is_read_stay(keep: int, losses: dict[str, float], held: list[str], doomed: list[str]) -> None:
    assert names(doomed_commits(CHAIN, keep, qualities(**losses), set(commits(*held)))) == doomed


def test_of_equal_losses_the_commit_that_was_measured_itself_is_the_best() -> None:
    after, measured = commits("step-150.a1", "step-100.a1")
    assert best_commit([after, measured], {after: Quality(1.5, 50), measured: Quality(1.5, 0)}) == measured


def five_commits(checkpoints: Path) -> None:
    volume.write_record(checkpoints, record(1))
    for step in range(1, 6):
        make_commit(checkpoints, f"step-{step}.a1", eval_loss=float(step))


def present(checkpoints: Path) -> list[str]:
    return sorted(entry.name for entry in checkpoints.glob("step-*"))


def test_the_commit_with_the_lowest_evaluation_loss_is_kept(tmp_path: Path) -> None:
    five_commits(tmp_path)
    Rotation(tmp_path, keep=2).rotate()
    assert present(tmp_path) == ["step-1.a1", "step-4.a1", "step-5.a1"]


def test_mtimes_and_skewed_clocks_change_nothing(tmp_path: Path) -> None:
    five_commits(tmp_path)
    for age, folder in enumerate(sorted(tmp_path.glob("step-*"))):
        for path in [*folder.iterdir(), folder]:
            os.utime(path, (4_000_000_000 - age, 4_000_000_000 - age))  # the oldest commit is the youngest file, in 2096
    Rotation(tmp_path, keep=2).rotate()
    assert present(tmp_path) == ["step-1.a1", "step-4.a1", "step-5.a1"]


def test_stray_files_are_left_alone_and_confuse_nobody(tmp_path: Path) -> None:
    five_commits(tmp_path)
    strays = ["step-9.a1", "step-x.a1", "notes.txt", ".step-1.a1", "chain/notes", "readers/notes.txt", "readers/step-3.a1.json"]
    for stray in strays:
        (tmp_path / stray).parent.mkdir(exist_ok=True)
        (tmp_path / stray).write_text("mine")
    Rotation(tmp_path, keep=2).rotate()
    assert all((tmp_path / stray).read_text() == "mine" for stray in strays)
    assert [name for name in present(tmp_path) if (tmp_path / name).is_dir()] == ["step-1.a1", "step-4.a1", "step-5.a1"]


def test_a_commit_that_is_being_read_stays_until_the_reader_is_done(tmp_path: Path) -> None:
    five_commits(tmp_path)
    rotation = Rotation(tmp_path, keep=2)
    with reading(tmp_path / "step-2.a1", "a test") as held:
        assert held
        rotation.rotate()
        assert present(tmp_path) == ["step-1.a1", "step-2.a1", "step-4.a1", "step-5.a1"]
    rotation.rotate()
    assert present(tmp_path) == ["step-1.a1", "step-4.a1", "step-5.a1"]
    assert list((tmp_path / "readers").iterdir()) == []


def test_a_reader_that_comes_between_choosing_and_deleting_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five_commits(tmp_path)
    watch = ReaderWatch(tmp_path)
    rotation = Rotation(tmp_path, keep=2, watch=watch)
    look = watch.held
    looks = iter([set(), None, None, None, None])  # the first look is before the reader comes
    monkeypatch.setattr(watch, "held", lambda: look() if (found := next(looks)) is None else found)
    with reading(tmp_path / "step-2.a1", "a test"):
        rotation.rotate()
        assert present(tmp_path) == ["step-1.a1", "step-2.a1", "step-4.a1", "step-5.a1"]


def test_a_reader_of_a_commit_that_was_rotated_away_is_told(tmp_path: Path) -> None:
    five_commits(tmp_path)
    Rotation(tmp_path, keep=2).rotate()
    with pytest.raises(FileNotFoundError, match="rotated away"), reading(tmp_path / "step-2.a1", "a test"):
        pass
    assert list((tmp_path / "readers").iterdir()) == []


def test_a_dead_reader_holds_for_ten_minutes_on_the_watching_clock_and_is_cleared_away(tmp_path: Path) -> None:
    five_commits(tmp_path)
    (tmp_path / "readers").mkdir()
    file = tmp_path / "readers" / "step-2.a1.00ff.json"
    file.write_text('{"reader": "dead", "count": 7}')
    os.utime(file, (0, 0))
    now = [1000.0]
    watch = ReaderWatch(tmp_path, clock=lambda: now[0])
    assert names(sorted(watch.held())) == ["step-2.a1"]
    now[0] += DEAD_SECONDS - 1
    assert names(sorted(watch.held())) == ["step-2.a1"]
    now[0] += 1
    assert watch.held() == set()
    assert not file.exists()


def test_a_living_reader_holds_for_as_long_as_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    five_commits(tmp_path)
    beats = threading.Semaphore(0)
    beat = readers._beat

    def counted(*arguments: object) -> bool:
        done = beat(*arguments)  # type: ignore[arg-type]
        beats.release()
        return done

    monkeypatch.setattr(readers, "_beat", counted)
    now = [0.0]
    watch = ReaderWatch(tmp_path, clock=lambda: now[0])
    with reading(tmp_path / "step-2.a1", "a test", beat_seconds=0.001):
        for _ in range(3):
            assert names(sorted(watch.held())) == ["step-2.a1"]
            now[0] += DEAD_SECONDS
            while beats.acquire(blocking=False):  # those of before
                pass
            for _ in range(2):  # the second one surely began after the look
                beats.acquire()


def test_a_reader_that_cannot_write_reads_all_the_same(tmp_path: Path) -> None:
    five_commits(tmp_path)
    (tmp_path / "readers").write_text("in the way")  # as a volume that is mounted read-only would be
    with reading(tmp_path / "step-2.a1", "a test") as held:
        assert not held


def test_a_reader_beats_every_thirty_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    beaten = threading.Event()

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:  # (a thread's own start waits, too)
                waits.append(timeout)
                beaten.set()
            return super().wait()

    (commit := tmp_path / "step-10.a1").mkdir()
    monkeypatch.setattr(readers.threading, "Event", Event)
    with reading(commit, "a test") as held:
        assert held and beaten.wait(20)
    assert waits == [30.0]
