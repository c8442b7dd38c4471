"""`lockstep deploy`: put Lockstep on a cluster, as far as your rights go, with a dev environment to work in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.api.errors import ConfigError
from lockstep.api.names import DEV_ENVIRONMENT, OPERATOR_NAMESPACE
from lockstep.cli.shared.embedded import publish_checkout
from lockstep.cli.shared.progress import waiting
from lockstep.platforms.output import put, put_text, tell

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.plan.cluster.finding import Finding
    from lockstep.plan.cluster.scope import Scope

OPERATOR_IMAGE = "lockstep-operator:0.1.0"  # as images/operator/Containerfile is built; a cluster may know it under another name

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


class Mode(StrEnum):
    """Transport between nodes, as the command line names it."""

    AUTO = "auto"
    RDMA = "rdma"
    TCP = "tcp"


@dataclass(frozen=True)
class DeploymentPlan:
    """Objects to send to a cluster, and the namespace that its jobs run in."""

    cluster: ClusterFile
    profile: TrainingCluster
    objects: list[dict[str, Any]]
    mode: Mode
    image: str
    """The operator's, as people name it."""
    scope: Scope
    file: str
    """The cluster file, as people type its path."""

    @property
    def namespace(self) -> str:
        return str(self.cluster.cluster.namespace)

    @property
    def choices(self) -> str:
        """Choices of this deployment, as variables of make."""
        image = "" if self.image == default_image(self.profile) else f" OPERATOR_IMAGE={self.image}"
        scope = " NAMESPACE_ONLY=1" if self.scope.own else f" NAMESPACES={','.join(self.scope.namespaces)}" if self.scope.namespaces else ""
        return f"MODE={self.mode.value}{image}{scope}"

    @property
    def sent_image(self) -> str:
        """The operator's image as it is sent."""
        from lockstep.plan.ship.openshift_images import operator_reference

        return operator_reference(self.image, self.profile.spec.platform, self.scope.home)

    @property
    def findings(self) -> list[Finding]:
        """Findings about the cluster file alone that matter to jobs of this mode."""
        from lockstep.plan.checks.alone import findings_for_mode, lint_alone
        from lockstep.plan.cluster.finding import Outcome

        concerning = findings_for_mode(lint_alone(self.cluster, self.sent_image), self.profile.spec.network.mode)
        return [one for one in concerning if one.outcome in (Outcome.FAILED, Outcome.WARNING)]

    @property
    def default_image(self) -> Finding | None:
        """Finding about the image of jobs that name none; None where the cluster names it, or none is known (`findings`)."""
        from lockstep.plan.checks.alone import IMAGE, lint_alone
        from lockstep.plan.cluster.finding import Outcome

        return next((one for one in lint_alone(self.cluster, self.sent_image) if one.subject == IMAGE and one.outcome is Outcome.OK), None)

    @property
    def title(self) -> str:
        """Line for people in the record on the cluster."""
        from datetime import UTC, datetime

        from lockstep.cli.clusters.version import own_version

        return f"{self.cluster.cluster.name}, {self.choices}, lockstep {own_version()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


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


Chosen = Literal["all", "own"] | tuple[str, ...] | None
"""Namespaces that the operator is to work in, as the command line says it; None: it doesn't say."""


def chosen_scope(namespaces: str | None, namespace_only: bool | None) -> Chosen:
    """Raises ConfigError for two different wishes, or a name that no namespace can have."""
    if namespaces is not None and namespace_only:
        raise ConfigError(
            "--namespaces and --namespace-only can't be combined: the first is an operator for several namespaces, the second one of a single namespace"
        )
    if namespace_only:
        return "own"
    if namespaces is None or namespaces == "all":
        return "all" if namespaces else None
    names = tuple(dict.fromkeys(name.strip() for name in namespaces.split(",")))
    wrong = next((name for name in names if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)), None)
    if wrong is not None:
        raise ConfigError(
            f"--namespaces: {wrong!r} is no namespace's name (lower-case letters, digits and '-', at most 63): --namespaces team-a,team-b"
        )
    return names


def scope_in(chosen: Chosen, namespace: str) -> Scope:
    """`namespace`: the cluster file's. Raises ConfigError where jobs of that would have no operator."""
    from lockstep.plan.cluster.scope import Scope

    if chosen == "own":
        if namespace == OPERATOR_NAMESPACE:
            raise ConfigError(
                f"--namespace-only: cluster.namespace is {OPERATOR_NAMESPACE}, the operator's of the whole cluster: name your own in the cluster file"
            )
        return Scope((namespace,), own=True)
    if not isinstance(chosen, tuple):
        return Scope()
    if namespace not in chosen:
        raise ConfigError(
            f"--namespaces: the cluster file's own namespace {namespace} is not among {', '.join(chosen)}: add it, or change cluster.namespace"
        )
    return Scope(chosen)


def planned(
    cluster: str, mode: Mode, image: str | None = None, revision: str = "", monitoring: bool = False, scope: Chosen = None
) -> DeploymentPlan:
    """Plan of what `deploy` would send. Reads files only.

    Raises:
        ConfigError: RDMA is asked of a cluster that has none; the cluster file is wrong or unknown; `scope` can't be had.
    """
    from lockstep.cli.clusters.lint import file_of
    from lockstep.cli.shared.paths import checkout
    from lockstep.cli.shared.target import load
    from lockstep.plan.ship.openshift_images import short_name
    from lockstep.platforms.clusters.install import monitoring_objects, operator_objects

    file = load(cluster)
    profile = _with_mode(file, mode)
    place = scope_in(scope, file.cluster.namespace)
    if place.own and monitoring:
        raise ConfigError(
            "--monitoring: the operator of one namespace serves no metrics, for it has no right to ask who may read them: leave it out"
        )
    chosen = short_name(image or default_image(profile), place.home)
    manifests = checkout() / "manifests"
    objects = operator_objects(profile, chosen, namespace=file.cluster.namespace, manifests=manifests, revision=revision, scope=place)
    more = monitoring_objects(manifests) if monitoring else []
    return DeploymentPlan(file, profile, [*objects, *more], mode, chosen, place, file_of(cluster))


def default_image(profile: TrainingCluster) -> str:
    """The operator's, where neither a person nor an earlier deployment names another: with its code on a volume, that of jobs will do."""
    from lockstep.platforms.clusters.install import code_volumes

    return (profile.spec.image if code_volumes(profile) else None) or OPERATOR_IMAGE


def _with_mode(file: ClusterFile, mode: Mode) -> TrainingCluster:
    from lockstep.api.shared import FabricMode

    profile, spec = file.profile, file.profile.spec
    if mode is Mode.RDMA and not spec.network.rdma.enabled:
        raise ConfigError(f"MODE=rdma: cluster {file.cluster.name} has no RDMA (network.rdma.enabled is false in its file): use MODE=tcp")
    network = spec.network.model_copy(update={"mode": FabricMode[mode.name]})
    return profile.model_copy(update={"spec": spec.model_copy(update={"network": network})})


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
