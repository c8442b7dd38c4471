"""`lockstep`: the command line. One module a verb; this one only puts them together.

Exit codes: 0 done, 1 it failed (the job, the cluster, a check), 2 what was written or asked can't be used, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.cli import (
    adapter,
    build,
    checkpoint,
    clean,
    cluster,
    clusters,
    cp,
    delete,
    deploy,
    devcluster,
    diff,
    diff_runs,
    doctor,
    drill,
    editor,
    generate,
    get,
    init,
    logs,
    overview,
    plan,
    preflight,
    quickstart,
    render,
    retry,
    run,
    scale,
    shell,
    suspend,
    sync,
    top,
    validate,
    version,
    why,
)
from lockstep.cli.failures import told

app = typer.Typer(
    name="lockstep",
    help="Multi-node DeepSpeed fine-tuning on your own Kubernetes, OpenShift or bare-metal GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could show secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart", rich_help_panel="Start")(quickstart.quickstart)
app.add_typer(init.app, name="init", rich_help_panel="Start")
app.command("validate", rich_help_panel="A job")(validate.validate)
app.command("render", rich_help_panel="A job")(render.render)
app.command("plan", rich_help_panel="A job")(plan.plan)
app.command("preflight", rich_help_panel="A job")(preflight.preflight)
app.command("run", rich_help_panel="A job", context_settings={"allow_interspersed_args": False})(run.run)
app.command("diff", rich_help_panel="A job")(diff.diff)
app.command("diff-runs", rich_help_panel="A job")(diff_runs.diff_runs)
app.command("logs", rich_help_panel="A job")(logs.logs)
app.command("top", rich_help_panel="A job")(top.top)
app.command("get", rich_help_panel="A job")(get.get)
app.command("describe", rich_help_panel="A job")(get.describe)
app.command("why", rich_help_panel="A job")(why.why)
app.command("drill", rich_help_panel="A job")(drill.drill)
app.command("events", rich_help_panel="A job")(get.events)
app.command("wait", rich_help_panel="A job")(get.wait)
app.command("suspend", rich_help_panel="A job")(suspend.suspend)
app.command("resume", rich_help_panel="A job")(suspend.resume)
app.command("stop", rich_help_panel="A job")(suspend.stop)
app.command("retry", rich_help_panel="A job")(retry.retry)
app.command("sync", rich_help_panel="A job")(sync.sync)
app.command("cp", rich_help_panel="A job")(cp.cp)
app.command("generate", rich_help_panel="A job")(generate.generate)
app.command("shell", rich_help_panel="A job")(shell.shell)
app.command("jupyter", rich_help_panel="A job")(editor.jupyter)
app.command("tensorboard", rich_help_panel="A job")(editor.tensorboard)
app.command("vscode", rich_help_panel="A job")(editor.vscode)
app.command("debug", rich_help_panel="A job")(editor.debug)
app.command("scale", rich_help_panel="A job")(scale.scale)
app.command("delete", rich_help_panel="A job")(delete.delete)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel="A job")
app.add_typer(adapter.app, name="adapter", rich_help_panel="A job")
app.command("clusters", rich_help_panel="Clusters")(clusters.list_clusters)
app.add_typer(cluster.app, name="cluster", rich_help_panel="Clusters")
app.command("doctor", rich_help_panel="Clusters")(doctor.doctor)
app.command("deploy", rich_help_panel="Clusters")(deploy.deploy)
app.command("status", rich_help_panel="Clusters")(overview.status)
app.command("rollback", rich_help_panel="Clusters")(clean.rollback)
app.command("clean", rich_help_panel="Clusters")(clean.clean)
app.command("uninstall", rich_help_panel="Clusters")(clean.uninstall)
app.command("build", rich_help_panel="Clusters")(build.build)
app.command("version", rich_help_panel="Clusters")(version.version)
app.add_typer(devcluster.app, name="devcluster", rich_help_panel="Clusters")


def print_version(asked: bool) -> None:
    if asked:
        typer.echo(version.own_version())
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Multi-node DeepSpeed fine-tuning on your own Kubernetes, OpenShift or bare-metal GPU cluster."""


def main() -> int:
    try:
        app()
    except Exception as error:
        known = told(error)
        if known is None:
            raise
        print(f"lockstep: {known[1]}", file=sys.stderr)
        return known[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
