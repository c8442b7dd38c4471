"""`lockstep shell [JOB] [--node N]`: open a shell in a pod of a job."""

from __future__ import annotations

import asyncio

import typer

from lockstep.cli.shared.jobargs import (
    DEFAULT_JOB,
    ClusterNameOption,
    ContextOption,
    NamespaceOption,
    NodeOption,
    OptionalJobArgument,
    find_job,
    running_pod,
)


def shell(
    job: OptionalJobArgument = DEFAULT_JOB,
    node: NodeOption = 0,
    cluster: ClusterNameOption = "local",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Open a shell in the pod of a node, with the variables that every run there has. Its exit code is the shell's.

    Without a terminal it runs the commands on its standard input: echo 'nvidia-smi' | lockstep shell

    Example: lockstep shell ml-dev-env --node 1
    """
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.jobs.terminal import shell as open_shell

    target = find_job(job, cluster, namespace, context)
    pod = running_pod(target, node)

    async def opened() -> int:
        async with await Cluster.connect(context) as connection:
            return await open_shell(connection, target.namespace, pod)

    raise typer.Exit(asyncio.run(opened()))
