"""Page docs/reference/cli.md: every verb's help, from the verbs themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import EnumType
from typing import Any

import typer.main
from typer import Context
from typer.core import TyperGroup, TyperOption

from lockstep.cli.main import app
from lockstep.cli.shared.places import PLACES, place_rows

HEADER = """# Command line

Generated from the verbs: `lockstep VERB --help` says the same. `kubectl lockstep VERB` and `oc lockstep VERB` work, too, if the command
is on the PATH.

Exit codes: 0 done; 1 it failed (the job, the cluster, a check); 2 the input can't be used, and nothing was changed; 130 you pressed
Ctrl-C; 143 the verb got SIGTERM; 129 the terminal was closed. An interrupted verb cleans up first.

## Where a verb acts

These options may stand before the verb or after it. The last line of a verb's section names those that it takes. Without `--cluster`, a
job file's own cluster counts, then [the one in use](../how-to/install.md#which-cluster-counts), then `local`.

| | |
|---|---|
"""


def cli_page() -> str:
    root = typer.main.get_command(app)
    places = [f"| `{option}` | {text} |\n" for option, text in place_rows(root).items()]
    return HEADER + "".join(places) + "".join(_section(path, command) for path, command in commands(root, ["lockstep"]))


def commands(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    """(words to type, command) of every verb below."""
    if not isinstance(command, TyperGroup):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, [*path, name])


def _section(path: list[str], command: Any) -> str:
    with Context(command, info_name=" ".join(path)) as context:
        usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"\n## {' '.join(path)}\n", f"\n```\n{' '.join(path)} {usage}\n```\n", f"\n{_text(command)}\n"]
    rows = [_row(parameter) for parameter in command.params if parameter.name != "help" and not getattr(parameter, "hidden", False)]
    if rows:
        lines += ["\n| | default | |\n|---|---|---|\n", *rows]
    if takes := getattr(command, "takes", ()):
        lines.append(f"\nWhere: {', '.join(f'`{PLACES[name]}`' for name in takes)}\n")
    return "".join(lines)


def _text(command: Any) -> str:
    """The help page's words; the example as code."""
    paragraphs = (command.help or "").strip().split("\n\n")
    shown = [f"`{p.strip().removeprefix('Example: ')}`" if p.strip().startswith("Example: ") else " ".join(p.split()) for p in paragraphs]
    return "\n\n".join(shown)


def _row(parameter: Any) -> str:
    if isinstance(parameter, TyperOption):
        names, text = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)), parameter.help or ""
    else:
        names, text = f"`{(parameter.name or '').upper()}`", getattr(parameter, "help", "") or ""
    default = parameter.default
    value = (
        "required"
        if parameter.required
        else ""
        if default in (None, False) or callable(default)
        else f"`{getattr(default, 'value', default)}`"
    )
    return f"| {names} | {value} | {text}{_choices(parameter, text)} |\n".replace("||", "|  |")


def _choices(parameter: Any, text: str) -> str:
    """Values that a parameter takes, where its text doesn't name them all. `--help` shows them in the place of a type."""
    kind = parameter.type_descriptor.annotation
    choices: Iterable[Any] = kind if isinstance(kind, EnumType) else ()
    values = [str(choice.value) for choice in choices]
    return "" if all(re.search(rf"\b{re.escape(value)}\b", text) for value in values) else f" One of: {', '.join(values)}."
