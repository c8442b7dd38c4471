"""`lockstep version`: of this command, of the operator, of the cluster."""

from __future__ import annotations

from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.cli.shared.jobargs import Form, FormOption, TargetOptions, acts_on
from lockstep.cli.shared.ownversion import own_version
from lockstep.kube.cluster import Client, Cluster
from lockstep.plan.cluster.scope import image_of
from lockstep.platforms.clusters.facts import read_operator
from lockstep.platforms.output import put, put_json


@acts_on("cluster", "context")
def version(
    where: TargetOptions,
    output: FormOption = Form.TEXT,
) -> None:
    """Print the versions of Lockstep and of Kubernetes.

    It names this command's version, the operator's image and the API server's. lockstep --version prints the first alone.

    Example: lockstep version --cluster barcelona
    """
    own = [("lockstep", own_version())]
    if output is Form.TEXT:
        _show(own)  # before a cluster is asked, which may not answer
    namespace = where.chosen_namespace()
    lines = Client(where.connections).run(lambda connection: _cluster_versions(connection, namespace))
    if output is Form.JSON:
        put_json(dict([*own, *lines]))
    else:
        _show(lines)


def _show(versions: list[tuple[str, str]]) -> None:
    put(*(f"{name:12} {version}" for name, version in versions))


async def _cluster_versions(connection: Cluster, namespace: str) -> list[tuple[str, str]]:
    kubernetes = (await connection.request("GET", "/version"))["gitVersion"]
    operator = await read_operator(connection, namespace)
    if not operator.seen:
        image = f"unknown: you may not look into namespace {OPERATOR_NAMESPACE}"
    else:
        image = "not installed" if operator.first is None else image_of(operator.first)
    return [("operator", image), ("Kubernetes", kubernetes)]
