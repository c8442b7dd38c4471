"""`lockstep deploy|status|clean`: put Lockstep on a cluster, look at it, take it away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.api.clusterfile import ClusterFile
    from lockstep.api.profile import ClusterProfile

OPERATOR_IMAGE = "lockstep-operator:0.1.0"  # as images/operator/Containerfile is built; a cluster may know it under another name

ClusterArgument = Annotated[str, typer.Argument(help="A cluster of clusters/, or a cluster file's path.")]
ContextOption = Annotated[str | None, typer.Option(help="The context of your kubeconfig.")]
ImageOption = Annotated[
    str | None,
    typer.Option(help=f"The operator's image. Default: the profile's, where it mounts Lockstep's code into pods; else {OPERATOR_IMAGE}."),
]


ForceOption = Annotated[bool, typer.Option("--force", help="Also where the kubeconfig's API host is not the one in the cluster file.")]


class Mode(StrEnum):
    """What jobs that don't say use between nodes."""

    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True)
class Deployment:
    """What is sent to a cluster, and the namespace that its jobs run in."""

    cluster: ClusterFile
    profile: ClusterProfile
    objects: list[dict[str, Any]]


def deploy(
    cluster: ClusterArgument,
    mode: Annotated[Mode, typer.Option(case_sensitive=False, help="What jobs that don't say use between nodes.")] = Mode.AUTO,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every object instead of sending it; needs no cluster.")] = False,
    image: ImageOption = None,
    monitoring: Annotated[
        bool, typer.Option("--monitoring", help="Also the ServiceMonitor, alert rules and dashboard, where the cluster has their CRDs.")
    ] = False,
    force: ForceOption = False,
    context: ContextOption = None,
) -> None:
    """Install the CRDs, the operator, the cluster's profile and the jobs' service account. May be repeated.

    Example: lockstep deploy barcelona --mode rdma
    """
    if dry_run:
        from lockstep.api.yamltext import dump_all_yaml

        print(dump_all_yaml(planned(cluster, mode, image, monitoring=monitoring).objects), end="")
        return
    done = install_cluster(cluster, mode, context, print, image, force, monitoring)
    namespace = done.cluster.cluster.namespace
    if done.profile.spec.security.requires_privileged_scc:
        account = done.profile.spec.security.service_account
        print(
            f"The profile says that pods need the privileged SCC. An administrator grants it:\n  oc adm policy add-scc-to-user privileged -z {account} -n {namespace}"
        )
    if done.profile.spec.notes:
        print(f"Notes of {done.profile.metadata.name}:\n{done.profile.spec.notes.rstrip()}")
    print(f"Ready. Next: kubectl apply -n {namespace} -f manifests/samples/trainingjob.yaml; kubectl get tj -n {namespace} -w")


def planned(cluster: str, mode: Mode, image: str | None = None, revision: str = "", monitoring: bool = False) -> Deployment:
    """What `deploy` would send. Reads files only.

    Raises:
        ConfigError: RDMA is asked of a profile that has none; the cluster file is wrong or unknown.
    """
    from lockstep.cli.paths import checkout
    from lockstep.cli.target import load
    from lockstep.platforms.kubernetes.install import monitoring_objects, operator_objects

    found = load(cluster)
    profile = _with_mode(found, mode)
    chosen = image or (profile.spec.image if profile.spec.pod.volumes else None) or OPERATOR_IMAGE
    objects = operator_objects(profile, chosen, namespace=found.cluster.namespace, manifests=checkout() / "manifests", revision=revision)
    more = monitoring_objects(checkout() / "manifests") if monitoring else []
    return Deployment(found, profile, [*objects, *more])


def _with_mode(found: ClusterFile, mode: Mode) -> ClusterProfile:
    from lockstep.api.shared import FabricMode

    profile, spec = found.profile, found.profile.spec
    if mode is Mode.RDMA and not spec.network.rdma.enabled:
        raise ConfigError(f"MODE=rdma: cluster {found.cluster.name} has no RDMA (network.rdma.enabled is false in its file): use MODE=tcp")
    wanted = {Mode.AUTO: FabricMode.AUTO, Mode.RDMA: FabricMode.RDMA, Mode.TCP: FabricMode.TCP}[mode]
    network = spec.network.model_copy(update={"mode": wanted})
    return profile.model_copy(update={"spec": spec.model_copy(update={"network": network})})


def install_cluster(
    cluster: str,
    mode: Mode,
    context: str | None,
    say: Callable[[str], None],
    image: str | None = None,
    force: bool = False,
    monitoring: bool = False,
) -> Deployment:
    """Send everything and wait until the operator is ready.

    Raises:
        ConfigError: the kubeconfig's cluster is not the one that the cluster file names, and `force` is not given.
    """
    from lockstep.cli.target import refuse_other_cluster, use_embedded_cluster
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.install import install, without_unknown_kinds

    embedded = use_embedded_cluster(cluster, context)
    plan = planned(cluster, mode, image, revision=_publish() if embedded else "", monitoring=monitoring)
    refuse_other_cluster(plan.cluster, context, force)

    async def send() -> None:
        async with await Cluster.connect(context) as connection:
            await install(connection, await without_unknown_kinds(connection, plan.objects, say), say)

    asyncio.run(send())
    return plan


def _publish() -> str:
    """Give the embedded cluster's pods this checkout's code; the name of the copy."""
    from lockstep.devcluster.layout import default_layout
    from lockstep.devcluster.python_volume import publish_code

    return publish_code(default_layout().python_volume).name


def clean(cluster: ClusterArgument, force: ForceOption = False, context: ContextOption = None) -> None:
    """Remove all TrainingJobs, the operator, the profile and the CRDs. Claims, and with them code, models and checkpoints, stay.

    Example: lockstep clean local
    """
    from lockstep.cli.target import refuse_other_cluster, use_embedded_cluster
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.install import uninstall, without_unknown_kinds

    use_embedded_cluster(cluster, context)
    plan = planned(cluster, Mode.AUTO, monitoring=True)
    refuse_other_cluster(plan.cluster, context, force)

    async def remove() -> None:
        async with await Cluster.connect(context) as connection:
            await uninstall(connection, await without_unknown_kinds(connection, plan.objects, lambda line: None), print)

    asyncio.run(remove())


def status(cluster: ClusterArgument, context: ContextOption = None) -> None:
    """Show the operator, the profile and the jobs of a cluster. Exit code 1 when the operator isn't ready.

    Example: lockstep status local
    """
    from lockstep.cli.overview import overview, print_overview
    from lockstep.cli.target import load, use_embedded_cluster
    from lockstep.platforms.kubernetes.cluster import Cluster

    use_embedded_cluster(cluster, context)
    found = load(cluster)

    async def read() -> bool:
        async with await Cluster.connect(context) as connection:
            seen = await overview(connection, found)
            print_overview(seen)
            return seen.operator_ready

    if not asyncio.run(read()):
        raise typer.Exit(1)
