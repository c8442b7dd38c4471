"""`lockstep`: the command line. One module a verb; this one only puts them together.

Exit codes: 0 done, 1 it failed (the job, the cluster, a check), 2 what was written or asked can't be used, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from types import TracebackType
from typing import Annotated, Any

import typer

from lockstep.cli.consoles import is_plain
from lockstep.cli.failures import told
from lockstep.platforms.output import put, put_text

VERBS = {
    "Start": {
        "quickstart": "quickstart.quickstart",
        "init": "init.app",
    },
    "A job": {
        "validate": "validate.validate",
        "render": "render.render",
        "plan": "plan.plan",
        "preflight": "preflight.preflight",
        "run": "run.run",
        "diff": "diff.diff",
        "diff-runs": "diff_runs.diff_runs",
        "logs": "logs.logs",
        "top": "top.top",
        "get": "get.get",
        "describe": "get.describe",
        "why": "why.why",
        "drill": "drill.drill",
        "events": "get.events",
        "wait": "get.wait",
        "suspend": "suspend.suspend",
        "resume": "suspend.resume",
        "stop": "suspend.stop",
        "retry": "retry.retry",
        "sync": "sync.sync",
        "cp": "cp.cp",
        "generate": "generate.generate",
        "shell": "shell.shell",
        "jupyter": "editor.jupyter",
        "tensorboard": "editor.tensorboard",
        "vscode": "editor.vscode",
        "debug": "editor.debug",
        "scale": "scale.scale",
        "delete": "delete.delete",
        "checkpoint": "checkpoint.app",
        "adapter": "adapter.app",
    },
    "Clusters": {
        "clusters": "clusters.list_clusters",
        "cluster": "cluster.app",
        "doctor": "doctor.doctor",
        "deploy": "deploy.deploy",
        "status": "overview.status",
        "rollback": "clean.rollback",
        "clean": "clean.clean",
        "uninstall": "clean.uninstall",
        "build": "build.build",
        "version": "version.version",
        "devcluster": "devcluster.app",
    },
}
"""By the help page's panels: verb → module of this package, and the function or group of verbs in it."""
ALL = tuple(verb for known in VERBS.values() for verb in known)


def app_of(verbs: Iterable[str]) -> typer.Typer:
    """The command with these verbs only. Others' modules are not imported: all of them take as long as a small verb does."""
    app = typer.Typer(
        name="lockstep",
        help="Multi-node DeepSpeed fine-tuning on your own Kubernetes or OpenShift GPU cluster.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # a traceback with local variables could show secrets
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    wanted = set(verbs)
    for panel, known in VERBS.items():
        for verb in known:
            if verb in wanted:
                _add(app, verb, panel, known[verb])
    return app


def _add(app: typer.Typer, verb: str, panel: str, where: str) -> None:
    module, _, name = where.partition(".")
    found = getattr(import_module(f"lockstep.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=verb, rich_help_panel=panel)
    else:
        words = {"allow_interspersed_args": False} if verb == "run" else None  # (what follows its script is the script's)
        app.command(verb, rich_help_panel=panel, context_settings=words)(found)


def __getattr__(name: str) -> Any:
    """`app`: the command with every verb, made when it is asked for."""
    if name != "app":
        raise AttributeError(name)
    globals()["app"] = app_of(ALL)
    return globals()["app"]


def print_version(asked: bool) -> None:
    if asked:
        from lockstep.cli.version import own_version

        put(own_version())
        raise typer.Exit


def options(
    show_version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Multi-node DeepSpeed fine-tuning on your own Kubernetes or OpenShift GPU cluster."""


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As Python does, with escapes for what a terminal would act on: errors quote what pods and clusters say."""
    put_text("".join(traceback.format_exception(kind, error, trace)), error=True)


def main() -> int:
    if is_plain():
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # (help pages, too: typer has no other way)
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        app_of([verb] if verb in ALL else ALL)()
    except Exception as error:
        known = told(error)
        if known is None:
            sys.excepthook = show_traceback
            raise
        put_text(f"lockstep: {known[1]}\n", error=True)
        return known[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
