"""`lockstep logs JOB`: what a job prints, from its first line, also after its end."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError


def logs(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    node: Annotated[int, typer.Option(min=0, help="The node whose pod is read; node 0 shows every rank's errors.")] = 0,
    cluster: Annotated[str, typer.Option(help="The cluster file that names the namespace.")] = "local",
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the cluster's.")] = None,
    context: Annotated[str | None, typer.Option(help="The context of your kubeconfig.")] = None,
) -> None:
    """Print a job's log; of a job whose pods are gone, the last lines that were kept.

    Example: lockstep logs demo --follow
    """
    from kubernetes.client import CoreV1Api

    from lockstep.cli.target import target_of
    from lockstep.platforms.kubernetes import logs as job_logs
    from lockstep.platforms.kubernetes.jobs import get_job, has_ended, job_status

    target = target_of(cluster, namespace, context)
    found = get_job(target.client, target.namespace, job)
    core = CoreV1Api(target.client)
    if found is None:
        raise ConfigError(f"there is no TrainingJob {job} in namespace {target.namespace}: kubectl get tj -n {target.namespace}")

    def over() -> bool:
        return not follow or has_ended(job_status(target.client, target.namespace, job))

    printed = False
    for line in job_logs.follow(core, target.namespace, job, node, over, follow=follow):
        printed = True
        print(line, flush=True)
    if not printed:
        lines = job_logs.last_lines(core, target.namespace, job)
        if lines is None:
            print(
                f"job {job} has no pod of node {node} and kept no lines: kubectl describe tj {job} -n {target.namespace}", file=sys.stderr
            )
            raise typer.Exit(1)
        print("\n".join(lines))
