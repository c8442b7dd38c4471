"""`lockstep hosts`: ready the machines of a cluster file that ssh reaches. One module a verb."""

from __future__ import annotations

import typer

from lockstep.cli.hosts import setup

app = typer.Typer(help="Machines that you reach over ssh: ready them for jobs.", no_args_is_help=True)
app.command("setup")(setup.setup)


@app.callback()
def hosts() -> None:
    """Keep the group a group while it has one verb."""
