"""`lockstep version`: of this command, of the operator, of the cluster."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from lockstep.cli.jobargs import ClusterNameOption, ContextOption, Form, FormOption
from lockstep.platforms.output import put, put_json


def own_version() -> str:
    """Version of the installed package; a checkout has none of its own."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("lockstep")
    except PackageNotFoundError:
        return "from a checkout"


def version(
    client: Annotated[bool, typer.Option("--client", help="Only this command's: asks no cluster.")] = False,
    cluster: ClusterNameOption = "local",
    context: ContextOption = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Print the versions of this command, of the operator's image and of Kubernetes.

    Example: lockstep version --client
    """
    found = [("lockstep", own_version())]
    if not client:
        from lockstep.cli.target import namespace_of

        found += asyncio.run(_cluster_versions(namespace_of(cluster, None, context), context))
    if output is Form.JSON:
        put_json(dict(found))
    else:
        put(*(f"{name:12} {version}" for name, version in found))


async def _cluster_versions(namespace: str, context: str | None) -> list[tuple[str, str]]:
    from lockstep.api.names import OPERATOR_NAMESPACE
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.survey import operator_deployment

    async with await Cluster.connect(context) as connection:
        kubernetes = (await connection.request("GET", "/version"))["gitVersion"]
        deployment, may_see = await operator_deployment(connection, namespace)
    if not may_see:
        image = f"unknown: you may not look into namespace {OPERATOR_NAMESPACE}"
    else:
        image = "not installed" if deployment is None else str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
    return [("operator", image), ("Kubernetes", kubernetes)]
