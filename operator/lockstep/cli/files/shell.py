"""`lockstep shell [JOB] [--node N]`: open a shell in a pod of a job."""

from __future__ import annotations

import typer

from lockstep.cli.shared.jobargs import DEFAULT_JOB, NodeOption, OptionalJobArgument, TargetOptions, find_job, on_cluster, running_pod


@on_cluster
def shell(
    where: TargetOptions,
    job: OptionalJobArgument = DEFAULT_JOB,
    node: NodeOption = 0,
) -> None:
    """Open a shell in the pod of a node, with the variables that every run there has. Its exit code is the shell's.

    Without a terminal it runs the commands on its standard input: echo 'nvidia-smi' | lockstep shell

    Example: lockstep shell ml-dev-env --node 1
    """
    from lockstep.platforms.jobs.terminal import shell as open_shell

    target = find_job(job, where)
    pod = running_pod(target, node)
    raise typer.Exit(target.run(lambda connection: open_shell(connection, target.namespace, pod)))
