"""What an agent takes of its ranks, of people's programs and of the machine at once, and how much of it it keeps."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep_gang.agent import main
from lockstep_gang.agent.link import Handlers, Link
from lockstep_gang.agent.log import Journal
from lockstep_gang.agent.ranks import rankstart, reports
from lockstep_gang.agent.ranks import relay as relay_module
from lockstep_gang.agent.ranks.progress_server import parse_status
from lockstep_gang.agent.ranks.relay import Relay, drain
from lockstep_gang.agent.ranks.script import look
from lockstep_gang.agent.ranks.stacks import ProcessState, dumped
from lockstep_gang.agent.session import client
from lockstep_gang.agent.session.requests import ClientConnection
from lockstep_gang.contract.interactive import Find
from lockstep_gang.lifecycle.tracebacks import LEFT_OUT
from unit.gang.cases import KEY, make_run
from unit.virtual_time import VirtualClock

KIB, MIB = 1 << 10, 1 << 20


def sparse(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


def test_a_line_without_an_end_is_passed_on_in_pieces_of_eight_kibibytes() -> None:
    lines: list[str] = []
    made = Relay(0, lambda line: lines.append(line.removeprefix("[rank 0] ")))
    made.feed(b"x" * 20_000)
    assert [len(line) for line in lines] == [8192, 8192]
    made.feed(b"y" * 10_000 + b"\n" + b"z" * 10_000 + b"\n")
    assert [len(line) for line in lines[2:]] == [8192, 20_000 + 10_000 - 3 * 8192, 8192, 10_000 - 8192]


def test_of_what_a_rank_writes_while_it_is_asked_twenty_thousand_lines_are_kept() -> None:
    made = Relay(0, lambda line: None)
    made.captured = []
    made.feed(b"x\n" * 20_010)
    assert len(made.captured) == 20_000


@pytest.mark.parametrize(("seconds", "fresh_from"), [(19.0, 0), (21.0, 1)])
def test_a_line_that_is_twenty_seconds_old_does_not_say_why_a_rank_ends(
    monkeypatch: pytest.MonkeyPatch, seconds: float, fresh_from: int
) -> None:
    monkeypatch.setattr(relay_module, "time", clock := VirtualClock())
    made = Relay(0, lambda line: None)
    made.feed(b"saving\n")
    clock.sleep(seconds)
    made.feed(b"ends\n")
    assert made.fresh_from == fresh_from


def test_five_lines_of_a_chain_of_exceptions_stay_before_what_hooks_of_the_exit_print() -> None:
    made = Relay(0, lambda line: None)
    for number in range(8):
        made.feed(b"ValueError: %d\nDuring handling of the above exception, another exception occurred:\n" % number)
    made.feed(b"".join(b"uploading %d\n" % number for number in range(60)))
    assert made.last_lines.index(LEFT_OUT) == 5


def test_a_rank_that_floods_its_output_is_read_a_mebibyte_at_a_time(tmp_path: Path) -> None:
    with sparse(tmp_path / "output", 200 * MIB).open("rb", buffering=0) as file:
        assert drain(file.fileno(), cast(Any, SimpleNamespace(feed=lambda data: None)))
        assert file.tell() == MIB


def test_input_of_a_laptop_is_read_64_kibibytes_at_a_time(tmp_path: Path) -> None:
    with sparse(tmp_path / "input", MIB).open("rb", buffering=0) as file:
        client.Conversation(cast(Any, None), until_eof=True)._take_input(file.fileno())
        assert file.tell() == 64 * KIB


@pytest.mark.parametrize(("size", "is_read"), [(MIB, True), (MIB + 1, False)])
def test_an_error_file_of_a_rank_has_at_most_a_mebibyte(tmp_path: Path, size: int, is_read: bool) -> None:
    (path := tmp_path / "error.json").write_bytes(b'{"message": "torn apart"}'.ljust(size))
    assert (reports.read_error_file(path, 0) is not None) == is_read


@pytest.mark.parametrize(("size", "is_taken"), [(60_000, True), (60_001, False)])
def test_a_report_of_a_rank_has_at_most_60000_bytes(size: int, is_taken: bool) -> None:
    report = reports.parse_datagram(b'{"event": "step", "rank": 0, "step": 1}'.ljust(size))
    assert ("longer than 60000 bytes" not in str(report)) == is_taken


def test_the_socket_asks_for_four_mebibytes_of_the_eight_that_macos_grants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Socket(socket.socket):
        def setsockopt(self, *option: Any) -> None:
            asked.append(option[2])
            super().setsockopt(*option)

    monkeypatch.setattr(reports.socket, "socket", Socket)
    monkeypatch.chdir(tmp_path)  # (a socket's path is short)
    reports.ReportSocket(Path()).close()
    assert asked == [4 * MIB]


@pytest.mark.parametrize(("size", "is_known"), [(16 * MIB, True), (16 * MIB + 1, False)])
def test_a_program_of_more_than_16_mebibytes_is_not_compared(tmp_path: Path, size: int, is_known: bool) -> None:
    sparse(tmp_path / "a.py", size)
    assert (look(Find("1", ("a.py",), str(tmp_path)), 0).digest != "") == is_known


@pytest.mark.parametrize(("size", "is_looked_at"), [(4 * MIB, True), (4 * MIB + 1, False)])
def test_a_line_of_a_script_of_more_than_four_mebibytes_is_not_looked_at(tmp_path: Path, size: int, is_looked_at: bool) -> None:
    (tmp_path / "train.py").write_bytes(b"loss.item()\n".ljust(size, b"#"))
    lines = ["Current thread 0x1 (most recent call first):", f'  File "{tmp_path}/train.py", line 1 in step']
    assert dumped(1, 0, ProcessState("S"), lines, None).waits_for_others == is_looked_at


@pytest.mark.parametrize(("size", "is_full"), [(31 * MIB, False), (32 * MIB, True)])
def test_a_log_of_32_mebibytes_is_put_aside(tmp_path: Path, size: int, is_full: bool) -> None:
    folder = tmp_path / "logs/output"
    folder.mkdir(parents=True)
    sparse(folder / "node-1.log", size)
    Journal(make_run(run_dir=str(tmp_path)), 1, lambda line: None).close(5)
    assert (folder / "node-1.log.1").exists() == is_full


@pytest.mark.parametrize(("backlog_bytes", "has_room"), [(4 * MIB - 1, True), (4 * MIB, False)])
def test_lines_of_ranks_wait_while_four_mebibytes_are_under_way(backlog_bytes: int, has_room: bool) -> None:
    nothing: Any = lambda *_: None  # noqa: E731
    link = Link(make_run(), KEY, 1, Handlers(nothing, nothing, nothing, nothing))
    link._channel = cast(Any, SimpleNamespace(backlog_bytes=backlog_bytes))
    assert link.has_room == has_room


def test_a_client_that_reads_nothing_has_four_mebibytes_written_and_the_rest_is_counted() -> None:
    written: list[bytes] = []
    unread = SimpleNamespace(get_write_buffer_size=lambda: sum(map(len, written)))
    made = ClientConnection(cast(Any, SimpleNamespace(is_closing=lambda: False, write=written.append, transport=unread)))
    for _ in range(10):
        made.show(("x" * MIB,))
    assert len(written) == 4
    written.clear()
    made.show(("last",))
    assert json.loads(written[0])["lines"][0].startswith("[lockstep] 6 lines left out")


def test_who_waits_for_ranks_that_print_nothing_hears_why_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []

    def select(sources: Any, *others: Any) -> Any:
        looks.append(others[-1])
        return sources[:1] if len(looks) == 3 else [], [], []

    answer = b'{"exitCode": 0, "message": ""}\n'
    monkeypatch.setattr(client, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(client, "signal", SimpleNamespace(signal=lambda *_: None, set_wakeup_fd=lambda *_: None, SIGINT=2))
    here: Any = SimpleNamespace(sendall=lambda data: None, recv=lambda size: answer)
    assert client.Conversation(here, until_eof=False).hold({"verb": "run"}) == 0
    assert [line.split("for ")[1][:4] for line in capsys.readouterr().err.splitlines()] == ["10 s", "20 s"]


@pytest.mark.parametrize(("characters", "is_used"), [(60, True), (61, False)])
def test_sockets_are_in_a_folder_whose_path_has_at_most_60_characters(
    monkeypatch: pytest.MonkeyPatch, characters: int, is_used: bool
) -> None:
    monkeypatch.setenv("TMPDIR", folder := "/".ljust(characters, "x"))
    assert str(main._temporary()) == (folder if is_used else "/tmp")  # noqa: S108 (nothing is written)


def test_of_what_a_trainer_measures_the_last_24_metrics_are_taken() -> None:
    metrics = [{"name": f"m{number}", "value": number} for number in range(40)]
    status = parse_status(json.dumps({"trainerStatus": {"metrics": metrics}}).encode())
    assert list(status.metrics) == [f"m{number}" for number in range(16, 40)]


def test_a_rank_is_asked_for_its_stacks_by_the_sixth_signal_from_the_end_and_answers_into_a_file_above_200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[tuple[int, int]] = []
    monkeypatch.setattr(faulthandler, "register", lambda number, file, all_threads: answers.append((number, file)))
    rankstart.can_be_asked()
    for _, descriptor in answers:
        os.close(descriptor)
    assert [(signal.SIGRTMAX - number, descriptor // 100) for number, descriptor in answers] == [(5, 2)]


@pytest.mark.parametrize(("frames", "waits"), [(11, True), (12, False)])
def test_a_collective_operation_is_looked_for_in_the_twelve_innermost_frames(frames: int, waits: bool) -> None:
    innermost = [f'  File "/site-packages/torch/nn/m.py", line {number} in f' for number in range(frames)]
    lines = ["Current thread 0x1 (most recent call first):", *innermost, '  File "/torch/distributed/x.py", line 1 in all_reduce']
    assert dumped(1, 0, ProcessState("S"), lines, None).waits_for_others == waits
