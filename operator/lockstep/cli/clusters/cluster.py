"""`lockstep cluster`: know a cluster before jobs run on it. One module a verb."""

from __future__ import annotations

import typer

from lockstep.cli.clusters import calibrate, discover, gpus, init, lint, network

app = typer.Typer(help="Describe a cluster, check its file, measure its network.", no_args_is_help=True)
app.command("discover")(discover.discover)
app.command("import")(init.import_hosts)
app.command("lint")(lint.lint)
app.command("calibrate")(calibrate.calibrate)
app.command("topology")(network.topology)
app.command("gpus")(gpus.gpus)
