"""Whether the ranks' own Python has the trainer: asked of real interpreters, and judged before other nodes are waited for."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lockstep_spec
from lockstep_gang.agent.preflight.answers import ask_trainer
from lockstep_gang.agent.preflight.programs import Programs
from lockstep_gang.contract.placewords import IN_PODS
from lockstep_gang.contract.preflight import LOCKSTEP, Checked, Expected, Looked, Met
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import HostPlace, Run
from lockstep_gang.lifecycle.gang import Phase
from lockstep_spec import VERSION
from support.checkout import ROOT
from unit.gang.cases import make_run
from unit.gang.story import Story, hello

TRAINER = ("-m", "lockstep_train")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python without any package, as an image that nothing here built has it."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin/python")


def asked(folder: Path, command: Sequence[str], **changes: Any) -> tuple[str | None, str]:
    """The version of the node's trainer, and why its ranks can't run."""
    return asyncio.run(ask_trainer(make_run(command=tuple(command), working_directory=str(folder), preflight=Expected(), **changes)))


def test_a_python_without_the_trainer_is_found_by_its_own_words(bare: str, tmp_path: Path) -> None:
    assert asked(tmp_path, (bare, *TRAINER)) == (None, "No module named 'lockstep_spec'")


def test_a_python_with_it_tells_its_version(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "workspace"), os.environ.get("PYTHONPATH", "")])
    assert asked(tmp_path, (sys.executable, *TRAINER), environment={"PYTHONPATH": path}) == (VERSION, "")


def test_a_trainer_in_the_folder_that_ranks_work_in_counts_and_one_of_an_old_version_states_none(bare: str, tmp_path: Path) -> None:
    for name in ("lockstep_spec", "lockstep_train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    assert asked(tmp_path, (bare, *TRAINER)) == ("", "")


@pytest.mark.parametrize("program", ["nothing-of-that-name", "/bin/false"])
def test_a_python_that_can_not_be_asked_stops_nothing(program: str, tmp_path: Path) -> None:
    assert asked(tmp_path, (program, *TRAINER)) == (None, "")


def test_a_script_and_a_job_without_preflight_are_not_asked(bare: str, tmp_path: Path) -> None:
    assert asked(tmp_path, (bare, "train.py")) == (None, "")
    assert asyncio.run(ask_trainer(make_run(command=(bare, *TRAINER), working_directory=str(tmp_path)))) == (None, "")


def job(nodes: int = 2, **changes: Any) -> Run:
    return make_run(nodes=nodes, command=("python3", *TRAINER), preflight=Expected(), **changes)


def test_a_node_whose_ranks_can_not_run_ends_the_job_before_the_others_are_there() -> None:
    story = Story(job(nodes=3))
    story.hears(0, hello(0))
    assert story.gang.phase is Phase.WAITING
    story.hears(1, replace(hello(1), unable="No module named 'lockstep_train'"))
    assert (story.report.state, story.report.attempt, story.records) == (State.FAILED, 0, ["end"])
    assert story.report.failure.cause is Cause.SETUP
    (finding,) = story.report.preflight.findings
    assert (finding.check, finding.node, finding.final, finding.fix) == ("trainer", 1, True, IN_PODS.trainer)
    assert "No module named 'lockstep_train'" in finding.message and "lockstep build trainer" in finding.fix
    assert (story.report.preflight.ok, story.report.preflight.checks) == (False, ("trainer",))


def test_a_node_that_comes_back_mended_takes_it_back_and_without_a_preflight_nothing_is_judged() -> None:
    story = Story(replace(job(), preflight=None))
    story.hears(0, replace(hello(0), unable="x"))
    assert (story.gang.unable, story.report.state is State.FAILED) == ((0, "x"), False)
    story.hears(0, replace(hello(0), instance="another"))
    assert story.gang.unable is None


@pytest.mark.parametrize(("version", "said"), [("0.0.9", "is of version 0.0.9"), ("", "is of version unknown"), (VERSION, ""), (None, "")])
@pytest.mark.parametrize("host", [None, HostPlace()])
def test_a_trainer_of_another_version_is_warned_of_and_trains(version: str | None, said: str, host: HostPlace | None) -> None:
    versions = {"python": "3"} | ({} if version is None else {LOCKSTEP: version})
    story = Story(job(host=host))
    for node in (0, 1):
        story.hears(node, hello(node))
    now = round(story.now * 1000)
    looked = Looked(port=4000, versions=versions, received_ms=now, sent_ms=now)
    for parts in ({"looked": looked}, {"met": Met()}):
        for node in (0, 1):
            story.hears(node, Checked(story.gang.preflight.round, **parts))
    report = story.report.preflight
    assert (report.ok, "trainer" in report.checks, story.report.attempt) == (True, True, 1)
    assert [said in finding.message for finding in report.findings] == ([True] if said else [])


def test_every_package_states_the_version_of_the_project() -> None:
    assert f'version = "{lockstep_spec.VERSION}"' in (ROOT / "pyproject.toml").read_text().splitlines()


def test_why_ranks_can_not_run_has_at_most_300_characters(tmp_path: Path) -> None:
    (program := tmp_path / "python").write_text(f"#!/bin/sh\necho '{json.dumps({'lacks': 'x' * 5000})}'\n")
    program.chmod(0o755)
    assert asked(tmp_path, (str(program), *TRAINER)) == (None, "x" * 300)


def test_of_what_a_program_writes_the_last_64_kibibytes_stay(tmp_path: Path) -> None:
    text = bytearray()
    asyncio.run(Programs(["sh", "-c", "head -c 200000 /dev/zero; echo end"], str(tmp_path)).run(text, os.environ))
    assert len(text) == 64 << 10 and text.endswith(b"end\n")
