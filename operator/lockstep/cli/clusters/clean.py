"""`lockstep cluster clean|uninstall|rollback`: back from what `lockstep deploy` has done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import DEV_ENVIRONMENT, OPERATOR_NAME
from lockstep.api.objects import CLAIM
from lockstep.cli.clusters.deploy import ClusterArgument, as_deployed
from lockstep.cli.clusters.deploymentplan import DeploymentPlan, Mode, planned
from lockstep.cli.clusters.helm import operator_release
from lockstep.cli.shared.folders import forget, was_forced
from lockstep.cli.shared.jobargs import TargetOptions, acts_on
from lockstep.cli.shared.target import refuse_other_cluster
from lockstep.cli.shared.terminal import Progress, confirm
from lockstep.kube.cluster import Client, Cluster
from lockstep.plan.cluster.scope import ADMISSION, Scope, scope_of
from lockstep.plan.ship.deploy import CLUSTER, called, delete_command, is_default, jobs_using, objects_of_cluster, removable_claims
from lockstep.platforms.clusters import remove
from lockstep.platforms.clusters.devenv import dev_environment
from lockstep.platforms.clusters.install import objects_for_jobs, until_ready, without_unknown_kinds
from lockstep.platforms.clusters.listings import forbidden, is_there, read_object
from lockstep.platforms.clusters.record import NAME as RECORD
from lockstep.platforms.clusters.record import read_record, write_record
from lockstep.platforms.clusters.send import APPLY, remove_outdated, send_permitted
from lockstep.platforms.output import put
from lockstep_spec.words import listed

if TYPE_CHECKING:
    from lockstep.cli.shared.places import Verb

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


@acts_on("context")
def clean(
    where: TargetOptions,
    cluster: ClusterArgument,
    pvcs: Annotated[
        bool, typer.Option("--pvcs", help="Also delete the claims of /workspace and /datasets, with everything on them.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Remove the dev environment.

    It also removes the jobs' service account if no job is left. Claims, the operator and other jobs stay.

    With --pvcs it asks you, and then also deletes the cluster's claims and those of the dev environment's pods. It deletes no other
    claims.

    Example: lockstep cluster clean barcelona
    """
    plan = _plan(where.verb, cluster)
    Client(where.connections).run(lambda connection: _clean(connection, plan, pvcs=pvcs, yes=yes))


@acts_on("context")
def uninstall(
    where: TargetOptions,
    cluster: ClusterArgument,
    jobs: Annotated[bool, typer.Option("--jobs", help="Also delete every TrainingJob in every namespace. They save first.")] = False,
    cluster_only: Annotated[
        bool,
        typer.Option("--cluster-only", help="Remove only this TrainingCluster, and rights that no other one needs. Lockstep stays."),
    ] = False,
    yes: YesOption = False,
) -> None:
    """Remove the operator, the TrainingClusters and the CRDs.

    It refuses while there are TrainingJobs; --jobs deletes them, too. Claims stay.

    If the operator is one of a single namespace, the CRDs and stopped jobs stay. --cluster-only removes one TrainingCluster of several;
    it refuses while jobs use it.

    Example: lockstep cluster uninstall barcelona

    Example: lockstep cluster uninstall deployed-by-mistake --cluster-only
    """
    if jobs and cluster_only:
        raise ConfigError("--jobs deletes the jobs of all clusters, and --cluster-only removes one: leave out one of them")
    plan = _plan(where.verb, cluster)
    client = Client(where.connections)
    if cluster_only:
        client.run(lambda connection: _uninstall_cluster(connection, plan, yes=yes))
    else:
        client.run(lambda connection: _uninstall(connection, plan, jobs=jobs, yes=yes))
    forget(plan.cluster.cluster.name, plan.remembered)


@acts_on("context")
def rollback(where: TargetOptions, cluster: ClusterArgument, yes: YesOption = False) -> None:
    """Restore what the last deployment replaced.

    It restores the operator and the TrainingCluster. A second rollback undoes the first. CRDs stay as they are.

    Example: lockstep cluster rollback barcelona
    """
    plan = _plan(where.verb, cluster)  # refuses the wrong cluster
    Client(where.connections).run(lambda connection: _rollback(connection, plan.scope.home, yes))


def _plan(verb: Verb, cluster: str) -> DeploymentPlan:
    """Plan of what was sent, whatever it was sent with. Raises ConfigError for the wrong cluster."""
    plan = planned(verb, cluster, Mode.AUTO)
    refuse_other_cluster(verb, plan.cluster)
    scope = as_deployed(plan, verb.connections)[2]
    return planned(verb, cluster, Mode.AUTO, monitoring=scope is None or not scope.own, scope=scope)


def ask(question: str, *, yes: bool) -> None:
    """Ask, unless `yes`. Raises ConfigError where nobody can be asked; typer's Abort when the answer is no."""
    if not yes:
        confirm(question, f"{question} Without a terminal, confirm with --yes")


async def _clean(connection: Cluster, plan: DeploymentPlan, *, pvcs: bool, yes: bool) -> None:
    others = sorted(job["metadata"]["name"] for job in await remove.all_of(connection, remove.JOB, plan.namespace) if not _is_dev(job))
    there = (await connection.list(CLAIM, plan.namespace))["items"] if pvcs else []
    claims = list(removable_claims(plan.cluster, DEV_ENVIRONMENT, there))
    if claims and others:
        raise ConfigError(
            f"{', '.join(others)} of namespace {plan.namespace} may use the claims: delete these jobs first, or leave out --pvcs"
        )
    if claims:
        named = ", ".join(claim["metadata"]["name"] for claim in claims)
        ask(f"Delete the claims {named} of namespace {plan.namespace}, with every file on them (code, models, checkpoints)?", yes=yes)
    account = [] if others else list(reversed(objects_for_jobs(plan.profile, plan.namespace)))
    stays = await remove.may_not_delete(connection, [dev_environment(plan.profile, plan.namespace), *account, *claims])
    if stays and _is_dev(stays[0]):
        raise Failed(f"you may not delete jobs of namespace {plan.namespace}, and nothing was removed: the role edit there lets you")
    with Progress() as progress:
        progress.quietly(f"{DEV_ENVIRONMENT} saves and ends")
        await remove.remove_dev_environment(connection, plan.namespace, print)
        await remove.remove(connection, [item for item in (*account, *claims) if item not in stays], print)
    for item in stays:
        put(f"{called(item)} stays: you may not delete it")
    if others:
        jobs = f"Job {others[0]} stays, with its" if len(others) == 1 else f"Jobs {', '.join(others)} stay, with their"
        put(f"{jobs} service account: lockstep delete NAME -n {plan.namespace}")
    note = "" if pvcs else "; claims stay (--pvcs deletes them)"
    put(f"The dev environment of namespace {plan.namespace} is removed{note}. The operator stays: lockstep cluster uninstall {plan.typed}")


def _is_dev(job: dict[str, Any]) -> bool:
    return bool(job["metadata"]["name"] == DEV_ENVIRONMENT)


async def _uninstall(connection: Cluster, plan: DeploymentPlan, *, jobs: bool, yes: bool) -> None:
    if release := (await operator_release(connection, plan.objects))[0]:
        uninstall = f"helm uninstall {release} -n {plan.scope.home}"
        raise Failed(f"the operator is helm's, and nothing was removed: {uninstall} removes it, and keeps CRDs, jobs and claims")
    place = plan.namespace if plan.scope.own else None
    bounds = [item for item in plan.objects if item["kind"] in ADMISSION]
    stays = await remove.may_not_delete(connection, bounds)  # they bound an account that is gone then
    going = [item for item in plan.objects if item not in stays]
    await _refuse_without_rights(connection, remove.uninstalled(going, plan.scope.home))
    objects = await without_unknown_kinds(connection, going, lambda line: None)
    jobs_there = await remove.all_of(connection, remove.JOB, place)
    if not jobs:
        _refuse_while_jobs(jobs_there, plan)
    names = ", ".join(sorted(map(_place_of, jobs_there)))
    doomed = f", and of the jobs {names}," if jobs_there and jobs else ""
    if plan.scope.own:
        what = f"the operator of namespace {plan.namespace} and its cluster"
    else:  # (all TrainingClusters go with their definition)
        clusters = sorted(cluster["metadata"]["name"] for cluster in await remove.all_of(connection, CLUSTER))
        several = f"s {', '.join(clusters)}" if len(clusters) > 1 else ""
        what = f"Lockstep's operator, TrainingCluster{several} and CRDs"
    ask(f"Remove {what}{doomed} from {connection.server}?", yes=yes)
    await remove.uninstall(connection, objects, print, plan.scope, with_jobs=jobs or not plan.scope.own)
    put(f"Lockstep is removed; claims stay. To install it again: lockstep deploy {plan.typed}")


async def _uninstall_cluster(connection: Cluster, plan: DeploymentPlan, *, yes: bool) -> None:
    name = plan.profile.metadata.name
    if plan.scope.own:
        raise ConfigError(f"the operator of namespace {plan.namespace} has one cluster, and goes with it: leave out --cluster-only")
    clusters, jobs = await remove.all_of(connection, CLUSTER), await remove.all_of(connection, remove.JOB)
    in_the_way = sorted(map(_place_of, jobs_using(name, clusters, jobs)))
    if in_the_way:
        raise ConfigError(
            f"jobs use TrainingCluster {name} ({', '.join(in_the_way)}): delete them first (lockstep delete NAME -n NAMESPACE), or give"
            " them another spec.cluster"
        )
    record = await read_record(connection, plan.scope.home)
    others = [item for one in (record.current, record.previous) if one is not None and name not in one.clusters for item in one.objects]
    going = objects_of_cluster(plan.objects, name, plan.namespace, clusters, [*others, *jobs])
    present = [item for item in going if await is_there(connection, item)]
    if present:
        await _refuse_without_rights(connection, present)
        ask(f"Remove {', '.join(map(called, present))} from {connection.server}?", yes=yes)
    await remove.remove(connection, present, print)
    if (cleared := record.without(name)) != record:
        await write_record(connection, cleared, plan.scope.home)
    is_its_own = not was_forced(plan.cluster.cluster.name, connection.server)
    _tell_rest(
        plan,
        clusters,
        is_its_own=is_its_own,
        was_there=bool(present),
        sent_by_it=record.current is not None and name in record.current.clusters,
    )


def _tell_rest(plan: DeploymentPlan, clusters: list[dict[str, Any]], *, is_its_own: bool, was_there: bool, sent_by_it: bool) -> None:
    """Print what stays, and the commands for it. `is_its_own` False: the file is of another cluster, so no verb comes here any more."""
    name = plan.cluster.cluster.name
    left = [cluster for cluster in clusters if cluster["metadata"]["name"] != plan.profile.metadata.name]
    names = ", ".join(sorted(cluster["metadata"]["name"] for cluster in left)) or "no TrainingCluster"
    put(
        f"{f'TrainingCluster {name} is removed' if was_there else f'TrainingCluster {name} is not on the cluster'}; Lockstep stays, with"
        f" {names}."
    )
    if is_its_own:
        put(f"To remove the service account of namespace {plan.namespace} if no job needs it: lockstep cluster clean {plan.typed}")
    if left and not any(map(is_default, left)):
        put("Jobs that name no cluster have none now: the next lockstep deploy makes its cluster their default")
    if sent_by_it:
        put(
            f"The operator still has the settings of {name}'s file. For those of the other cluster's file: lockstep deploy"
            f" {names if len(left) == 1 else 'CLUSTER'}"
        )


def _refuse_while_jobs(jobs: list[dict[str, Any]], plan: DeploymentPlan) -> None:
    """Without their definition no job stays; without its operator one whose pods are gone. Raises ConfigError."""
    scope, cluster = plan.scope, plan.typed
    in_the_way = [job for job in jobs if not scope.own or (job.get("status") or {}).get("nodes")]
    if not in_the_way:
        return
    names = ", ".join(sorted(map(_place_of, in_the_way)))
    others = [job for job in in_the_way if not _is_dev(job) or job["metadata"]["namespace"] != plan.namespace]
    state = f"jobs have pods that report to this operator ({names})"
    removal = f"stop them first (lockstep stop NAME -n {scope.home})"
    everything = "or use --jobs, which deletes all jobs of the namespace"
    if not scope.own:
        state = f"there are TrainingJobs ({names}), which would go with their definition"
        removal = "delete them first (lockstep delete NAME -n NAMESPACE)"
        everything = "or use --jobs, which deletes all jobs"
    if len(others) == len(in_the_way):
        raise ConfigError(f"{state}: {removal}, {everything}")
    clean = f"remove the dev environment first: lockstep cluster clean {cluster}"
    if not others:
        raise ConfigError(f"{state}: {clean}")
    raise ConfigError(f"{state}: {clean}; of the others, {removal}, {everything}")


def _place_of(job: dict[str, Any]) -> str:
    return f"{job['metadata']['namespace']}/{job['metadata']['name']}"


async def _refuse_without_rights(connection: Cluster, objects: list[dict[str, Any]]) -> None:
    """All or nothing: half of an operator is worse than either."""
    forbidden = await remove.may_not_delete(connection, objects)
    if forbidden:
        names = listed([called(item) for item in forbidden])
        raise Failed(f"you may not delete {names}, and nothing was removed: an administrator of the cluster does this")


async def _rollback(connection: Cluster, home: str, yes: bool) -> None:
    if not (await read_object(connection, "ConfigMap", home, RECORD)).seen:
        raise Failed(
            f"you may not look into namespace {home}, where the operator and its earlier deployments are, and nothing was changed: "
            "an administrator of the cluster does this"
        )
    record = await read_record(connection, home)
    if record.previous is None or record.current is None:
        raise ConfigError(f"there is nothing to go back to: ConfigMap {home}/lockstep-deployed knows of no earlier deployment that worked")
    refused = await forbidden(connection, {}, APPLY, list(record.previous.objects))
    if refused:
        raise Failed(f"you may not change {called(refused[0])}, and nothing was changed: an administrator of the cluster does this")
    ask(f"Go back from {record.current.title} to {record.previous.title}?", yes=yes)
    with Progress() as progress:
        sent = await send_permitted(connection, list(record.previous.objects), lambda text: progress.quietly(f"sending {text}"))
        if sent.left:
            raise Failed(f"{called(sent.left[0].item)} was refused: {sent.left[0].reason}: lockstep deploy sets everything right again")
        await write_record(connection, record.turned_back(), home)
        deployments = (item for item in record.previous.objects if item["kind"] == "Deployment")
        await remove_outdated(connection, next(map(scope_of, deployments), Scope()))
        await until_ready(connection, home, OPERATOR_NAME, lambda text: progress.now(f"operator: {text}"))
    before = {called(item) for item in record.previous.objects}
    left = [item for item in record.current.objects if called(item) not in before and await is_there(connection, item)]
    put(f"Back to {record.previous.title}; CRDs stay as they are, and jobs that run go on.")
    put(*(f"{called(item)} was not part of that deployment and stays. To remove it: {delete_command(item)}" for item in left))
