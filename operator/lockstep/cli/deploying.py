"""The steps of `lockstep deploy`: send, wait for the operator, start the dev environment, and say what came of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.api.errors import Failed
from lockstep.api.names import DEV_ENVIRONMENT, OPERATOR_NAME
from lockstep.cli.deployed import tell_end, tell_left
from lockstep.cli.deployment import remember_server
from lockstep.cli.progress import Progress
from lockstep.cli.target import EMBEDDED

if TYPE_CHECKING:
    from lockstep.cli.deploy import Deployment
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.send import Sent


SCC_GROUP = "security.openshift.io"


async def carry_out(plan: Deployment, context: str | None, dev: bool, seconds: float) -> bool:
    """Whether everything is there and ready."""
    from lockstep.platforms.kubernetes.cluster import Cluster
    from lockstep.platforms.kubernetes.install import with_one_default, without_unknown_kinds
    from lockstep.platforms.kubernetes.send import send_permitted

    async with await Cluster.connect(context) as connection:
        with Progress() as progress:
            progress.done("cluster", f"{plan.cluster.cluster.name} at {connection.server}, namespace {plan.namespace}, {plan.choices}")
            await _refuse_what_lacks(connection, plan)
            notes: list[str] = []
            objects = await without_unknown_kinds(connection, plan.objects, notes.append)
            objects = await with_one_default(connection, objects, notes.append)
            sent = await send_permitted(connection, objects, lambda text: progress.quietly(f"sending {text}"))
            _tell_sent(sent, notes, progress)
            narrow = await _narrowed(connection, plan, progress)
            up = await _until_operator_is_ready(connection, plan, sent, progress, seconds)
            up = await _rails_are_there(connection, plan, progress) and up
            up = up and (not dev or await _start_dev_environment(connection, plan, progress, seconds))
    tell_left(plan, sent)
    complete = up and sent.is_complete and narrow
    if complete and not plan.cluster.cluster.api and plan.cluster.cluster.name != EMBEDDED:
        remember_server(plan.cluster.cluster.name, connection.server)
    tell_end(plan, dev=dev, complete=complete)
    return complete


async def _refuse_what_lacks(connection: Cluster, plan: Deployment) -> None:
    """What only an administrator can put there, before anything is sent. Raises Failed."""
    from lockstep.plan.scope import definitions_command
    from lockstep.platforms.kubernetes.remove import jobs_of
    from lockstep.platforms.kubernetes.send import is_served

    await _refuse_platform(connection, plan)
    if not plan.scope.own:
        for place in dict.fromkeys((plan.namespace, *plan.scope.namespaces)):
            await _refuse_place(connection, plan, place)
        return
    if not await is_served(connection):
        raise Failed(
            "this cluster doesn't know TrainingJobs, and nothing was sent: an administrator of the cluster types once, in a checkout:",
            f"  {definitions_command(plan.profile, plan.namespace)}",
        )
    if await connection.exists("ServiceAccount", plan.namespace, OPERATOR_NAME):
        return
    alive = [job["metadata"]["name"] for job in await jobs_of(connection, plan.namespace) if (job.get("status") or {}).get("nodes")]
    if alive:
        raise Failed(
            f"the pods of {', '.join(sorted(alive))} report to the operator of the whole cluster, and nothing was sent: suspend or delete these jobs first "
            f"(lockstep stop NAME -n {plan.namespace})"
        )


async def _refuse_platform(connection: Cluster, plan: Deployment) -> None:
    """A file of OpenShift for what is none: its pods would have no user to run as. Raises Failed."""
    from lockstep.api.cluster import Platform
    from lockstep.platforms.kubernetes.cluster import NOT_FOUND, ApiError

    if plan.profile.spec.platform is not Platform.OPENSHIFT:
        return
    try:
        await connection.request("GET", f"/apis/{SCC_GROUP}")
    except ApiError as error:
        if error.status == NOT_FOUND:
            raise Failed(
                f"cluster {plan.cluster.cluster.name} is OpenShift by its file (platform, which is OpenShift where the file doesn't say), but the API server at "
                f"{connection.server} has no {SCC_GROUP}, as plain Kubernetes; nothing was sent: write platform: Kubernetes into the file, or name the cluster that is meant"
            ) from None


async def _refuse_place(connection: Cluster, plan: Deployment, place: str) -> None:
    """A namespace that the operator of lockstep-system can't work in. What can't be seen is left to the API server. Raises Failed."""
    from lockstep.platforms.kubernetes.cluster import FORBIDDEN, ApiError

    async def is_missing(kind: str, namespace: str | None, name: str) -> bool:
        try:
            return not await connection.exists(kind, namespace, name)
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            return False

    if place != plan.namespace and await is_missing("Namespace", None, place):
        raise Failed(
            f"--namespaces: namespace {place} doesn't exist, and nothing was sent: kubectl create namespace {place}, or leave it out"
        )
    if place == plan.scope.home or not await _has_own_operator(connection, place):
        return
    remove = f"lockstep uninstall {plan.cluster.cluster.name}"
    if await is_missing("Deployment", place, OPERATOR_NAME):
        remove = f"kubectl delete serviceaccount {OPERATOR_NAME} -n {place}"
    raise Failed(
        f"namespace {place} has an operator of its own (--namespace-only), which that of {plan.scope.home} would leave alone, and nothing was sent: "
        f"remove it first ({remove}), or leave out --namespaces"
    )


async def _has_own_operator(connection: Cluster, place: str) -> bool:
    from lockstep.platforms.kubernetes.cluster import FORBIDDEN, ApiError

    try:
        return await connection.exists("ServiceAccount", place, OPERATOR_NAME)
    except ApiError as error:
        if error.status != FORBIDDEN:
            raise
        return False


async def _narrowed(connection: Cluster, plan: Deployment, progress: Progress) -> bool:
    """Take away rights that an earlier deployment gave elsewhere; whether none are left."""
    from lockstep.plan.deploy import called
    from lockstep.platforms.kubernetes.send import remove_outdated

    removed, stays = await remove_outdated(connection, plan.scope)
    if removed:
        progress.done("removed", ", ".join(map(called, removed)))
    for item in stays:
        metadata = item["metadata"]
        place = f" -n {metadata['namespace']}" if "namespace" in metadata else ""
        progress.done(
            "rights",
            f"NOT REMOVED: {called(item)}, if it is there; an administrator: kubectl delete {item['kind'].lower()} {metadata['name']}{place} --ignore-not-found",
        )
    return not stays


def _tell_sent(sent: Sent, notes: list[str], progress: Progress) -> None:
    from lockstep.plan.deploy import State, counted

    for note in notes:
        word, _, rest = note.partition(": ") if note.startswith("default: ") else ("left out", "", note.removeprefix("left out "))
        progress.done(word, rest)
    if sent.objects:
        progress.done("applied", counted(sent.objects))
    there = [part.item for part in sent.left if part.state is State.SAME]
    if there:
        progress.done("there", f"{counted(there)}: as they should be, and not yours to change")


async def _until_operator_is_ready(connection: Cluster, plan: Deployment, sent: Sent, progress: Progress, seconds: float) -> bool:
    """Also keeps on the cluster what this deployment has sent, and whether it worked, for `rollback`."""
    from lockstep.platforms.kubernetes.install import InstallError, until_ready
    from lockstep.platforms.kubernetes.record import deployment_of, read_record, write_record

    if not sent.has("Deployment"):
        return True
    home = plan.scope.home
    record = (await read_record(connection, home)).followed_by(deployment_of(plan.objects, plan.said))
    await write_record(connection, record, home)
    try:
        await until_ready(connection, home, OPERATOR_NAME, lambda text: progress.now(f"operator: {text}"), seconds)
    except InstallError as error:
        progress.done("operator", f"NOT READY: {error}")
        return False
    await write_record(connection, record.confirmed(), home)
    progress.done("operator", f"ready, in namespace {home}")
    return True


async def _rails_are_there(connection: Cluster, plan: Deployment, progress: Progress) -> bool:
    """Whether pods can have every network that the cluster names, where jobs use RDMA: without one they wait for ever."""
    from lockstep.cli.deploy import Mode
    from lockstep.plan.doctorseen import Verdict
    from lockstep.plan.doctorsite import fabric
    from lockstep.platforms.kubernetes.survey import survey_rails

    spec = plan.profile.spec
    if plan.mode is Mode.TCP or not spec.network.rdma.enabled:
        return True
    missing = [one for one in fabric(await survey_rails(connection, spec, plan.namespace), spec) if one.verdict is Verdict.FAILED]
    for finding in missing:
        progress.done("network", f"MISSING: {finding.said}\n{'':13}→ {finding.fix}")
    return not missing


async def _start_dev_environment(connection: Cluster, plan: Deployment, progress: Progress, seconds: float) -> bool:
    from lockstep.platforms.kubernetes.devenv import dev_environment, ensure_dev_environment, until_up

    try:
        found, has_pods = await ensure_dev_environment(connection, dev_environment(plan.profile, plan.namespace))
        progress.done(DEV_ENVIRONMENT, found)
        if not has_pods:
            return True
        nodes = plan.profile.spec.gpus.default_nodes
        pods = await until_up(connection, plan.namespace, nodes, lambda text: progress.now(f"{DEV_ENVIRONMENT}: {text}"), seconds)
    except Failed as error:
        progress.done(DEV_ENVIRONMENT, f"NOT READY: {error}")
        return False
    where = ", ".join(f"{pod['metadata']['name']} on {pod['spec']['nodeName']}" for pod in pods)
    progress.done(DEV_ENVIRONMENT, f"ready: {where}")
    return True
