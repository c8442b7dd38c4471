"""`lockstep help`: topics that no verb has to itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from lockstep.platforms.output import put_text

FOLDER = Path(__file__).resolve().parent / "topics"
TOPICS = ("cluster-files", "job-files", "exit-codes", "words")


def help_of(
    context: typer.Context,
    about: Annotated[list[str] | None, typer.Argument(help=f"A topic ({', '.join(TOPICS)}) or a verb. Default: the front page.")] = None,
) -> None:
    """Explain a topic or a verb.

    Topics are cluster-files, job-files, exit-codes, and words: what kubectl, SkyPilot and dstack call a verb.

    Example: lockstep help job-files
    """
    words = list(about or ())
    if len(words) == 1 and words[0] in TOPICS:
        put_text((FOLDER / f"{words[0]}.txt").read_text())
        return
    try:
        put_text(_page(context.parent, [word for word in words if not word.startswith("-")]) + "\n")
    except TyperException as error:
        if len(words) == 1 and error.message.endswith(f"{words[0]!r}."):
            error.message += f" Topics: {', '.join(TOPICS)}."
        raise


def _page(root: Any, words: list[str]) -> str:
    """Help page of the verb that these words name. Raises a usage error where there is none."""
    command, context = root.command, root
    for word in words:
        if not hasattr(command, "resolve_command"):
            context.fail(f"{context.info_name} has no verb {word}")
        name, command, _ = command.resolve_command(context, [word])
        context = typer.Context(command, info_name=name, parent=context)
    return str(command.get_help(context)).rstrip("\n")
