"""Every verb has a help page with an example, and every argument and option says what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from lockstep.cli import verbs
from lockstep.cli.main import app
from lockstep.cli.topics import FOLDER, TOPICS
from lockstep.cli.verbs import HINTS
from reference.verbs import cli_page, commands
from unit.cli.test_every_verb import run

VERBS = list(commands(typer.main.get_command(app), ["lockstep"]))


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[" ".join(path) for path, _ in VERBS])
def test_a_verb_explains_itself_with_an_example_of_its_own(path: list[str], command: Any) -> None:
    example = re.search(r"^Example: (.*)$", command.help or "", re.MULTILINE)
    assert example is not None, "no example"
    assert " ".join(path) in example[1]
    untold = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert untold == []


def test_the_page_of_all_verbs_names_the_values_that_a_parameter_takes() -> None:
    page = cli_page()
    assert "| `FAULT` | required | The fault to inject. One of: kill-rank, freeze-rank," in page
    assert "| text or json. |" in page, "values that the text names are not repeated"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("get --nope", "No such option: --nope; lockstep get --help shows what it takes"),
        ("run --render a.py", "No such option: --render: lockstep init job NAME --script writes a job file for a program"),
        ("diff -f job.yaml", "No such command 'diff': lockstep plan -f job.yaml shows what would change"),
        ("get x -o xyz", "Invalid value for '-o' / '--output': 'xyz' is not one of 'table', 'wide', 'json', 'yaml', 'name'; lockstep get"
                         " --help shows what it takes"),
        ("scale", "Missing argument 'job'; lockstep scale --help shows what it takes"),
        ("scale x --nodes 4", "No such option: --nodes: lockstep scale JOB NODES"),
        ("validate", "Missing option '-f' / '--file'; lockstep validate --help shows what it takes"),
        ("adapter nope x", "No such command 'nope'; lockstep adapter --help shows what it takes"),
        ("gett", "No such command 'gett'. Did you mean 'get'?"),
        ("statsu", f"No such command 'statsu': {HINTS['status']}"),
        ("help foo", "No such command 'foo'. Topics: cluster-files, job-files, exit-codes, words"),
        ("ls", "No such command 'ls': lockstep get shows jobs, lockstep cluster list shows cluster files"),
        ("cluster ls", "No such command 'ls': lockstep cluster list"),
        ("help gett", "No such command 'gett'. Did you mean 'get'?"),
        ("help get foo", "get has no verb foo; lockstep get --help shows what it takes"),
        ("help cluster nope", "No such command 'nope'; lockstep cluster --help shows what it takes"),
    ],
)  # fmt: skip
def test_what_can_t_be_understood_is_one_line_with_what_to_type(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, words.split()) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"lockstep: {said}\n")


def test_an_answer_that_is_no_is_told_in_a_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def asks() -> None:
        raise typer.Abort

    monkeypatch.setattr("lockstep.cli.clusters.doctor.doctor", asks)
    assert run(monkeypatch, ["doctor"]) == 1
    assert capsys.readouterr().err == "Aborted.\n"


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []], ids=repr)
def test_the_front_page_is_one_screen_that_names_every_verb(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, words) == (0 if words else 2)
    told = capsys.readouterr()
    page = (told.out or told.err).splitlines()
    assert len(page) <= 45 and max(map(len, page)) <= 80
    assert set(verbs.MODULES) - {"help"} == set(re.findall(r"[a-z-]+", "\n".join(page))) & set(verbs.MODULES) - {"help"}
    assert len(verbs.DAY) == 10 and set(verbs.MODULES) - {"help"} == {
        *verbs.DAY,
        *(verb for group in verbs.GROUPS.values() for verb in group),
    }


def groups(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from groups(inner, f"{path} {name}")


@pytest.mark.parametrize(("path", "command"), list(groups(typer.main.get_command(app), "lockstep"))[1:])
def test_a_verb_s_first_line_is_short(path: str, command: Any) -> None:
    first, _, rest = (command.help or "").partition("\n")
    assert 10 < len(first) <= 60 and first.endswith(".") and (not rest or rest.startswith("\n")), path


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_told_on_one_screen(topic: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, ["help", topic]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 80


def test_there_is_no_topic_that_help_does_not_name() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(TOPICS)
