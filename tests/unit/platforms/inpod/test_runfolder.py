"""What a run's folder and its node say: the program that also runs in pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.platforms.inpod import runfolder, source_of
from lockstep.programs import boot_command
from lockstep_gang.agent.log import BEGINS, Journal
from lockstep_gang.contract.run import JobIdentity
from unit.gang.cases import make_run


def write(root: Path, uid: str, *lines: tuple[int, str]) -> None:
    """As an agent does."""
    run = replace(make_run(nodes=2), run_dir=str(root), job=JobIdentity("x", "ns", uid))
    kept = Journal(run, 0, lambda line: None)
    for attempt, line in lines:
        kept.begin_attempt(attempt)
        kept.write(line)
    kept.close(5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "uid-1", (1, "[rank 0] of an earlier job"))
    write(tmp_path, "uid-2", (2, "[rank 0] first"), (2, "[rank 1] second"))
    write(tmp_path, "uid-2", (0, "[lockstep] waiting"), (3, "[rank 1] third"), (3, "[rank 10] fourth"))
    return tmp_path


def test_agents_and_readers_mean_the_same_line() -> None:
    assert BEGINS + " " == runfolder.BEGINS


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({}, ["first", "second", "waiting", "third", "fourth"]),
        ({"uid": "uid-1"}, ["of an earlier job"]),
        ({"uid": "nobody"}, []),
        ({"rank": 1}, ["second", "third"]),
        ({"attempt": 2}, ["first", "second"]),
        ({"attempt": 3, "rank": 10}, ["fourth"]),
        ({"tail": 2}, ["third", "fourth"]),
        ({"tail": 0}, []),
        ({"since": "2999-01-01T00:00:00"}, []),
        ({"node": 1}, []),
    ],
)
def test_lines_are_chosen_by_job_rank_attempt_and_time(root: Path, request_: dict[str, object], words: list[str]) -> None:
    found = list(runfolder.log(**{"root": str(root), "node": 0, **request_}))  # type: ignore[arg-type]
    assert [line.split("] ", 1)[1] for line in found] == words


def test_a_line_may_have_anything_in_it(tmp_path: Path) -> None:
    write(tmp_path, "u", (1, "[rank 0] "), (1, "[rank 0]  two  blanks "), (1, ""))
    assert list(runfolder.log(str(tmp_path), 0)) == ["[rank 0] ", "[rank 0]  two  blanks ", ""]


def test_a_file_that_gave_way_is_read_before_the_one_that_grows(tmp_path: Path) -> None:
    run = replace(make_run(nodes=2), run_dir=str(tmp_path))
    for number in range(3):
        kept = Journal(run, 0, lambda line: None, file_bytes=300)
        for line in range(3):
            kept.write(f"{number}.{line} {'x' * 50}")
        kept.close(5)
    assert [line.split()[0] for line in runfolder.log(str(tmp_path), 0)] == ["1.0", "1.1", "1.2", "2.0", "2.1", "2.2"]


def asked(*requests: dict[str, object]) -> list[str]:
    """What the program answers when it comes as text, as in a pod."""
    source = source_of(runfolder)
    command = boot_command(source, json.dumps(requests[0]), options=("-I", "-S"))
    questions = b"".join(json.dumps(request).encode() + b"\n" for request in requests[1:])
    done = subprocess.run([sys.executable, *command[1:]], input=source + questions, capture_output=True, check=True, timeout=60)
    return done.stdout.decode().splitlines()


def test_news_are_what_came_after_a_time_wherever_that_is_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfolder, "NEAR_BYTES", 100)
    (tmp_path / "logs/output").mkdir(parents=True)
    entries = [
        (f"2026-01-01T00:{number // 3 // 60:02}:{number // 3 % 60:02}.5Z", f"[rank {number % 2}] {'x' * (number % 70)}{number}")
        for number in range(400)
    ]
    for name, part in (("node-0.log.1", entries[:150]), ("node-0.log", entries[150:])):
        (tmp_path / "logs/output" / name).write_text("".join(f"{stamp} 1 {line}\n" for stamp, line in part))
    for after in ("", "2025", *dict.fromkeys(stamp for stamp, _ in entries), "2999"):
        for seen in range(4):
            expected = [entry for entry in entries if entry[0] >= after]
            del expected[: min(seen, sum(stamp == after for stamp, _ in entries))]
            assert list(runfolder.news(str(tmp_path), 0, after, seen, uid="u")) == expected, (after, seen)


def test_news_of_a_long_log_read_its_end_alone(tmp_path: Path) -> None:
    (tmp_path / "logs/output").mkdir(parents=True)
    with (tmp_path / "logs/output/node-0.log").open("w") as log:
        for number in range(60_000):
            log.write(f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}.5Z 1 [rank 0] step {number} of a long run\n")
    before = bytes_read()
    assert [line for _, line in runfolder.news(str(tmp_path), 0, "2026-01-01T16:39:58.5Z", 1, uid="u")] == [
        "[rank 0] step 59999 of a long run"
    ]
    assert bytes_read() - before < 1_000_000 < (tmp_path / "logs/output/node-0.log").stat().st_size


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_it_runs_as_text_with_nothing_but_the_standard_library(root: Path) -> None:
    assert asked({"what": "log", "root": str(root), "node": 0, "rank": 10}) == ["[rank 10] fourth"]


def test_a_summary_has_the_measurements_of_every_step(root: Path) -> None:
    records = [{"step": step, "loss": 3 - step / 100, "tokensPerSecond": 100 + step, "stepSeconds": 0.5} for step in range(1, 8)]
    (root / "logs/train_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 8, "lo')
    found = json.loads(asked({"what": "summary", "root": str(root)})[0])
    assert list(found["steps"]) == [str(step) for step in range(1, 8)] and found["steps"]["7"]["loss"] == 2.93


def test_a_long_curve_is_thinned_to_steps_that_another_run_has_too(tmp_path: Path) -> None:
    def steps(count: int) -> set[int]:
        path = tmp_path / f"{count}.jsonl"
        path.write_text("".join(f'{{"step": {step}, "loss": 1}}\n' for step in range(1, count + 1)))
        return set(map(int, runfolder.Records(path).read().thinned(50, ["loss"])))

    short, long = steps(333), steps(1999)
    assert 25 <= len(short) <= 51 and 25 <= len(long) <= 51 and {333} <= short and {1999} <= long
    assert {step for step in long if step < 333} <= short


def test_a_growing_file_is_read_on_and_a_replaced_one_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    records = runfolder.Records(path)
    assert set(records.read().by_step) == {1, 2}
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert set(records.read().by_step) == {1, 2, 3}
    other = tmp_path / "other"
    other.write_text('{"step": 1}\n')
    other.replace(path)
    assert set(records.read().by_step) == {1}
    path.write_text('{"st')
    assert set(records.read().by_step) == set()  # cut short in place


def test_counters_of_interfaces_and_of_rdma_devices_are_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/dev").write_text(
        "Inter-|   Receive\n face |bytes\n    lo: 5 0 0 0 0 0 0 0 5 0\n  eth0: 1000 1 0 0 0 0 0 0 2000 1 0 0 0 0 0 0\n"
    )
    for name, state, opened in (("mlx5_5", "4: ACTIVE", ""), ("mlx5_6", "4: ACTIVE", "uverbs6"), ("mlx5_7", "1: DOWN", "uverbs7")):
        device = tmp_path / "sys/class/infiniband" / name
        port = device / "ports/1"
        for folder in (port / "counters", device / f"device/infiniband_verbs/uverbs{name[-1]}", tmp_path / "dev/infiniband" / opened):
            folder.mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(f"{state}\n")
        (port / "counters/port_rcv_data").write_text("10\n")
        (port / "counters/port_xmit_data").write_text("20\n")
    assert runfolder.counters(tmp_path) == {"eth0": (1000, 2000), "mlx5_6": (40, 80)}


def test_a_watch_answers_every_question_with_rates_since_the_last_one(root: Path) -> None:
    (root / "logs/train_log.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    answers = [json.loads(line) for line in asked({"what": "watch", "root": str(root), "node": 4, "machine": True}, {}, {"points": 10})]
    assert [answer["node"] for answer in answers] == [4, 4]
    assert all(answer["cpu"]["limitCores"] > 0 and answer["rankLoads"] == [] for answer in answers)
    assert "curve" not in answers[0] and answers[1]["curve"] == {"1": {"loss": 2.5}}
    assert all(len(rates) == 2 and min(rates) >= 0 for answer in answers for rates in answer["gigabits"].values())


@pytest.mark.parametrize("what", ["fifo", "folder", "device", "nested", "garbage"])
def test_whatever_a_script_puts_into_its_folder_a_look_at_it_ends(what: str, tmp_path: Path) -> None:
    """A FIFO has nobody at its other end: a look that waited for one would end with the test's time limit."""
    for name in (f"{runfolder.OUTPUT}/node-0.log", "logs/train_log.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(b"[" * 100_000 + b"\n" if what == "nested" else b"\xff\0[]\n1\n")
    assert list(runfolder.log(str(tmp_path), 0)) in ([], [""])
    assert runfolder.summary(str(tmp_path)) == {"steps": {}}


def test_a_preflight_is_of_the_attempt_that_follows_it_also_where_an_earlier_job_had_the_first_ones(tmp_path: Path) -> None:
    mine = [
        (0, "[lockstep] preflight: 12 checks on 2 nodes passed in 2.0 s"),
        (0, "[lockstep] attempt 7 starts: 2 ranks on 2 nodes"),
        (7, "[rank 0] one"),
    ]
    write(tmp_path, "u", *mine, (7, "[lockstep] preflight: found 1 error"))
    assert list(runfolder.log(str(tmp_path), 0, attempt=1)) == []
    assert list(runfolder.log(str(tmp_path), 0, attempt=7)) == [line for _, line in mine]
    assert list(runfolder.log(str(tmp_path), 0, attempt=8)) == ["[lockstep] preflight: found 1 error"]
    assert len(list(runfolder.log(str(tmp_path), 0))) == 4


def test_what_the_next_attempt_begins_with_is_not_the_last_one_s(tmp_path: Path) -> None:
    head = [
        "preflight: 12 checks on 2 nodes passed in 1.0 s",
        "attempt 2 starts: 2 ranks on 2 nodes, restart 1 of at most 3",
        "nodes: a, b",
        "from: step 4",
    ]
    first = [
        (0, "[lockstep] preflight: 12 checks on 2 nodes passed in 2.0 s"),
        (0, "[lockstep] attempt 1 starts: 2 ranks on 2 nodes"),
        (1, "[rank 0] one"),
    ]
    between = [(1, "[lockstep] rank 0 on node 0 exited with 1"), *((1, f"[lockstep] {line}") for line in head)]
    write(tmp_path, "u", *first, *between, (2, "[rank 0] two"))
    assert list(runfolder.log(str(tmp_path), 0, attempt=1)) == [*(line for _, line in first), "[lockstep] rank 0 on node 0 exited with 1"]
    assert list(runfolder.log(str(tmp_path), 0, attempt=1, tail=2)) == ["[rank 0] one", "[lockstep] rank 0 on node 0 exited with 1"]
    assert list(runfolder.log(str(tmp_path), 0, attempt=2)) == [*(f"[lockstep] {line}" for line in head), "[rank 0] two"]
