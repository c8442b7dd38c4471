"""Every verb has a help page with an example, and every argument and option says what it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from lockstep.cli.main import app
from lockstep.cli.reference import commands
from unit.cli.test_every_verb import run

VERBS = list(commands(typer.main.get_command(app), ["lockstep"]))


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[" ".join(path) for path, _ in VERBS])
def test_a_verb_explains_itself_with_an_example_of_its_own(path: list[str], command: Any) -> None:
    example = re.search(r"^Example: (.*)$", command.help or "", re.MULTILINE)
    assert example is not None, "no example"
    assert " ".join(path) in example[1]
    untold = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert untold == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("get --nope", "No such option: --nope; lockstep get --help shows what it takes"),
        ("get x -o xyz", "Invalid value for '-o' / '--output': 'xyz' is not one of 'table', 'wide', 'json', 'yaml', 'name'; lockstep get --help shows what it takes"),
        ("scale", "Missing argument 'job'; lockstep scale --help shows what it takes"),
        ("validate", "Missing option '-f' / '--file'; lockstep validate --help shows what it takes"),
        ("checkpoint nope x", "No such command 'nope'; lockstep checkpoint --help shows what it takes"),
        ("gett", "No such command 'gett'. Did you mean 'get'?"),
        ("ls", "No such command 'ls': lockstep get shows jobs, lockstep cluster list shows cluster files"),
        ("cluster list", "No such command 'list': lockstep cluster list"),
        ("help", "No such command 'help': lockstep --help, or lockstep VERB --help"),
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

    monkeypatch.setattr("lockstep.cli.clusters.clusters.list_clusters", asks)
    assert run(monkeypatch, ["clusters"]) == 1
    assert capsys.readouterr().err == "Aborted.\n"
