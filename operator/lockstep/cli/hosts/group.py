"""`lockstep hosts`: check and ready the machines of a cluster file that ssh reaches. One module a verb."""

from __future__ import annotations

import typer

from lockstep.cli.hosts import check, setup

app = typer.Typer(help="Check machines that you reach over ssh, and set them up.", no_args_is_help=True)
app.command("check")(check.check)
app.command("setup")(setup.setup)
