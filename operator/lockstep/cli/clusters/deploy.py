"""`lockstep deploy`: put Lockstep on a cluster, as far as your rights go, with a dev environment to work in."""

from __future__ import annotations

import asyncio
import shlex
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.cluster import Platform
from lockstep.api.errors import Failed
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.names import DEV_ENVIRONMENT, OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.cli.clusters.deploymentplan import (
    OPERATOR_IMAGE,
    PUSHED,
    DeploymentPlan,
    Mode,
    admin_commands,
    chosen_scope,
    definition_commands,
    planned,
    unpullable,
)
from lockstep.cli.clusters.helm import without_release
from lockstep.cli.shared.clusterfiles import use
from lockstep.cli.shared.embedded import publish_own_code
from lockstep.cli.shared.folders import remember_forced, remember_server
from lockstep.cli.shared.inputs import option_words
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.target import EMBEDDED, is_embedded, is_same_host, refuse_other_cluster
from lockstep.cli.shared.terminal import Progress, waiting
from lockstep.kube.cluster import NOT_FOUND, ApiError, Client, Cluster
from lockstep.plan.checks.site import check_networks
from lockstep.plan.cluster.facts import Sight
from lockstep.plan.cluster.finding import Outcome, line_of
from lockstep.plan.cluster.scope import OWN, UNKNOWN_JOBS, Admission, Scope, admission
from lockstep.plan.ship.deploy import CLUSTER, State, called, counted, delete_command, objects_for_administrator, unsent
from lockstep.plan.ship.openshift import repository, short_name
from lockstep.platforms.clusters import facts
from lockstep.platforms.clusters.devenv import KIND, UnknownToOperator, dev_environment, ensure_dev_environment, lacking, until_up
from lockstep.platforms.clusters.facts import network_facts
from lockstep.platforms.clusters.install import InstallError, code_volumes, until_ready, with_one_default, without_unknown_kinds
from lockstep.platforms.clusters.listings import read_object, sight_of_jobs
from lockstep.platforms.clusters.record import deployment_of, read_record, write_record
from lockstep.platforms.clusters.remove import JOB, all_of
from lockstep.platforms.clusters.send import Sent, remove_outdated, send_permitted, standing_of
from lockstep.platforms.output import put, put_text, say, tell

if TYPE_CHECKING:
    from lockstep.cli.shared.places import Verb
    from lockstep.kube.aim import Connections

READY_SECONDS = 600.0
"""Seconds to wait for the operator, and then for the dev environment."""
SCC_GROUP = "security.openshift.io"
ClusterArgument = Annotated[str, typer.Argument(help="A cluster of clusters/, or a cluster file's path.")]
ImageOption = Annotated[
    str | None,
    typer.Option(
        help=(
            "The operator's image. On OpenShift a name without a registry means an ImageStream in lockstep-system. Default: the image"
            f" deployed now, at first {OPERATOR_IMAGE}; the cluster file's image, if that file mounts Lockstep's code into pods."
        )
    ),
]


@acts_on("context")
def deploy(
    where: TargetOptions,
    cluster: ClusterArgument,
    mode: Annotated[
        Mode | None,
        typer.Option(case_sensitive=False, help="Transport of jobs that state none. Default: as deployed, at first auto."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every object instead of sending it. Needs no cluster.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what would change, stored jobs too. Exit code 1: something would.")] = False,
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
            help=(
                "Namespaces in which the operator gets rights, with commas between them; all: everywhere. It may read Nodes and"
                " TrainingClusters and review tokens in any case. Default: as deployed now, at first all."
            )
        ),
    ] = None,
    namespace_only: Annotated[
        bool | None,
        typer.Option(
            "--namespace-only",
            help=(
                "Install an operator that has rights in the cluster file's namespace alone. You need the role admin there, and the CRDs"
                " must exist."
            ),
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on even if the API host isn't the cluster file's, or if stored objects would lose fields.")
    ] = False,
) -> None:
    """Install Lockstep on a cluster.

    It installs the CRDs, the operator, the TrainingCluster, the jobs' service account and the dev environment. You may repeat it.

    It checks your rights first. It installs what they allow, and prints what an administrator must do. If you may not install an operator
    for the whole cluster, it asks whether to install one for the cluster file's namespace alone; without a terminal it prints the command
    for that.

    Exit code 0: everything is there; 1: something is missing, or did not become ready.

    Example: lockstep deploy barcelona --mode rdma
    """
    verb = where.verb
    if dry_run:
        with waiting("rendering every object"):
            plan = planned(verb, cluster, mode or Mode.AUTO, image, monitoring=monitoring, scope=chosen_scope(namespaces, namespace_only))
            text = dump_all_yaml([*plan.objects, *([_dev_environment(plan)] if dev else [])])
        warn_of(plan, image_is_stated=image is not None)
        return put_text(text)
    scope = chosen_scope(namespaces, namespace_only)
    with waiting(f"looking at what is deployed on {cluster}"):
        plan = _checked(verb, cluster, mode, image, force, monitoring, scope)
    warn_of(plan)
    if scope is None and not plan.scope.namespaces and not monitoring and plan.namespace != OPERATOR_NAMESPACE:
        options = {"--mode": mode and mode.value, "--image": image, "--context": where.context, "--no-dev": not dev, "--force": force}
        command = shlex.join(["lockstep", "deploy", cluster, *option_words(options), "--namespace-only"])
        if _is_for_one_namespace(verb, plan, image, command, only_looks=diff):
            plan = _checked(verb, cluster, mode, image, force, monitoring, OWN)
    plan = without_release(plan, where.connections, is_stated=bool(image or namespaces))
    if diff:
        from lockstep.cli.clusters.difference import diff_deployment

        return diff_deployment([*plan.objects, *([_dev_environment(plan)] if dev else [])], where.connections)
    if image is None:
        _refuse_unpullable(plan, where.connections)
    api = plan.cluster.cluster.api
    if force and api and not is_same_host(api, server := Client(where.connections).server):  # (later verbs take it for the cluster's, too)
        remember_forced(plan.cluster.cluster.name, server)
    try:
        complete = asyncio.run(carry_out(plan, where.connections, dev, force))
    except KeyboardInterrupt:
        put("", f"Stopped waiting; the deployment goes on in the cluster: lockstep cluster status {plan.typed}")
        raise
    if not complete:
        raise typer.Exit(1)


def _is_for_one_namespace(verb: Verb, plan: DeploymentPlan, image: str | None, command: str, *, only_looks: bool) -> bool:
    """Ask whether an operator of one namespace will do, where this account may not install one of the whole cluster. Nothing is sent.
    `image` was stated; `command` installs that operator.

    Raises Failed where nobody can be asked or the answer is no, and where an administrator must do something first.
    """
    own = planned(verb, plan.named, plan.mode, image, scope=OWN)
    standing = Client(verb.connections).run(lambda connection: standing_of(connection, plan.objects, own.objects))
    chosen = admission(standing)
    if chosen is Admission.AS_PLANNED:
        return False
    place = f"namespace {plan.namespace} alone"
    if only_looks:
        tell(f"note: {standing.missing}; this is what an operator of {place} (--namespace-only) would change:")
        return True
    if chosen is Admission.NEED_DEFINITIONS:
        raise Failed(UNKNOWN_JOBS, *(f"  {command}" for command in definition_commands(plan)))
    if not sys.stdin.isatty():
        sentence = f"{standing.missing}, and nothing was sent. For an operator of {place}, type:"
        raise Failed(sentence, f"  {command}")
    say(f"{standing.missing}. One of {place} needs the role admin there; it sees no nodes and serves no metrics.")
    if not typer.confirm(f"Install an operator for {place}?", default=True):
        raise Failed(f"nothing was sent; an administrator installs the operator of the whole cluster: lockstep deploy {plan.typed}")
    return True


def _refuse_unpullable(plan: DeploymentPlan, connections: Connections) -> None:
    """Raise Failed, before anything is sent, if a first operator's image has a name that no node of plain Kubernetes can pull."""

    async def is_first(connection: Cluster) -> bool:
        listing = await read_object(connection, "Deployment", plan.scope.home, OPERATOR_NAME)
        return listing.seen and listing.first is None

    if unpullable(plan.cluster, plan.typed) is None or not Client(connections).run(is_first):
        return
    raise Failed(
        f"the operator's image would be {plan.image}, which names no registry that the cluster could pull it from, and nothing was sent."
        " Push one, then name it:",
        f"  lockstep build operator --tag {PUSHED} --push",
        f"  lockstep deploy {plan.typed} {plan.choices} --image {PUSHED}",
        f"If every node has the image already: --image {plan.image}",
    )


def warn_of(plan: DeploymentPlan, *, image_is_stated: bool = True) -> None:
    """Say the findings on standard error, each with its line: a dry run's standard output is YAML."""
    if (note := plan.default_image) is not None:
        tell(f"note: {plan.file}:{line_of(note.subject, plan.cluster.lines)}: {note.subject}: {note.message}")
    image = None if image_is_stated else unpullable(plan.cluster, plan.typed)
    for one in (*([image] if image else []), *plan.findings):
        tell(f"warning: {plan.file}:{line_of(one.subject, plan.cluster.lines)}: {one.subject}: {one.message}", f"  → {one.fix}")


def _dev_environment(plan: DeploymentPlan) -> dict[str, Any]:
    return dev_environment(plan.profile, plan.namespace)


def _checked(
    verb: Verb, cluster: str, mode: Mode | None, image: str | None, force: bool, monitoring: bool, scope: Scope | None = None
) -> DeploymentPlan:
    """The plan, for the cluster that the kubeconfig talks to; what isn't said stays as it is deployed there.

    Raises:
        ConfigError: that is not the one that the cluster file names, and `force` is not given.
    """
    embedded = is_embedded(verb, cluster)
    stated = (mode or Mode.AUTO, image, "", monitoring, scope)
    first = planned(verb, cluster, *stated)  # before anything is changed, the embedded cluster's code too
    refuse_other_cluster(verb, first.cluster, force)
    mode_there, image_there, scope_there = as_deployed(first, verb.connections)
    revision = publish_own_code() if embedded else ""
    complete = (mode or mode_there or Mode.AUTO, image or image_there, revision, monitoring, scope or scope_there)
    return first if complete == stated else planned(verb, cluster, *complete)


def as_deployed(plan: DeploymentPlan, connections: Connections) -> tuple[Mode | None, str | None, Scope | None]:
    """Choices of the deployment that is on the cluster, where it may be seen. An image of the default's name goes with this version."""
    name = plan.profile.metadata.name
    mode, image, scope = Client(connections).run(lambda cluster: facts.as_deployed(cluster, name, plan.namespace))
    own = bool(code_volumes(plan.profile)) or repository(short_name(image or "", scope.home)) == repository(OPERATOR_IMAGE)
    return Mode(mode.lower()) if mode else None, None if own else image, scope if scope.namespaces else None


def install_cluster(verb: Verb, cluster: str, mode: Mode) -> DeploymentPlan:
    """Send everything but the dev environment, with an administrator's rights, and wait until the operator is ready.

    Raises ConfigError where the kubeconfig's cluster is not the one that the cluster file names.
    """
    plan, quiet = _checked(verb, cluster, mode, None, False, False), lambda line: None  # (it is a step of something else)

    async def send(connection: Cluster) -> None:
        objects = await with_one_default(connection, await without_unknown_kinds(connection, plan.objects, quiet), quiet)
        sent = await send_permitted(connection, objects, quiet)
        if not sent.is_complete:
            raise Failed(f"you may not send {called(unsent(sent.left)[0].item)}: lockstep deploy {plan.typed} says who does")
        await until_ready(connection, plan.scope.home, OPERATOR_NAME)

    Client(verb.connections).run(send)
    return plan


async def carry_out(plan: DeploymentPlan, connections: Connections, dev: bool, force: bool = False) -> bool:
    """Return True if everything is there and ready."""
    from lockstep.cli.clusters.difference import refuse_losses

    async with await Cluster.connect(connections) as connection:
        with Progress() as progress:
            progress.done("cluster", f"{plan.cluster.cluster.name} at {connection.server}, namespace {plan.namespace}, {plan.choices}")
            await _refuse_what_lacks(connection, plan)
            await refuse_losses(connection, plan.objects, progress, force=force)
            notes: list[str] = []
            objects = await without_unknown_kinds(connection, plan.objects, notes.append)
            objects = await with_one_default(connection, objects, notes.append)
            sent = await send_permitted(connection, objects, lambda text: progress.quietly(f"sending {text}"))
            _tell_sent(sent, [*notes, *sent.notes], progress)
            narrow = await _narrowed(connection, plan, progress)
            up = await _until_operator_is_ready(connection, plan, sent, progress)
            up = await _rails_are_there(connection, plan, progress) and up
            up = up and (not dev or await _start_dev_environment(connection, plan, sent, progress))
    tell_left(plan, sent)
    complete = up and sent.is_complete and narrow
    if complete and not plan.cluster.cluster.api and plan.cluster.cluster.name != EMBEDDED:
        remember_server(plan.cluster.cluster.name, connection.server)
    tell_end(plan, dev=dev, complete=complete)
    return complete


async def _refuse_what_lacks(connection: Cluster, plan: DeploymentPlan) -> None:
    """Raise Failed, before anything is sent, if the cluster lacks what only an administrator can put there."""
    await _refuse_platform(connection, plan)
    if not plan.scope.own:
        for place in dict.fromkeys((plan.namespace, *plan.scope.namespaces)):
            await _refuse_place(connection, plan, place)
        return
    if await sight_of_jobs(connection) is not Sight.SEEN:
        raise Failed(UNKNOWN_JOBS, *(f"  {command}" for command in definition_commands(plan)))
    if await connection.exists("ServiceAccount", plan.namespace, OPERATOR_NAME):
        return
    alive = [job["metadata"]["name"] for job in await all_of(connection, JOB, plan.namespace) if (job.get("status") or {}).get("nodes")]
    if alive:
        raise Failed(
            f"the pods of {', '.join(sorted(alive))} report to the operator of the whole cluster, and nothing was sent: stop or delete"
            f" these jobs first (lockstep stop NAME -n {plan.namespace})"
        )


async def _refuse_platform(connection: Cluster, plan: DeploymentPlan) -> None:
    """A file of OpenShift for what is none: its pods would have no user to run as. Raises Failed."""
    if plan.profile.spec.platform is not Platform.OPENSHIFT:
        return
    try:
        await connection.request("GET", f"/apis/{SCC_GROUP}")
    except ApiError as error:
        if error.status == NOT_FOUND:
            raise Failed(
                f"cluster {plan.cluster.cluster.name} is OpenShift by its file (the default of platform), but the API server at"
                f" {connection.server} has no {SCC_GROUP}, so it is plain Kubernetes; nothing was sent: write platform: kubernetes into the"
                " file, or name another cluster"
            ) from None


async def _refuse_place(connection: Cluster, plan: DeploymentPlan, place: str) -> None:
    """A namespace that the operator of lockstep-system can't work in. What can't be seen is left to the API server. Raises Failed."""

    async def is_missing(kind: str, namespace: str | None, name: str) -> bool:
        listing = await read_object(connection, kind, namespace, name)
        return listing.seen and listing.first is None

    if place != plan.namespace and await is_missing("Namespace", None, place):
        raise Failed(
            f"--namespaces: namespace {place} doesn't exist, and nothing was sent: kubectl create namespace {place}, or leave it out"
        )
    if place == plan.scope.home or (await read_object(connection, "ServiceAccount", place, OPERATOR_NAME)).first is None:
        return
    remove = f"lockstep cluster uninstall {plan.typed}"
    if await is_missing("Deployment", place, OPERATOR_NAME):
        remove = f"kubectl delete serviceaccount {OPERATOR_NAME} -n {place}"
    raise Failed(
        f"namespace {place} has an operator of its own (--namespace-only), so the operator of {plan.scope.home} would do nothing there, and"
        f" nothing was sent: remove the one in {place} first ({remove}), or leave out --namespaces"
    )


async def _narrowed(connection: Cluster, plan: DeploymentPlan, progress: Progress) -> bool:
    """Take away rights that an earlier deployment gave elsewhere; whether none are left."""
    removed, stays = await remove_outdated(connection, plan.scope)
    if removed:
        progress.done("removed", ", ".join(map(called, removed)))
    for item in stays:
        way = f"an administrator removes it: {delete_command(item)} --ignore-not-found"
        progress.done("rights", f"NOT REMOVED: {called(item)}, if it is there; {way}")
    return not stays


def _tell_sent(sent: Sent, notes: list[str], progress: Progress) -> None:
    for note in notes:
        word, _, rest = note.partition(": ") if note.startswith("default: ") else ("left out", "", note.removeprefix("left out "))
        progress.done(word, rest)
    if sent.objects:
        progress.done("applied", counted(sent.objects))
    unchanged = [part.item for part in sent.left if part.state is State.SAME]
    if unchanged:
        progress.done("there", f"{counted(unchanged)}: as they should be; you may not change them")


async def _until_operator_is_ready(connection: Cluster, plan: DeploymentPlan, sent: Sent, progress: Progress) -> bool:
    """Also keeps on the cluster what this deployment has sent, and whether it worked, for `rollback`."""
    if not sent.has("Deployment"):
        return True
    home = plan.scope.home
    record = (await read_record(connection, home)).followed_by(deployment_of(plan.objects, plan.title))
    await write_record(connection, record, home)
    try:
        await until_ready(connection, home, OPERATOR_NAME, lambda text: progress.now(f"operator: {text}"), READY_SECONDS)
    except InstallError as error:
        progress.done("operator", f"NOT READY: {error}")
        return False
    await write_record(connection, record.confirmed(), home)
    progress.done("operator", f"ready, in namespace {home}")
    return True


async def _rails_are_there(connection: Cluster, plan: DeploymentPlan, progress: Progress) -> bool:
    """Return True if pods can have every network that the cluster names, where jobs use RDMA: without one they wait for ever."""
    spec = plan.profile.spec
    if plan.mode is Mode.TCP or not spec.network.rdma.enabled:
        return True
    findings = check_networks(spec, await network_facts(connection, spec, plan.namespace))
    missing = [one for one in findings if one.outcome is Outcome.FAILED and one.subject.endswith(".network")]
    for finding in missing:
        progress.done("network", f"MISSING: {finding.message}\n{'':13}→ {finding.fix}")
    return not missing


async def _start_dev_environment(connection: Cluster, plan: DeploymentPlan, sent: Sent, progress: Progress) -> bool:
    state, later = "", "repeat your command once an administrator has completed the deployment"
    try:
        there = await read_object(connection, KIND, plan.namespace, DEV_ENVIRONMENT)
        if there.first is None and (why := await lacking(connection, plan.profile, plan.namespace, plan.scope.home, sent)):
            progress.done(DEV_ENVIRONMENT, f"NOT MADE: {why}; {later}")
            return False
        state, has_pods = await ensure_dev_environment(connection, dev_environment(plan.profile, plan.namespace))
        progress.done(DEV_ENVIRONMENT, state)
        if not has_pods:
            return True
        nodes = plan.profile.spec.gpus.default_nodes
        pods = await until_up(connection, plan.namespace, nodes, lambda text: progress.now(f"{DEV_ENVIRONMENT}: {text}"), READY_SECONDS)
    except Failed as error:
        text = f"NOT READY: {error}"
        if isinstance(error, UnknownToOperator) and state == "made" and not (sent.has(CLUSTER) or sent.has("Deployment")):
            with suppress(Failed):
                await connection.delete(KIND, plan.namespace, DEV_ENVIRONMENT)
                text = f"REMOVED again: {error}; {later}"
        progress.done(DEV_ENVIRONMENT, text)
        return False
    where = ", ".join(f"{pod['metadata']['name']} on {pod['spec']['nodeName']}" for pod in pods)
    progress.done(DEV_ENVIRONMENT, f"ready: {where}")
    return True


def tell_left(plan: DeploymentPlan, sent: Sent) -> None:
    """Print what is missing, differs or can't be seen, and the commands by which an administrator puts it right."""
    left = unsent(sent.left)
    if not left:
        return
    sure = any(part.state is not State.UNSEEN for part in left)
    put("", "NOT COMPLETE: you may not send these:" if sure else "You may neither send nor see these, so their state is unknown:")
    for part in left:
        put(f"  {called(part.item)}: {part.state.value}{f' ({part.reason})' if part.reason else ''}")
    if plan.scope.own:
        put("An administrator of the cluster types this once, with the files that were just written; then repeat your command:")
        return put(*(f"  {command}" for command in definition_commands(plan)))
    put("An administrator of the cluster types, with the cluster file:")
    put(f"  lockstep deploy {plan.typed} {plan.choices} --no-dev")
    put(f"or, with the files that were just written, in which the operator's image is {plan.sent_image} (--image names another):")
    for command in admin_commands(plan.cluster.cluster.name, *objects_for_administrator([part.item for part in left])):
        put(f"  {command}")
    if sure:
        put(f"Then repeat: lockstep deploy {plan.typed} {plan.choices}")


def tell_end(plan: DeploymentPlan, *, dev: bool, complete: bool) -> None:
    """The cluster's notes, what is ready, and the next commands."""
    if plan.profile.spec.notes:
        put("", f"Notes of {plan.profile.metadata.name}:", *plan.profile.spec.notes.rstrip().splitlines())
    if not complete:
        put("", f"What is wrong: lockstep doctor {plan.typed}")
        return
    warned = f", with {len(plan.findings)} of the cluster file's lines to mend (warnings above)" if plan.findings else ""
    put("", f"Ready{warned}. Next:")
    for command, meaning in plan.next_commands(dev=dev):
        put(f"  {command:<62} # {meaning}")
    use(plan.named)
