"""Every verb has a help page with an example, and every argument and option says what it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer.main

from lockstep.cli.main import app
from lockstep.cli.reference import commands

VERBS = list(commands(typer.main.get_command(app), ["lockstep"]))


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[" ".join(path) for path, _ in VERBS])
def test_a_verb_explains_itself_with_an_example_of_its_own(path: list[str], command: Any) -> None:
    example = re.search(r"^Example: (.*)$", command.help or "", re.MULTILINE)
    assert example is not None, "no example"
    assert " ".join(path) in example[1]
    untold = [parameter.name for parameter in command.params if not getattr(parameter, "help", None)]
    assert untold == []
