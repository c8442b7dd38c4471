"""`lockstep run --in-namespace`: run a job without operator and CRD, for a user who holds the role `admin` in one namespace.

The same objects as the operator's, owned by the run's ConfigMap: deleting that one removes all but the claims. The agent comes in a
ConfigMap, since there is no operator's image to bring it. Agents exit at the end here, and node 0's exit code is the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from lockstep.api import names
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object, condition, has_ended, is_running, is_true
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.expiry import LEFT_SECONDS, expiring
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.facts import Listing
from lockstep.plan.cluster.fitting import never_enough
from lockstep.plan.observed import Observed
from lockstep.plan.pages.logs import LogSelection
from lockstep.plan.reconcile.accept import no_service_account
from lockstep.plan.reconcile.clocks import Earlier
from lockstep.plan.reconcile.conditions import View, waits_for
from lockstep.plan.reconcile.placing import Placing, placing
from lockstep.plan.waiting.containers import is_scheduled
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.clusters.listings import list_kind, read_object
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.reader import create_claims
from lockstep.platforms.jobs.keeper import exit_code, keeper, keeper_name
from lockstep.platforms.jobs.logs import follow, has_run_ended
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.platforms.kubernetes.objects import Run, objects, prepare
from lockstep.platforms.kubernetes.status import observe_run
from lockstep.platforms.output import put, put_text
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import Say
from lockstep.programs import meanwhile
from lockstep_spec.exits import DONE, FAILED
from lockstep_spec.words import number_of

LOOK_SECONDS = 1.0
DRAIN_SECONDS = 5.0
GONE_SECONDS = 240.0
OWN = "lockstep:"
"""Beginning of the command's own lines, which are not of node 0's log."""
LEAVE_SECONDS = 60.0
RESULT_SECONDS = 900.0
"""Time limit of a run that is removed at its end, unless a person sets one."""
Leave = Callable[[], Awaitable[None]]


async def run_in_namespace(order: Order, target: Target, earlier: Earlier | None) -> int:
    """Start the job and follow it. `earlier`: the failed run to go on from, whose volume has how it failed: agents look there."""
    job, place = order.job, target.namespace
    async with target.client.connected() as cluster:
        run = prepare(job, await with_image(cluster, job, order.cluster.profile, place), place, earlier)
        if lacking := await lacking_nodes(cluster, run):
            _print(f"{OWN} {lacking}; the job waits until it has them")
        await _start(cluster, run, _print)
        try:
            code = await _follow(cluster, run, _print)
        except asyncio.CancelledError:
            put_text(_detached(run))
            raise
        await _scale(cluster, run, 0)
        await cluster.delete("Job", place, keeper_name(run.name))
        _print(
            f"{'Complete' if code == DONE else 'Failed'}: scaled to zero; kubectl delete configmap {run.frozen.name} -n {place} removes"
            " all but the claims"
        )
        return DONE if code == DONE else FAILED


async def run_until(cluster: Cluster, run: Run, say: Say, heard: asyncio.Event, seconds: float | None, leave: Leave | None = None) -> None:
    """Start, follow until what was waited for is heard or node 0 has ended, then remove all but the claims. `leave` is called while the
    pods are still there. `seconds`: limit that a person set, who then waits for nodes that the cluster doesn't have now, too.

    They are removed however this ends, also when the process is killed (`expiring`). Raises ConfigError, ApiError, Failed.
    """
    if lacking := await lacking_nodes(cluster, run):
        if seconds is None:
            raise Failed(f"{lacking}; --timeout SECONDS waits for nodes all the same, such as an autoscaler's")
        say(f"{OWN} {lacking}")
    waited, limit = "", RESULT_SECONDS if seconds is None else seconds

    def hear(line: str) -> None:
        nonlocal waited
        waited = line.removeprefix(OWN) if line.startswith(OWN) else waited
        say(line)

    async with expiring(cluster, run.namespace, run.name, run.resolved.image) as owner:
        await _start(cluster, run, hear, owner)
        try:
            async with meanwhile(_follow(cluster, run, hear)) as following, meanwhile(heard.wait()) as hearing:
                done, _ = await asyncio.wait((following, hearing), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                if leave is not None:
                    await _left(leave, say)
            finally:
                await cluster.delete("ConfigMap", run.namespace, run.frozen.name)
                say(f"{OWN} {run.name} is removed; its claims stay")
    if not done:
        raise Failed(f"{run.name} has no result after {limit:.0f} s (--timeout);{waited or ' it said nothing'}")
    if following in done:
        following.result()  # (which raises what ended it)


async def _left(leave: Leave, say: Say) -> None:
    """Call `leave`; that it can't do its work is no reason to keep the pods."""
    try:
        async with asyncio.timeout(LEAVE_SECONDS):
            await leave()
    except (Failed, ApiError, OSError, TimeoutError) as error:
        say(f"{OWN} what the run wrote to its volume may be left there: {error or 'its pods do not answer'}")


async def lacking_nodes(cluster: Cluster, run: Run) -> str:
    """Sentence that the cluster has too few nodes for the run even when all of it is idle; '' if it has enough, or your account may not
    list nodes.
    """
    nodes = await list_kind(cluster, "Node")
    (stateful_set,) = [item for item in objects(run) if item["kind"] == "StatefulSet"]
    return never_enough(stateful_set["spec"]["template"], run.frozen.nodes, nodes.items) if nodes.seen else ""


def _print(line: str) -> None:
    put(line, flush=True)


def _detached(run: Run) -> str:
    where = f"-n {run.namespace}"
    return (
        f"\nlockstep: job {run.name} runs on; half a minute after its end its pods go and its nodes are free (Job {keeper_name(run.name)}"
        f" sees to that)\nFollow it: lockstep logs {run.name} {where} -f\nHow it ended: lockstep why {run.name} {where}"
        f"\nStop it: kubectl delete configmap {run.frozen.name} {where} (checkpoints and claims stay)\n"
    )


async def _ended_since(cluster: Cluster, run: Run) -> int:
    """Return the exit code of a run whose pods have gone at its end, by the record on its volume. Raises ConfigError where it says none."""
    where = f"-n {run.namespace}"
    status = (await observe_run(JobObserver(cluster), cluster, run.as_job, read=True)).job["status"]
    if not has_ended(status):
        raise ConfigError(
            f"{run.name} has no pods and has not ended, as far as can be seen (lockstep why {run.name} {where}): start it again with"
            f" lockstep run -f FILE --in-namespace {where}"
        )
    end = condition(status, "Progressing")
    _print(f"{end['reason']}: {end['message']}; its nodes are free, its log: lockstep logs {run.name} {where}")
    return FAILED if is_true(status, "Failed") else DONE


def _owning_run(stateful_set: Object, name: str) -> str | None:
    """Name of the ConfigMap of the run that made it; None: this command didn't."""
    owner = next(iter(stateful_set["metadata"].get("ownerReferences", [])), {"kind": "", "name": ""})
    ours = owner["kind"] == "ConfigMap" and owner["name"].startswith(names.run_name(name, ""))
    return str(owner["name"]) if ours else None


async def _start(cluster: Cluster, run: Run, say: Say, over: Object | None = None) -> None:
    """Create the run's objects. `over`: the ownerReference of the object that all of them go with; None: they stay until somebody deletes
    them.
    """
    await _refuse_taken_name(cluster, run)
    account = run.resolved.profile.spec.security.service_account
    if await cluster.get("ServiceAccount", run.namespace, account) is None:
        raise ConfigError(no_service_account(account, run.namespace))
    await _make_room(cluster, run, say)
    first, *rest = objects(run)
    if over is not None:
        first["metadata"]["ownerReferences"] = [over]
    try:
        await create_claims(cluster, run.resolved)
        created = await cluster.create(first)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": run.frozen.name, "uid": created["metadata"]["uid"], "controller": True}
        for item in rest:
            item["metadata"]["ownerReferences"] = [owner]
            created = await cluster.create(item)
        if over is None:  # (the StatefulSet comes last)
            await _start_keeper(cluster, {**created, "spec": item["spec"]}, owner, say)
    except BaseException as error:  # also Ctrl-C: a run that was half made must not stay
        with contextlib.suppress(ApiError, OSError):
            await cluster.delete("ConfigMap", run.namespace, run.frozen.name)
        if isinstance(error, ApiError):
            raise ConfigError(f"the API server refused an object of the job: {error.message}") from None
        raise
    end = "leaves it running" if over is None else "removes it"
    say(f"{OWN} {run.name} on {number_of(run.frozen.nodes, 'node')} in namespace {run.namespace}; Ctrl-C {end}")


async def _refuse_taken_name(cluster: Cluster, run: Run) -> None:
    """Raise ConfigError where a TrainingJob has the run's name, also one without pods: no verb could tell the two apart."""
    if (await read_object(cluster, "TrainingJob", run.namespace, run.name)).first is not None:
        delete = f"lockstep delete {run.name} -n {run.namespace}"
        raise ConfigError(
            f"namespace {run.namespace} has a TrainingJob {run.name}, and nothing was created: give this run another name, or remove the"
            f" job first ({delete})"
        )


async def _make_room(cluster: Cluster, run: Run, say: Say) -> None:
    """Remove a run of this name that has ended, and wait until its objects, and the pods of any earlier one, are gone: their log must not
    be taken for this one's. Raises ConfigError for a run that goes on, or that is an operator's.
    """
    stateful_set = await cluster.get("StatefulSet", run.namespace, run.name)
    left: list[tuple[str, str]] = []
    if stateful_set is not None:
        conflict = f"StatefulSet {run.name} already exists in namespace {run.namespace}"
        owner = _owning_run(stateful_set, run.name)
        if owner is None:
            raise ConfigError(f"{conflict}, and this command did not create it: give this job another name")
        if not await has_run_ended(cluster, run.namespace, run.name):
            raise ConfigError(f"{conflict} and runs: {_ways_out(stateful_set, run, owner)}")
        say(f"{OWN} removing the objects of the finished run {owner}")
        await cluster.delete("ConfigMap", run.namespace, owner)
        left = [(item["kind"], item["metadata"]["name"]) for item in [*objects(run)[1:], *keeper(stateful_set, {})]]
    end = time.monotonic() + GONE_SECONDS
    while any([await cluster.get(kind, run.namespace, name) for kind, name in left]) or await _pods(cluster, run):
        if time.monotonic() > end:
            raise ConfigError(
                f"objects of an earlier run {run.name} still exist after {GONE_SECONDS:.0f} s: kubectl get all -n {run.namespace}"
            )
        await asyncio.sleep(LOOK_SECONDS)


async def _pods(cluster: Cluster, run: Run) -> list[Object]:
    return [*(await cluster.list("Pod", run.namespace, {"labelSelector": f"{names.LABEL_JOB}={run.name}"}))["items"]]


async def _start_keeper(cluster: Cluster, stateful_set: Object, owner: Object, say: Say) -> None:
    """Create the keeper. Without the right to create it the run goes on, and holds its nodes at its end until somebody follows it."""
    try:
        for item in keeper(stateful_set, owner):
            await cluster.create(item)
    except ApiError as error:
        if not error.is_refusal:
            raise
        say(
            f"{OWN} keep this command running to the end, or nothing releases the nodes then: the API server refused the keeper:"
            f" {error.message}"
        )


def _ways_out(stateful_set: Object, run: Run, owner: str) -> str:
    """Ways to deal with a run of this name that is in the way, and what each of them removes."""
    removes = "removes its StatefulSet, pods, Service, Secret, NetworkPolicy and ConfigMaps, never claims"
    delete = f"stop it: kubectl delete configmap {owner} -n {run.namespace} ({removes})"
    if run.frozen.parsed.preflight is not None and run.frozen.parsed.preflight.only:
        return f"another lockstep preflight is at work, or was killed: what that left goes by itself within {LEFT_SECONDS} s; or {delete}"
    return f"follow it: lockstep logs {run.name} -n {run.namespace} -f, or {delete}"


async def _follow(cluster: Cluster, run: Run, say: Say) -> int:
    """Print why node 0 doesn't run, and its log, and return its exit code."""

    async def is_over() -> bool:
        """Look for the end once more: a log that breaks off, or has not begun, goes on otherwise."""
        return bool((await asyncio.wait([looking], timeout=LOOK_SECONDS))[0])

    async def relay() -> None:
        with contextlib.suppress(Failed):  # (without the right to read its log a run goes on)
            async for line in follow(cluster, run.namespace, run.name, LogSelection(), is_over):
                say(line)

    async with meanwhile(_until_end(cluster, run, say)) as looking, meanwhile(relay()) as relaying:
        code = await looking
        await asyncio.wait([relaying], timeout=DRAIN_SECONDS)  # the container has ended, so its log ends, too
    return code


async def _until_end(cluster: Cluster, run: Run, say: Say) -> int:
    """Print why node 0 doesn't run, until it has ended, and return its exit code.

    While there are too few nodes for the run, it lets go of those that it has.
    """
    reported, had_pods = "", False
    status: Object = {}
    begun: float | None = None
    while True:
        observed, now = await _observe(cluster, run, status), time.time()
        stateful_set = observed.stateful_set
        if stateful_set is None or _owning_run(stateful_set, run.name) not in (None, run.frozen.name):
            raise Failed(f"StatefulSet {run.name} of namespace {run.namespace} was deleted, and its pods with it")
        if had_pods and observed.at_zero and not status:  # (the keeper has taken its pods while this did not look)
            return await _ended_since(cluster, run)
        had_pods = had_pods or bool(observed.pods)
        place = placing(observed, now)
        begun = (begun or now) if _comes_up(observed) else None
        code = None if place.lets_go else exit_code(observed.pod(0), replaced=observed.replicas > 0)
        if code is None and not place.lets_go and _is_given_up(run, begun, now, say):
            return FAILED
        if code is not None:
            return code
        await _follow_placing(cluster, run, observed, place)
        status = {"placement": place.status.to_dict()} if place.status is not None else {}
        view = View(observed=observed, wanted_pods=run.frozen.nodes, now=now, place=place)
        text = place.message if place.lets_go else waits_for(view)
        if text not in ("", reported):
            say(f"lockstep: {text}")
        reported = text
        await asyncio.sleep(LOOK_SECONDS)


async def _follow_placing(cluster: Cluster, run: Run, observed: Observed, place: Placing) -> None:
    """Scale to zero and back as the operator would."""
    if place.lets_go and observed.replicas:
        await _scale(cluster, run, 0)
    elif observed.at_zero and "retryTime" in observed.status.get("placement", {}) and not (place.lets_go or place.is_away):
        await _scale(cluster, run, run.frozen.nodes)


async def _observe(cluster: Cluster, run: Run, status: Object) -> Observed:
    """Observe the run's objects. `status`: as a TrainingJob would have it."""
    place, pods = run.namespace, await _pods(cluster, run)
    stateful_set = await cluster.get("StatefulSet", place, run.name)
    quiet = all(pod["status"].get("phase") == "Running" for pod in pods) and len(pods) == run.frozen.nodes
    claims = Listing("PersistentVolumeClaim") if quiet else await list_kind(cluster, "PersistentVolumeClaim", place)
    warnings = Listing("Event") if quiet else await list_kind(cluster, "Event", place, {"fieldSelector": "type=Warning"})
    spec = {"startTimeoutSeconds": run.frozen.parsed.timeouts.start_seconds}
    return Observed(
        job={**run.as_job, "spec": spec, "status": status},
        objects={} if stateful_set is None else {("StatefulSet", run.name): stateful_set},
        pods=tuple(pods),
        claims={claim["metadata"]["name"]: claim for claim in claims.items},
        sees_claims=claims.seen,
        warnings=warnings.items,
    )


def _comes_up(observed: Observed) -> bool:
    """Return True if all pods have nodes, and some don't run yet: no more room is waited for."""
    all_placed = len(observed.pods) >= observed.replicas > 0 and all(map(is_scheduled, observed.pods))
    return all_placed and not all(map(is_running, observed.pods))


def _is_given_up(run: Run, begun: float | None, now: float, say: Say) -> bool:
    """Return True if its pods did not come up in time: without an operator node 0 would wait for them forever."""
    seconds = run.frozen.parsed.timeouts.start_seconds
    if begun is None or now - begun < seconds:
        return False
    say(f"lockstep: giving up: all pods have nodes, but did not start within the {seconds} s of startTimeoutSeconds")
    return True


async def _scale(cluster: Cluster, run: Run, replicas: int) -> None:
    path = path_of("StatefulSet", run.namespace, run.name)
    await cluster.request("PATCH", path, {"spec": {"replicas": replicas}}, content_type="application/merge-patch+json")
