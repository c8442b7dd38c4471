"""`lockstep doctor`: is everything there that a job needs, on a cluster or on hosts, and if not, what to do."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.names import HOSTS, KUBERNETES
from lockstep.assets import asset
from lockstep.cli.shared.inputs import Inputs, only, read_inputs
from lockstep.cli.shared.jobargs import Form, FormOption, OptionalClusterArgument, TargetOptions, on_cluster
from lockstep.cli.shared.target import OtherCluster, load
from lockstep.cli.shared.terminal import put_findings, waiting
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.plan.checks.doctor import examine
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.platforms.clusters.facts import doctor_facts
from lockstep.platforms.clusters.install import definitions
from lockstep.platforms.output import put_json, tell

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.kube.aim import Connections


@on_cluster
def doctor(
    where: TargetOptions,
    cluster: OptionalClusterArgument = "local",
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", metavar="FILE", show_default=False, help="This job's cluster; on hosts also whether they fit it."),
    ] = None,
    output: FormOption = Form.TEXT,
) -> None:
    """Check a cluster from your tools to its network, or hosts.

    On Kubernetes it checks tools, context, rights, CRDs, operator, TrainingCluster, DNS, nodes, storage and fabric, and says what to do
    about each. It only reads, with your rights. What your account may not read counts as unknown, not as failed.

    On hosts it looks at ssh, Python and its packages, disk, GPUs, address, clock, what keeps jobs alive, and the network between them:
    every host connects to every other one on ports that a job uses, and neighbors measure their bandwidth. A file in each workspace shows
    for a moment which hosts share one. It leaves nothing behind, and prints the steps that only root can take. With -f it also checks that
    nodes, GPUs, inputs, disk and network fit this job.

    Exit code 0: nothing that you may see fails; 1: something does.

    Example: lockstep doctor barcelona

    Example: lockstep doctor lab -f job.yaml
    """
    is_typed = where.verb.choice is None and where.verb.unnamed is None
    place = replace(where, cluster=cluster) if is_typed else where
    inputs = read_inputs(only(files, "doctor"), place, unnamed=lambda: cluster) if files else None
    named = cluster if is_typed or inputs is None else inputs.job.spec.cluster or cluster
    file = load(where.verb, named) if inputs is None else inputs.cluster
    {KUBERNETES: _check_cluster, HOSTS: _check_hosts}[file.kind](where.on(file, named), inputs, output)


def _check_hosts(where: TargetOptions, inputs: Inputs | None, output: Form) -> None:
    from lockstep.cli.clusters.doctorhosts import check_hosts

    check_hosts(where, inputs, output)


def _check_cluster(where: TargetOptions, inputs: Inputs | None, output: Form) -> None:
    """Print what is wrong with a Kubernetes cluster, and where a job is judged. Raises typer.Exit if something fails."""
    cluster, file = where.named, where.cluster_file
    if inputs is not None:
        tell(f"note: this is about cluster {cluster}; lockstep plan -f {inputs.source} says whether the job fits there")
    with waiting(f"looking at cluster {cluster}"):
        findings = [_tools(), *asyncio.run(_examine(file, where.namespace or file.cluster.namespace, where.connections))]
    if output is Form.JSON:
        put_json([{"subject": one.subject, "verdict": one.outcome.value, "message": one.message, "fix": one.fix} for one in findings])
    else:
        put_findings(findings, 16)
    if any(finding.outcome is Outcome.FAILED for finding in findings):
        raise typer.Exit(1)


def _tools() -> Finding:
    installed = [name for name in ("kubectl", "oc") if shutil.which(name)]
    if installed:
        return Finding("tools", Outcome.OK, f"{' and '.join(installed)} found")
    return Finding("tools", Outcome.WARNING, "neither kubectl nor oc is installed", "lockstep's own verbs need neither")


async def _examine(file: ClusterFile, namespace: str, connections: Connections) -> list[Finding]:
    try:
        connection = await Cluster.connect(connections)
    except OtherCluster as error:
        return [Finding("context", Outcome.FAILED, str(error), "kubectl config get-contexts; then use --context NAME")]
    async with connection:
        try:
            version = (await connection.request("GET", "/version"))["gitVersion"]
        except (OSError, ApiError) as error:
            fix = "is it up? Is --context, or KUBECONFIG, the right one? Has your login run out?"
            return [Finding("API server", Outcome.FAILED, f"{connection.server} doesn't answer as it should: {error}", fix)]
        findings = [Finding("API server", Outcome.OK, f"{connection.server}, Kubernetes {version}")]
        facts = await doctor_facts(connection, file, namespace)
    crds = {crd["metadata"]["name"]: crd for crd in definitions(asset("manifests"))}
    return [*findings, *examine(file, facts, crds)]
