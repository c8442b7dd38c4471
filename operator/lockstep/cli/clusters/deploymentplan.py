"""The plan of a deployment: the objects that `lockstep deploy` would send, by the cluster file and the choices of a person, and the
commands of an administrator for those that the person may not send. Asks no cluster.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lockstep.api.cluster import Platform, TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.names import DEV_ENVIRONMENT, OPERATOR_NAMESPACE
from lockstep.api.shared import FabricMode
from lockstep.assets import asset
from lockstep.cli.shared.clusterfiles import file_of, memorable, path_of
from lockstep.cli.shared.folders import from_here, state_folder, write_state
from lockstep.cli.shared.ownversion import own_version
from lockstep.cli.shared.target import load
from lockstep.plan.checks.alone import IMAGE, findings_for_mode, lint_alone
from lockstep.plan.cluster.finding import Finding, Outcome, warning
from lockstep.plan.cluster.scope import EVERYWHERE, OWN, Scope, definitions
from lockstep.plan.ship.deploy import objects_for_administrator
from lockstep.plan.ship.openshift import operator_reference, short_name
from lockstep.platforms.clusters.install import FIELD_MANAGER, code_volumes, monitoring_objects, operator_objects

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.cli.shared.places import Verb

OPERATOR_IMAGE = "lockstep-operator:0.1.0"  # as images/operator/Containerfile is built; a cluster may know it under another name

PUSHED = f"REGISTRY/{OPERATOR_IMAGE}"
"""The same, as people name it in a registry of theirs."""


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
        """Choices of this deployment, as options of `lockstep deploy`."""
        image = "" if self.image == default_image(self.profile) else f"--image {self.image}"
        return " ".join(filter(None, (f"--mode {self.mode.value}", image, self.scope.choice)))

    @property
    def sent_image(self) -> str:
        """The operator's image as it is sent."""
        return operator_reference(self.image, self.profile.spec.platform, self.scope.home)

    @property
    def findings(self) -> list[Finding]:
        """Findings about the cluster file alone that matter to jobs of this mode."""
        concerning = findings_for_mode(lint_alone(self.cluster, self.sent_image), self.profile.spec.network.mode)
        return [one for one in concerning if one.outcome in (Outcome.FAILED, Outcome.WARNING)]

    @property
    def default_image(self) -> Finding | None:
        """Finding about the image of jobs that name none; None where the cluster names it, or none is known (`findings`)."""
        return next((one for one in lint_alone(self.cluster, self.sent_image) if one.subject == IMAGE and one.outcome is Outcome.OK), None)

    @property
    def named(self) -> str:
        """Name of the cluster if its file is in clusters/, else the file as it was typed."""
        name = self.cluster.cluster.name
        return name if path_of(self.file).resolve() == path_of(name).resolve() else self.file

    @property
    def typed(self) -> str:
        """The same as one word of a command line."""
        return shlex.quote(self.named)

    @property
    def remembered(self) -> str:
        """The same as `lockstep use` remembers it: it holds in every folder."""
        return memorable(self.named)

    def next_commands(self, *, dev: bool) -> list[tuple[str, str]]:
        """Return what to type after the deployment, each with its meaning: a job of this cluster, then what the dev environment is for."""
        named = self.typed
        commands = [
            (f"lockstep init job first --cluster {named} -o first.yaml", "a job: set its model and data"),
            (f"lockstep plan -f first.yaml --cluster {named}", "does it fit? Nothing is started"),
            (f"lockstep run -f first.yaml --cluster {named}", "start it and follow its log"),
            (f"lockstep top first --cluster {named}", "watch its speed and its loss"),
            (f"lockstep cluster status {named}", "operator, TrainingCluster and jobs"),
        ]
        if dev:
            commands += [
                (
                    f"lockstep sync {DEV_ENVIRONMENT} workspace --cluster {named}",
                    "your code to all pods of the dev environment (lockstep init script workspace writes an example)",
                ),
                (f"lockstep run --job {DEV_ENVIRONMENT} --cluster {named} train_multi_node.py", "on all nodes; Ctrl-C stops it"),
                (f"lockstep shell {DEV_ENVIRONMENT} --cluster {named}", "a shell in node 0"),
            ]
        return commands

    @property
    def title(self) -> str:
        """Line for people in the record on the cluster."""
        return f"{self.cluster.cluster.name}, {self.choices}, lockstep {own_version()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def chosen_scope(namespaces: str | None, namespace_only: bool | None) -> Scope | None:
    """Return the scope of the operator as the command line says it; None: it doesn't say.

    Raises ConfigError for two different wishes, or a name that no namespace can have.
    """
    if namespaces is not None and namespace_only:
        raise ConfigError(
            "--namespaces and --namespace-only can't be combined: the first is an operator for several namespaces, the second one of a"
            " single namespace"
        )
    if namespace_only:
        return OWN
    if namespaces is None or namespaces == "all":
        return EVERYWHERE if namespaces else None
    names = tuple(dict.fromkeys(name.strip() for name in namespaces.split(",")))
    wrong = next((name for name in names if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name)), None)
    if wrong is not None:
        raise ConfigError(
            f"--namespaces: {wrong!r} is no namespace's name (lower-case letters, digits and '-', at most 63): --namespaces team-a,team-b"
        )
    return Scope(names)


def scope_in(chosen: Scope | None, namespace: str) -> Scope:
    """`namespace`: the cluster file's. Raises ConfigError where jobs of that would have no operator."""
    if chosen is None or chosen == EVERYWHERE:
        return EVERYWHERE
    if chosen.own:
        if namespace == OPERATOR_NAMESPACE:
            raise ConfigError(
                f"--namespace-only: cluster.namespace is {OPERATOR_NAMESPACE}, which belongs to the operator of the whole cluster: name"
                " your own namespace in the cluster file"
            )
        return Scope((namespace,), own=True)
    if namespace not in chosen.namespaces:
        raise ConfigError(
            f"--namespaces: the cluster file's own namespace {namespace} is not among {', '.join(chosen.namespaces)}: add it, or change"
            " cluster.namespace"
        )
    return chosen


def planned(
    verb: Verb, cluster: str, mode: Mode, image: str | None = None, revision: str = "", monitoring: bool = False, scope: Scope | None = None
) -> DeploymentPlan:
    """Plan of what `deploy` would send. Reads files only.

    Raises:
        ConfigError: RDMA is asked of a cluster that has none; the cluster file is wrong or unknown; `scope` can't be had.
    """
    return _plan_of(load(verb, cluster), file_of(cluster), mode, image, revision, monitoring=monitoring, scope=scope)


def _plan_of(
    file: ClusterFile, path: str, mode: Mode, image: str | None = None, revision: str = "", *, monitoring: bool = False, scope: Scope | None
) -> DeploymentPlan:
    profile = _with_mode(file, mode)
    place = scope_in(scope, file.cluster.namespace)
    if place.own and monitoring:
        raise ConfigError(
            "--monitoring: the operator of one namespace serves no metrics, because it may not ask who may read them: leave out"
            " --monitoring"
        )
    chosen = short_name(image or default_image(profile), place.home)
    manifests = asset("manifests")
    objects = operator_objects(profile, chosen, namespace=file.cluster.namespace, manifests=manifests, revision=revision, scope=place)
    more = monitoring_objects(manifests) if monitoring else []
    return DeploymentPlan(file, profile, [*objects, *more], mode, chosen, place, path)


def default_image(profile: TrainingCluster) -> str:
    """The operator's, where neither a person nor an earlier deployment names another: with its code on a volume, that of jobs will do."""
    return (profile.spec.image if code_volumes(profile) else None) or OPERATOR_IMAGE


def unpullable(cluster: ClusterFile, typed: str) -> Finding | None:
    """Return a finding if the operator's image is the default: plain Kubernetes has no registry of its own to pull that from.

    `typed`: the cluster as a word of a command line.
    """
    if cluster.profile.spec.platform is not Platform.KUBERNETES or default_image(cluster.profile) != OPERATOR_IMAGE:
        return None
    return warning(
        "cluster.platform",
        f"a first deployment needs --image: the default, {OPERATOR_IMAGE}, names no registry that the cluster could pull from",
        f"lockstep build operator --tag {PUSHED} --push, then lockstep deploy {typed} --image {PUSHED}",
    )


def definition_commands(plan: DeploymentPlan) -> list[str]:
    """Write the files of what an administrator sends once for operators of one namespace, and return the commands that send them."""
    items = definitions(_plan_of(plan.cluster, plan.file, plan.mode, scope=EVERYWHERE).objects)
    return admin_commands(plan.cluster.cluster.name, *objects_for_administrator(items))


def admin_commands(cluster: str, definitions: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Write the files, and say how they are applied: in the name of deploy, so that a later one can also take something away."""
    commands = []
    for name, objects in ((f"deploy/{cluster}/definitions.yaml", definitions), (f"deploy/{cluster}/cluster.yaml", others)):
        try:
            if not objects:
                (state_folder() / name).unlink(missing_ok=True)
                continue
            shown = shlex.quote(str(from_here(write_state(name, dump_all_yaml(objects)))))
        except (OSError, ConfigError) as error:
            return [f"lockstep deploy {shlex.quote(cluster)} --dry-run     # prints the objects: their files were not written: {error}"]
        commands.append(f"kubectl apply --server-side --force-conflicts --field-manager={FIELD_MANAGER} -f {shown}")
        if objects is definitions:
            commands.append(f"kubectl wait --for=condition=Established -f {shown}")
    return commands


def _with_mode(file: ClusterFile, mode: Mode) -> TrainingCluster:
    profile, spec = file.profile, file.profile.spec
    if mode is Mode.RDMA and not spec.network.rdma.enabled:
        raise ConfigError(
            f"--mode rdma: cluster {file.cluster.name} has no RDMA (network.rdma.enabled is false in its file): use --mode tcp"
        )
    network = spec.network.model_copy(update={"mode": FabricMode[mode.name]})
    return profile.model_copy(update={"spec": spec.model_copy(update={"network": network})})
