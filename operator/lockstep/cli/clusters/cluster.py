"""`lockstep cluster`: what is about a cluster, and no job."""

from __future__ import annotations

import typer

from lockstep.cli.clusters import calibrate, clean, clusters, discover, lint, overview

app = typer.Typer(help="Describe clusters, check, measure, and clean them up.", no_args_is_help=True)
app.command("list")(clusters.list_clusters)
app.command("status")(overview.status)
app.command("discover")(discover.discover)
app.command("lint")(lint.lint)
app.command("calibrate")(calibrate.calibrate)
app.command("rollback")(clean.rollback)
app.command("clean")(clean.clean)
app.command("uninstall")(clean.uninstall)
