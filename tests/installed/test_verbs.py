"""Every verb of the reference, typed in an empty folder where the wheel is all there is of Lockstep."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import typer.main

from installed.stories import STORIES
from installed.typed import BESIDE, Ended, Installed, Story, refused
from lockstep.cli.main import app
from reference.verbs import commands

VERBS = {" ".join(words) for words, _ in commands(typer.main.get_command(app), [])}
TYPED = [pytest.param(story, lock, id=f"{story.name}-{lock}") for story in STORIES for lock in story.locks]
ELSEWHERE = {"launch", "join", "model get"}
"""Verbs that other tests of this folder type, since they need one another or a server."""


@pytest.mark.parametrize(("story", "lock"), TYPED)
def test_each_line_does_its_work_or_ends_in_one_sentence(story: Story, lock: str, ended: Callable[[Story, str], Ended]) -> None:
    end = ended(story, lock)
    for line, done in end.typed:
        line.check(done, end.here)
    assert len(end.typed) == len(story.lines)
    assert end.changed == list(story.changes)


BESIDE_SENTENCES = (
    "lockstep: /usr/bin/python3 has no torch: going on with /cache/full/0123/venv/bin/python",
    "lockstep: installing the packages of full.lock into /cache (fetches up to 3.2 GB, takes 6.6 GB of 50.0 GB)",
    "lockstep: another process installs packages into /cache: waiting until it has ended",
    "lockstep: files in /cache can't be locked (No locks available): going on without, beside others that may install the same",
    "lockstep: stop on lab, namespace team",
    "lockstep: run in workspace .lockstep/workspace",
    "lockstep: 2 nodes are asked for, and even when idle none of the cluster's 1 could take a pod",
    "note: lab has one node",
    "warning: Placeholder",
    "… importing torch, 3 s",
    "  - spec.nodes: must be 1 or more",
)


@pytest.mark.parametrize(("pattern", "line"), [*zip(BESIDE, BESIDE_SENTENCES, strict=True)])
def test_lines_beside_a_sentence_are_told_from_it(pattern: str, line: str) -> None:
    assert re.fullmatch(pattern, line)
    done = subprocess.CompletedProcess([], 2, "", f"{line}\nlockstep: it lacks a file\n")
    refused("run", "it lacks a file").check(done, Path())
    with pytest.raises(AssertionError, match="lacks"):
        refused("run", "it lacks a file").check(subprocess.CompletedProcess([], 2, "", f"odd {line}\nlockstep: it lacks a file\n"), Path())


def test_a_refusal_without_its_sentence_is_no_line() -> None:
    with pytest.raises(AssertionError, match="which sentence"):
        refused("run", "")


def test_every_verb_is_typed() -> None:
    lines = [line.words.split() for story in STORIES for line in story.lines if line.program == "lockstep"]
    typed = {" ".join(words[:number]) for words in lines for number in (1, 2, 3)}
    assert sorted(VERBS - typed - ELSEWHERE) == []


def test_the_code_is_the_wheel_s(environments: Mapping[str, Installed], tmp_path: Path) -> None:
    program = (
        "import lockstep, lockstep_gang, lockstep_spec, lockstep_train; print(lockstep.__file__, lockstep_gang.__file__,"
        " lockstep_train.__file__)"
    )
    for installed in environments.values():
        command = installed.command("python", "-c", program)
        done = subprocess.run(command, cwd=tmp_path, env=installed.variables(tmp_path), capture_output=True, text=True, check=True)
        assert all(Path(file).is_relative_to(installed.folder) for file in done.stdout.split())
