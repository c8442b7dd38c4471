"""What verbs take that work in one pod of a job, by default of the dev environment: which job, and which node."""

from __future__ import annotations

from typing import Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DEV_ENVIRONMENT, pod_name
from lockstep.cli.shared.jobargs import Found, known_names

OptionalJobArgument = Annotated[str, typer.Argument(help="The job's name.", metavar="[JOB]", autocompletion=known_names)]
NodeOption = Annotated[int, typer.Option("--node", min=0, help="The node, and so the pod, counted from 0.")]
DEFAULT_JOB = DEV_ENVIRONMENT


def running_pod(found: Found, node: int) -> str:
    """The pod of a node. Raises ConfigError for a node that the job doesn't have, Failed when its pod doesn't run."""
    from lockstep.api.objects import is_running
    from lockstep.kube.cluster import NOT_FOUND, ApiError
    from lockstep.kube.kinds import path_of

    client, name = found.target.client, pod_name(found.name, node)
    nodes = _nodes(found)
    if node >= nodes > 0:
        raise ConfigError(f"job {found.name} has no node {node}: its {nodes} nodes are 0 to {nodes - 1}")
    try:
        pod = client.request("GET", path_of("Pod", found.namespace, name))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise Failed(_no_pod(found, name)) from None
    if not is_running(pod) or "deletionTimestamp" in pod["metadata"]:
        state = "ends" if "deletionTimestamp" in pod["metadata"] else f"is {pod['status'].get('phase', 'unknown')} and doesn't run yet"
        raise Failed(f"pod {name} {state}: lockstep why {found.name} -n {found.namespace}")
    return name


def _no_pod(found: Found, pod: str) -> str:
    from lockstep.kube.jobs import has_ended

    place = f"{found.name} -n {found.namespace}"
    if has_ended(found.job.get("status", {})):
        return f"job {found.name} has ended and pod {pod} is gone: lockstep logs {place} and lockstep cp read what it has left"
    return f"pod {pod} is not there: lockstep why {place}"


def _nodes(found: Found) -> int:
    """0: not known yet."""
    stated = found.job["spec"].get("nodes")
    if stated:
        return int(stated)
    from lockstep.cli.shared.target import load

    return load(found.target.cluster).profile.spec.gpus.default_nodes
