"""User code shares a pod and a volume with its agent: whatever it puts where the agent reads or writes, the agent waits for nothing,
follows no link and reads no more than its bound.

FIFOs have nobody at the other end: a read or a write that waited would never come back, and the test's time limit would end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep_gang.agent.interactive import write_hostfile
from lockstep_gang.agent.log import Journal
from lockstep_gang.agent.preflight.files import path_facts, sees
from lockstep_gang.agent.ranks.nccl_log import NcclLogs, log_choice
from lockstep_gang.agent.ranks.progress_server import METRICS, RemainingTime, parse_status
from lockstep_gang.agent.ranks.reports import read_error_file
from lockstep_gang.agent.ranks.stacks import dumped, process_state, write_stacks
from lockstep_gang.agent.session.client import _print_answer
from lockstep_gang.contract.fabric import FabricAsked
from lockstep_gang.contract.messages import COUNT_MAX
from lockstep_gang.contract.preflight import ExpectedPath, Kind
from lockstep_gang.coordinator import records
from lockstep_gang.coordinator.records import Records
from lockstep_spec.codec import ContractError
from unit.gang.cases import make_run
from unit.gang.test_bounds import attempt

FILES_MAX = 64
ERROR_FILE_BYTES_MAX = 1024 * 1024
SOURCE_BYTES_MAX = 4 * 1024 * 1024

SECRET = "not for anybody else\n"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to(path.parent / "secret")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    """Takes no room on the disk, and a terabyte of memory."""
    path.touch()
    os.truncate(path, 1 << 40)


HOSTILE = [fifo, link, dangling, folder, huge]


@pytest.fixture(params=HOSTILE, ids=lambda plant: plant.__name__)
def plant(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "secret").write_text(SECRET)
        request.param(path)

    return put


@pytest.fixture(autouse=True)
def little_memory() -> object:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


def test_an_error_file_that_is_none_says_nothing(plant: Callable[[Path], None], tmp_path: Path) -> None:
    plant(tmp_path / "error.json")
    assert read_error_file(tmp_path / "error.json", 0) is None


@pytest.mark.parametrize("message", ["[" * 100_000, "[" * 900 + "]" * 900, '"' + "x" * ERROR_FILE_BYTES_MAX + '"', "\udcff"])
def test_an_error_file_that_can_t_be_read_says_nothing(message: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_bytes(f'{{"message": {message}}}'.encode("utf-8", "surrogateescape"))
    error = read_error_file(tmp_path / "error.json", 0)
    assert error is None or len(error.message) <= 2000


@pytest.mark.parametrize("name", ["attempts.jsonl", "end.json", "goodput.json"])
def test_a_record_that_is_no_file_is_refused_in_a_sentence(
    name: str, plant: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FILE_BYTES_MAX", 1 << 20)
    plant(tmp_path / "gang" / name)
    own = Records(str(tmp_path))
    read: dict[str, Callable[[], object]] = {"attempts.jsonl": own.attempts, "end.json": own.end, "goodput.json": lambda: own.goodput("u")}
    with pytest.raises(ContractError, match=f"{name} is not JSON .*: put the file back, or move the folder away"):
        read[name]()
    assert (tmp_path / "gang/secret").read_text() == SECRET


def test_garbage_in_the_place_of_the_attempts_gives_way_to_them_unless_it_is_a_folder(
    plant: Callable[[Path], None], tmp_path: Path
) -> None:
    """The coordinator tells of a folder and tries again: neither a traceback nor a hung thread."""
    own, path = Records(str(tmp_path)), tmp_path / "gang/attempts.jsonl"
    plant(path)
    with pytest.raises(IsADirectoryError) if path.is_dir() else contextlib.nullcontext():
        own.write_attempts([attempt(1)])
        assert own.attempts() == [attempt(1)]
    assert (tmp_path / "gang/secret").read_text() == SECRET


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"\0" * 100, b'{"attempt": "1"}', b"9" * 10_000])
def test_attempts_that_nobody_here_wrote_are_a_contract_error(content: bytes, tmp_path: Path) -> None:
    own = Records(str(tmp_path))
    (tmp_path / "gang").mkdir()
    (tmp_path / "gang/attempts.jsonl").write_bytes(content)
    with pytest.raises(ContractError):
        own.attempts()


def test_stacks_are_written_in_the_place_of_whatever_was_there(plant: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "logs/hang-attempt-1-rank-0.txt"
    plant(path)
    written = write_stacks(path, "head", ["line"])
    assert (written is None) == (path.is_dir() and not path.is_symlink())
    if written is not None:
        assert path.read_text() == "head\nline\n" and not path.is_symlink()
    assert (path.parent / "secret").read_text() == SECRET


@pytest.mark.parametrize("source", ["/dev/zero", "fifo", "huge", "", "\0", "/proc/self/mem"])
def test_a_source_file_that_a_rank_names_is_read_within_bounds(source: str, tmp_path: Path) -> None:
    fifo(tmp_path / "fifo")
    huge(tmp_path / "huge")
    assert SOURCE_BYTES_MAX < 1 << 40
    named = str(tmp_path / source) if source in ("fifo", "huge") else source
    lines = ["Thread 0x1 (most recent call first):", f'  File "{named}", line 1 in step']
    assert not dumped(1, 0, process_state(Path("/proc/self")), lines, None).waits_for_others


def test_a_source_file_may_be_a_link_as_mounted_files_are(tmp_path: Path) -> None:
    (tmp_path / "mounted").write_text("\nloss.item()\n")
    (tmp_path / "train.py").symlink_to("mounted")
    lines = ["Thread 0x1 (most recent call first):", f'  File "{tmp_path}/train.py", line 2 in step']
    assert dumped(1, 0, process_state(Path("/proc/self")), lines, None).waits_for_others


def test_a_hostfile_has_the_ranks_of_each_node(tmp_path: Path) -> None:
    run = make_run(nodes=3, ranks_per_node=2, node_ranks=(2, 1, 1), addresses=("a", "b", "c"), working_directory=str(tmp_path))
    write_hostfile(run, 0, print)
    assert (tmp_path / "hostfile").read_text() == "a slots=2\nb slots=1\nc slots=1\n"


@pytest.mark.parametrize("name", ["hostfile", ".hostfile.draft"])
def test_a_hostfile_takes_the_place_of_whatever_was_there(name: str, plant: Callable[[Path], None], tmp_path: Path) -> None:
    plant(tmp_path / name)
    said: list[str] = []
    write_hostfile(make_run(working_directory=str(tmp_path)), 0, said.append)
    assert (tmp_path / "secret").read_text() == SECRET
    if (tmp_path / "hostfile").is_dir():
        assert len(said) == 1
    else:
        assert "slots=" in (tmp_path / "hostfile").read_text() and not (tmp_path / "hostfile").is_symlink() and said == []


@pytest.mark.parametrize("name", ["node-0.log", ".run.json"])
def test_the_journal_holds_nobody_up_and_writes_through_no_link(name: str, plant: Callable[[Path], None], tmp_path: Path) -> None:
    said: list[str] = []
    plant(tmp_path / "logs/output" / name)
    journal = Journal(make_run(run_dir=str(tmp_path)), 0, said.append)
    journal.write("a line")
    journal.close(20.0)
    assert not journal._thread.is_alive()
    assert (tmp_path / "logs/output/secret").read_text() == SECRET
    assert not (tmp_path / "logs/output/nowhere").exists()
    assert len(said) <= 1


def test_what_else_stands_in_the_folder_of_nccl_s_logs_is_neither_read_nor_emptied(plant: Callable[[Path], None], tmp_path: Path) -> None:
    shown: list[str] = []
    logs = NcclLogs(tmp_path, 1, lambda rank, line, warning: shown.append(line))
    logs.add(0, log_choice(FabricAsked("TCP"), 1, {}, logs.pattern(0)))
    plant(logs.folder / "rank-0.1.log")
    plant_head = logs.folder / "rank-0.2.head"
    plant_head.symlink_to(tmp_path / "elsewhere")
    (logs.folder / "rank-0.2.log").write_bytes(b"x" * 70 + b"\n" + b"y" * (5 << 20) + b"\n")
    for _ in range(5):
        logs.news()
    logs.keep(tmp_path / "kept", shown.append)
    logs.end(20.0)
    assert SECRET.strip() not in (tmp_path / "kept/rank-0.log").read_text()
    assert not (tmp_path / "elsewhere").exists()
    assert not any(SECRET.strip() in line for line in shown)


def test_of_a_rank_that_fills_the_folder_some_files_are_read(tmp_path: Path) -> None:
    logs = NcclLogs(tmp_path, 1, lambda rank, line, warning: None)
    logs.add(0, log_choice(FabricAsked("TCP"), 1, {}, logs.pattern(0)))
    for number in range(FILES_MAX + 50):
        (logs.folder / f"rank-0.{number}.log").write_text("x\n")
    logs.news()
    assert len(logs._ranks[0].files) == FILES_MAX


def test_a_look_at_paths_and_markers_waits_for_no_fifo(tmp_path: Path) -> None:
    fifo(tmp_path / "model")
    huge(tmp_path / "marker")
    fifo(tmp_path / "other")
    (tmp_path / "real").write_text("x")
    (tmp_path / "mounted").symlink_to("real")
    facts = path_facts((ExpectedPath("model", "model", Kind.FILE), ExpectedPath("data", "mounted", Kind.FILE)), str(tmp_path))
    assert "no regular file" in facts[0].error and not facts[1].error
    assert not sees(tmp_path / "marker", "token", 0.0) and not sees(tmp_path / "other", "token", 0.0)


@pytest.mark.parametrize("number", ["1e308", "-5", "inf", "nan", "9" * 400])
def test_a_step_that_a_script_posts_stays_a_number_that_reports_can_have(number: str) -> None:
    metrics = [
        {"name": "current_step", "value": "1"},
        {"name": "total_steps", "value": number},
        *({"name": f"\x1b[2J\n{n}", "value": "\x1b]0;x\x07"} for n in range(50)),
    ]
    said = parse_status(json.dumps({"trainerStatus": {"progressPercentage": 1, "metrics": metrics}}).encode())
    pace = RemainingTime()
    pace.step(said, 0.0)
    said = parse_status(json.dumps({"trainerStatus": {"metrics": [{"name": "current_step", "value": "2"}, *metrics[1:]]}}).encode())
    step = pace.step(said, 1e9)
    assert step is not None and 0 <= (step.total_steps or 0) <= COUNT_MAX and 0 <= (step.estimated_remaining_seconds or 0) <= COUNT_MAX
    assert len(step.metrics) <= METRICS and all(text.isprintable() for item in step.metrics.items() for text in item)


def test_variables_for_a_shell_are_no_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes takes nearly every character in a variable's name, and the answer is there to be evaluated."""
    _print_answer({"environment": {"A": "$(b) '\n", "x; touch y": "1", "$(touch y)": "1", "B\nC": "1", "ü": "1", "": "1", "_D1": ""}})
    assert capsys.readouterr().out == "export A='$(b) '\"'\"'\n'\nexport _D1=''\n"
