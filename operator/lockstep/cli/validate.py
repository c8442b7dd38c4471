"""`lockstep validate -f job.yaml`: whether the job could run, without asking any cluster."""

from __future__ import annotations

from lockstep.cli.inputs import ClusterOption, FileOption, NamespaceOption, SetOption, read_inputs, resolve_inputs
from lockstep.platforms.output import put


def validate(file: FileOption, cluster: ClusterOption = None, namespace: NamespaceOption = None, changes: SetOption = None) -> None:
    """Check a job file against a cluster file. Prints ok, or what is wrong and how to mend it (exit code 2).

    Example: lockstep validate -f job.yaml --cluster barcelona
    """
    from lockstep.plan.objects import render

    render(resolve_inputs(read_inputs(file, cluster, namespace, changes)))
    put("ok")
