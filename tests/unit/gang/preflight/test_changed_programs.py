"""A restart that finds another program than the attempt before it ran: it goes on, and says so, unless another folder sent it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.ranks.script import program_fact
from lockstep_gang.contract.messages import Started
from lockstep_gang.contract.preflight import Check, Checked, Expected, Looked, Met, ProgramFact
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.coordinator.log_lines import preflight_lines
from lockstep_gang.lifecycle.history import begun_records, resume_gang
from lockstep_spec.codec import from_json, to_json
from lockstep_spec.senders import SOURCES
from unit.gang.cases import make_run
from unit.gang.story import Story, all_stopped, hello

RUN = make_run(preflight=Expected(), restart=RestartPolicy(3, 0))
A, B = ("laptop:/home/ada/a",), ("laptop:/home/ada/b",)


def looks(story: Story, *programs: ProgramFact | None) -> Story:
    """Every node answers a preflight; node N has the Nth program, or the last."""
    for part in ("looked", "met"):
        for node, state in enumerate(story.gang.nodes):
            if isinstance(state.last_order, Check):
                looked = Looked(port=4000, program=programs[min(node, len(programs) - 1)])
                story.hears(node, Checked(state.last_order.round, **{part: looked if part == "looked" else Met()}))
    return story


def restarted(first: ProgramFact | None, *second: ProgramFact | None, anew: bool = False) -> Story:
    """A job whose first attempt failed, as its second one is to start. `anew`: by another coordinator, which reads the records."""
    story = Story(RUN)
    for node in range(2):
        story.hears(node, hello(node))
    looks(story, first)
    assert story.report.attempt == 1
    if anew:
        record = begun_records([], story.gang, RUN, "2026-01-01T00:00:00Z")[-1]
        stored = from_json(type(record), json.loads(json.dumps(to_json(record))), "attempts.jsonl")
        story = Story(RUN, resume_gang(RUN, [stored], None, story.now))
        for node in range(2):
            story.hears(node, hello(node))
        story.waits(10.0)
    else:
        for node in range(2):
            story.hears(node, Started(1))
        all_stopped(story.exits(1, 1))
    return looks(story, *second)


def program(text: str, senders: tuple[str, ...] = ()) -> ProgramFact:
    return ProgramFact("/workspace/main.py", hashlib.sha256(text.encode()).hexdigest(), senders)


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (program("a", A), program("a", A), None),
        (program("a", A), program("a", (*A, *B)), None),
        (program("a", A), program("b", A), f"than the last attempt ran: it was sent from {A[0]}"),
        (program("a", A), program("b", ()), "than the last attempt ran: it was changed by an editor or another tool there"),
        (program("a"), program("b"), "than the last attempt ran: it was changed by an editor or another tool there"),
        (program("a"), program("b", B), f"it was sent from {B[0]}"),
        (None, program("b", B), None),
        (program("a", A), None, None),
    ],
)
def test_the_same_folder_s_or_an_edited_program_runs_and_is_named(first: Any, second: Any, words: str | None, anew: bool) -> None:
    story = restarted(first, second, anew=anew)
    assert story.report.attempt == 2
    lines = [line for line in preflight_lines(story.report.preflight) if "another program" in line]
    assert len(lines) == (0 if words is None else 2) and all(words in line for line in lines if words)


@pytest.mark.parametrize("anew", [False, True])
def test_another_folder_s_program_is_not_started(anew: bool) -> None:
    story = restarted(program("a", A), program("b", B), anew=anew)
    assert (story.report.state, story.report.attempt, story.report.failure.cause) == (State.FAILED, 1, Cause.SETUP)
    message = story.report.failure.message
    assert "/workspace/main.py on node 0 is another program than the last attempt ran" in message
    assert f"that one was sent from {A[0]}, and this one sent from {B[0]}" in message and "lockstep retry x" in message


def test_a_node_whose_program_differs_from_node_0_s_is_named() -> None:
    story = Story(RUN)
    for node in range(2):
        story.hears(node, hello(node))
    looks(story, program("a"), program("b"))
    assert story.report.attempt == 1
    assert [finding.message for finding in story.report.preflight.findings] == ["/workspace/main.py on node 1 differs from node 0's"]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("python3", "main.py", "x" * 5000), "main.py"),
        (("python3", "/FOLDER/main.py"), "main.py"),
        (("python3", "-m", "pkg.tool", "main.py"), "pkg/tool.py"),
        (("bash", "-x", "run.sh", "main.py"), "run.sh"),
        (("./run.sh",), "run.sh"),
        (("python3", "-m", "torch.utils.collect_env"), None),
        (("nvidia-smi", "-L"), None),
        (("bash", "-c", "python3 main.py", "run.sh"), None),
        (("tool", "--config", "conf.yaml"), None),
    ],
)
def test_the_program_is_the_file_that_the_command_names(tmp_path: Path, command: tuple[str, ...], found: str | None) -> None:
    volume = tmp_path / "volume"
    for name in ("main.py", "pkg/tool.py", "run.sh", "conf.yaml"):
        (volume / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / "mine" / name).write_text(name)
    (volume / SOURCES).parent.mkdir()
    (volume / SOURCES).write_text(json.dumps({f"mine/{found}": A[0], "other": B[0]}))
    fact = program_fact([word.replace("/FOLDER", str(volume / "mine")) for word in command], str(volume / "mine"))
    expected = None if found is None else ProgramFact(str(volume / "mine" / found), hashlib.sha256(found.encode()).hexdigest(), A)
    assert fact == expected


def test_a_record_that_is_damaged_names_nobody(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text("")
    (tmp_path / SOURCES).parent.mkdir()
    for text in ("[", "[]", '{"main.py": 3}', '{"main.py": [[], null]}', "\udcff"):
        (tmp_path / SOURCES).write_text(text, errors="surrogateescape")
        fact = program_fact(["python3", "main.py"], str(tmp_path))
        assert fact is not None and replace(fact, digest="") == ProgramFact(str(tmp_path / "main.py"), "")
