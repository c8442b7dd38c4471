"""`lockstep deploy`: put Lockstep on a cluster, as far as your rights go, with a dev environment to work in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.names import DEV_ENVIRONMENT
from lockstep.cli.clusters.deploymentplan import OPERATOR_IMAGE, Chosen, DeploymentPlan, Mode, chosen_scope, planned
from lockstep.cli.shared.embedded import publish_checkout
from lockstep.cli.shared.progress import waiting
from lockstep.platforms.output import put, put_text, tell

if TYPE_CHECKING:
    pass


ClusterArgument = Annotated[str, typer.Argument(help="A cluster of clusters/, or a cluster file's path.")]
ContextOption = Annotated[str | None, typer.Option(help="The context of your kubeconfig.")]
ImageOption = Annotated[
    str | None,
    typer.Option(
        help=f"The operator's image. Default: the cluster's, where it mounts Lockstep's code into pods; else the one that is deployed, at first {OPERATOR_IMAGE}. "
        "On OpenShift a name without a registry is that of an ImageStream in lockstep-system."
    ),
]


ForceOption = Annotated[bool, typer.Option("--force", help="Go on even if the kubeconfig's API host differs from the cluster file's.")]


def deploy(
    cluster: ClusterArgument,
    mode: Annotated[
        Mode | None,
        typer.Option(
            case_sensitive=False, help="Transport between nodes of jobs that don't state one. Default: as it is deployed, at first auto."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every object instead of sending it. Needs no cluster.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what would change on the cluster. Exit code 1: something would.")] = False,
    dev: Annotated[
        bool, typer.Option("--dev/--no-dev", help=f"Also create the dev environment {DEV_ENVIRONMENT}, if there is none.")
    ] = True,
    image: ImageOption = None,
    monitoring: Annotated[
        bool, typer.Option("--monitoring", help="Also send the ServiceMonitor, alert rules and dashboard, if the cluster has their CRDs.")
    ] = False,
    namespaces: Annotated[
        str | None,
        typer.Option(
            help="Give the operator rights in these namespaces only (commas between them), besides Nodes, TrainingClusters and reviews of tokens; all: "
            "everywhere. Default: as it is deployed, at first all."
        ),
    ] = None,
    namespace_only: Annotated[
        bool | None,
        typer.Option(
            "--namespace-only",
            help="An operator in the cluster's own namespace, without any right outside it: Roles only, for an admin of that namespace. The CRDs must be there.",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the operator, and then for the dev environment.")] = 600,
    force: ForceOption = False,
    context: ContextOption = None,
) -> None:
    """Install the CRDs, the operator, the TrainingCluster, the jobs' service account and the dev environment. May be repeated.

    It checks your rights first and tries nothing that they don't allow. It installs the rest, and prints what an administrator must
    do. Exit code 0: everything is there, 1: something is missing or did not become ready.

    Example: lockstep deploy barcelona --mode rdma
    """
    if dry_run:
        from lockstep.api.files.yamltext import dump_all_yaml

        with waiting("rendering every object"):
            plan = planned(cluster, mode or Mode.AUTO, image, monitoring=monitoring, scope=chosen_scope(namespaces, namespace_only))
            text = dump_all_yaml([*plan.objects, *([_dev_environment(plan)] if dev else [])])
        warn_of(plan)
        return put_text(text)
    with waiting(f"looking at what is deployed on {cluster}"):
        plan = _checked(cluster, mode, context, image, force, monitoring, chosen_scope(namespaces, namespace_only))
    warn_of(plan)
    if diff:
        from lockstep.cli.shared.difference import diff_deployment

        return diff_deployment([*plan.objects, *([_dev_environment(plan)] if dev else [])], context)
    from lockstep.cli.clusters.deploying import carry_out

    if force:
        _remember_forced(plan, context)
    try:
        complete = asyncio.run(carry_out(plan, context, dev, timeout))
    except KeyboardInterrupt:
        put("", f"Stopped looking; the cluster goes on: make status-cluster CLUSTER={plan.cluster.cluster.name}")
        raise
    if not complete:
        raise typer.Exit(1)


def warn_of(plan: DeploymentPlan) -> None:
    """Say the findings on standard error, each with its line: a dry run's standard output is YAML."""
    from lockstep.plan.cluster.finding import line_of

    note = plan.default_image
    if note is not None:
        tell(f"note: {plan.file}:{line_of(note.subject, plan.cluster.lines)}: {note.subject}: {note.message}")
    for one in plan.findings:
        tell(f"warning: {plan.file}:{line_of(one.subject, plan.cluster.lines)}: {one.subject}: {one.message}", f"  → {one.fix}")


def _dev_environment(plan: DeploymentPlan) -> dict[str, Any]:
    from lockstep.platforms.clusters.devenv import dev_environment

    return dev_environment(plan.profile, plan.namespace)


def _checked(
    cluster: str, mode: Mode | None, context: str | None, image: str | None, force: bool, monitoring: bool, scope: Chosen = None
) -> DeploymentPlan:
    """The plan, for the cluster that the kubeconfig talks to; what isn't said stays as it is deployed there.

    Raises:
        ConfigError: that is not the one that the cluster file names, and `force` is not given.
    """
    from lockstep.cli.shared.target import is_embedded, refuse_other_cluster

    embedded = is_embedded(cluster, context)
    stated = (mode or Mode.AUTO, image, "", monitoring, scope)
    first = planned(cluster, *stated)  # before anything is changed, the embedded cluster's code too
    refuse_other_cluster(first.cluster, context, force)
    mode_there, image_there, scope_there = as_deployed(first, context)
    revision = publish_checkout() if embedded else ""
    complete = (mode or mode_there or Mode.AUTO, image or image_there, revision, monitoring, scope or scope_there)
    return first if complete == stated else planned(cluster, *complete)


def as_deployed(plan: DeploymentPlan, context: str | None) -> tuple[Mode | None, str | None, Chosen]:
    """Choices of the deployment that is on the cluster, where it may be seen. An image of the default's name goes with this version."""
    from lockstep.kube.cluster import Client
    from lockstep.plan.ship.openshift_images import repository, short_name
    from lockstep.platforms.clusters import deployed
    from lockstep.platforms.clusters.install import code_volumes

    name = plan.profile.metadata.name
    mode, image, scope = Client(context).run(lambda cluster: deployed.as_deployed(cluster, name, plan.namespace))
    own = bool(code_volumes(plan.profile)) or repository(short_name(image or "", scope.home)) == repository(OPERATOR_IMAGE)
    chosen: Chosen = "own" if scope.own else scope.namespaces or None
    return Mode(mode.lower()) if mode else None, None if own else image, chosen


def _remember_forced(plan: DeploymentPlan, context: str | None) -> None:
    """Let the verbs to come take this API server for the cluster's, as its deployment does."""
    from lockstep.cli.shared.deployment import remember_forced
    from lockstep.cli.shared.target import is_same_host
    from lockstep.kube.cluster import Client

    stated, server = plan.cluster.cluster.api, Client(context).server
    if stated and not is_same_host(stated, server):
        remember_forced(plan.cluster.cluster.name, server)


def install_cluster(
    cluster: str,
    mode: Mode,
    context: str | None,
    say: Callable[[str], None],
    image: str | None = None,
    force: bool = False,
    monitoring: bool = False,
) -> DeploymentPlan:
    """Send everything but the dev environment, with an administrator's rights, and wait until the operator is ready.

    Raises:
        ConfigError: the kubeconfig's cluster is not the one that the cluster file names, and `force` is not given.
    """
    from lockstep.kube.cluster import Cluster
    from lockstep.platforms.clusters.install import install, with_one_default, without_unknown_kinds

    plan = _checked(cluster, mode, context, image, force, monitoring)

    async def send() -> None:
        async with await Cluster.connect(context) as connection:
            objects = await without_unknown_kinds(connection, plan.objects, say)
            await install(connection, await with_one_default(connection, objects, say), say)

    asyncio.run(send())
    return plan
