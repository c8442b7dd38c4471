"""Output of ranks and the node's log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep_gang.agent.log import Console
from lockstep_gang.agent.ranks import relay as relay_module
from lockstep_gang.agent.ranks.relay import Relay, printable_bytes
from lockstep_gang.agent.ranks.reports import read_error_file

LINES_WAITING_MAX = 20_000
LAST_LINE_CHARACTERS = 1000
LAST_LINES = 20


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain \xc3\xbc\ttab", "plain ü\ttab"),
        (b"\xff\xfe", r"\xff\xfe"),
        (b"\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\x9b2J".encode(), r"\x9b2J"),
        (b"\x00", r"\x00"),
        (b"a\rb", r"a\x0db"),
    ],
)
def test_only_printable_text_is_passed_on(raw: bytes, text: str) -> None:
    assert printable_bytes(raw) == text


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_lines_are_the_same_however_the_bytes_come(size: int) -> None:
    data, lines = b"one\ntwo\rthree\r\n\nfour", list[str]()
    relay = Relay(3, lines.append)
    for start in range(0, len(data), size):
        relay.feed(data[start : start + size])
    relay.finish()
    assert lines == [f"[rank 3] {word}" for word in ("one", "two", "three", "four")]


def test_colors_are_no_part_of_a_line() -> None:
    lines: list[str] = []
    relay = Relay(3, lambda line, *_: lines.append(line))
    relay.feed(b"\x1b[1;35mKeyError\x1b[0m: \x1b[35m'label'\x1b[0m\x1b[K\n")
    assert (lines, relay.last_lines) == (["[rank 3] KeyError: 'label'"], ["KeyError: 'label'"])


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (b"\x1b[1;34mwandb\x1b[0m: run \xc3\xa9", "\x1b[1;34mwandb\x1b[0m: run \xe9\x1b[0m"),
        (b"\x1b[31mred, never ended\x1b[K", "\x1b[31mred, never ended\x1b[0m"),
        (b"\x1b[31ma\x1b[2Jb\x1b]0;title\x07c\x1b[5;5Hd\x1bce\x9b2J",
            "\x1b[31ma\\x1b[2Jb\\x1b]0;title\\x07c\\x1b[5;5Hd\\x1bce\\x9b2J\x1b[0m"),
        (b"\\x1b[31m is text", "\\x1b[31m is text"),
    ],
)  # fmt: skip
def test_a_terminal_gets_colors_and_nothing_else_that_it_acts_on(raw: bytes, shown: str) -> None:
    written: list[tuple[str, ...]] = []
    relay = Relay(3, lambda *texts: written.append(texts))
    relay.feed(raw + b"\n")
    ((plain, *colored),) = written
    assert colored == ([f"[rank 3] {shown}"] if shown.endswith("\x1b[0m") else [])
    assert "\x1b" not in plain and plain == f"[rank 3] {relay.last_lines[0]}"


BAR = b"\r".join(b"%3d%%|####| %d/30" % (n * 100 // 30, n) for n in range(31))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_of_a_progress_bar_its_first_and_last_state_and_one_now_and_then_are_lines(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, now = list[str](), 100.0
    monkeypatch.setattr(relay_module.time, "monotonic", lambda: now)
    relay = Relay(0, lines.append)
    data = b"start\n\r" + BAR + b"\nend\n"
    for start in range(0, len(data), size):
        relay.feed(data[start : start + size])
    assert lines == [f"[rank 0] {line}" for line in ("start", "  0%|####| 0/30", "100%|####| 30/30", "end")]
    lines.clear()
    for second in range(21):
        now = 200.0 + second
        relay.feed(b"\r%d s" % second)
    relay.finish()
    assert [line.removeprefix("[rank 0] ") for line in lines] == ["0 s", "10 s", "20 s"]


def test_a_bar_that_is_cut_off_leaves_its_last_state_and_no_room_for_old_ones() -> None:
    lines = list[str]()
    relay = Relay(0, lines.append)
    relay.feed(BAR + b"\r")
    relay.finish()
    assert lines == ["[rank 0]   0%|####| 0/30", "[rank 0] 100%|####| 30/30"]
    assert relay.last_lines == ["  0%|####| 0/30", "100%|####| 30/30"]


def test_the_last_twenty_lines_are_kept_and_cut() -> None:
    relay = Relay(0, lambda line: None)
    relay.feed(b"".join(b"%d\n" % n for n in range(100)) + b"x" * 5000 + b"\n")
    assert list(relay.last_lines) == [*(str(n) for n in range(81, 100)), "x" * LAST_LINE_CHARACTERS]


TIMED_OUT = b"[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"
STACKS = b"Fatal Python error: Aborted\n" + b'  File "train.py", line 1 in step\n' * 100


def test_what_told_of_a_timeout_is_kept_before_the_stacks_of_the_crash_that_follows() -> None:
    relay = Relay(1, lambda line: None)
    relay.feed(TIMED_OUT + b"\n" + b"frame #1\n" * 30 + STACKS)
    assert len(relay.last_lines) == LAST_LINES
    assert relay.last_lines[0] == TIMED_OUT.decode()


def test_a_timeout_that_the_rank_survived_is_forgotten() -> None:
    relay = Relay(1, lambda line: None)
    relay.feed(TIMED_OUT + b"\n" + b"goes on\n" * 30)
    assert set(relay.last_lines) == {"goes on"}


def test_a_log_that_nobody_reads_holds_nothing_up_and_says_what_is_missing() -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end)
    for number in range(LINES_WAITING_MAX * 2):
        console.write(f"line {number} {'x' * 60}")  # far more than the pipe holds
    assert console.tail()[-1].startswith(f"line {LINES_WAITING_MAX * 2 - 1} ")
    with os.fdopen(read_end, "rb") as stream:
        text = b""
        while b"lines left out" not in text and b"line 39999 " not in text:
            text += stream.read1()
        console.close(5)
    os.close(write_end)
    assert text.startswith(b"line 0 ") and b"line 39999 " not in text


@pytest.mark.parametrize(
    ("content", "exception", "message"),
    [
        ('{"message": {"message": "ValueError: bad: very", "extraInfo": {"py_callstack": "a\\nb"}}}', "ValueError", "bad: very"),
        ('{"message": "torn apart"}', "Error", "torn apart"),
        ('{"message": {"message": "CUDA error: x"}}', "Error", "CUDA error: x"),
    ],
)
def test_torch_s_error_file_is_understood(tmp_path: Path, content: str, exception: str, message: str) -> None:
    (tmp_path / "error.json").write_text(content)
    error = read_error_file(tmp_path / "error.json", 2)
    assert (error.rank, error.exception, error.message) == (2, exception, message)


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense", '{"other": 1}'])
def test_an_error_file_that_says_nothing_is_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content)
    assert read_error_file(tmp_path / "error.json", 0) is None


def test_a_rank_without_an_error_file_said_nothing(tmp_path: Path) -> None:
    assert read_error_file(tmp_path / "none.json", 0) is None


def test_a_report_has_the_last_hundred_lines() -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end)
    for number in range(150):
        console.write(f"line {number}")
    console.close(5)
    assert console.tail() == tuple(f"line {number}" for number in range(50, 150))
    os.close(read_end)
    os.close(write_end)
