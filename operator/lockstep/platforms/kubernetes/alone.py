"""`lockstep run --in-namespace`: run a job without operator and CRD, for a user who holds the role `admin` in one namespace.

The same objects as the operator's, owned by the run's ConfigMap: deleting that one removes all but the claims. The agent comes in a
ConfigMap, since there is no operator's image to bring it. Agents exit at the end here, and node 0's exit code is the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from lockstep.api import names
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object, is_running
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import NotRunning
from lockstep.kube.expiry import LEFT_SECONDS, expiring
from lockstep.kube.kinds import path_of
from lockstep.plan.cluster.facts import Listing
from lockstep.plan.cluster.fitting import never_enough
from lockstep.plan.observed import Observed, is_terminating, owner_uid
from lockstep.plan.pages.logs import LogSelection
from lockstep.plan.reconcile.accept import no_service_account
from lockstep.plan.reconcile.clocks import Earlier
from lockstep.plan.reconcile.conditions import View, waits_for
from lockstep.plan.reconcile.placing import Placing, placing
from lockstep.plan.waiting.containers import is_scheduled
from lockstep.platforms.clusters.facts import with_image
from lockstep.platforms.clusters.listings import list_kind, read_object
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.files.reader import beside, create_claims
from lockstep.platforms.jobs.keeper import exit_code, keeper, keeper_name
from lockstep.platforms.jobs.logs import follow
from lockstep.platforms.kubernetes.objects import Run, objects, prepare
from lockstep.platforms.output import put
from lockstep.platforms.places.orders import Order
from lockstep.programs import ProgramFailed, answer_of, meanwhile, output_of
from lockstep_gang.contract.report import ENDS, State
from lockstep_gang.contract.run import parse_run
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
Say = Callable[[str], None]
Leave = Callable[[], Awaitable[None]]


async def run_in_namespace(order: Order, target: Target) -> int:
    job, place = order.job, target.namespace
    async with target.client.connected() as cluster:
        earlier = await _ended_run(cluster, job.metadata.name, place) if order.retry else None
        run = prepare(job, await with_image(cluster, job, order.cluster.profile, place), place, earlier)
        try:
            if lacking := await lacking_nodes(cluster, run):
                _print(f"{OWN} {lacking}; the job waits until it has them")
            await _start(cluster, run, _print)
        except ApiError as error:
            raise ConfigError(f"the API server refused an object of the job: {error.message}") from None
        try:
            code = await _follow(cluster, run, _print)
        except asyncio.CancelledError:
            for line in _detached(run).splitlines():
                _print(line)
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
    await _until_pods_are_gone(cluster, run)
    waited, limit = "", RESULT_SECONDS if seconds is None else seconds

    def hear(line: str) -> None:
        nonlocal waited
        waited = line.removeprefix(OWN) if line.startswith(OWN) else waited
        say(line)

    async with expiring(cluster, run.namespace, run.name, run.resolved.image) as owner:
        await _start(cluster, run, hear, owner)
        parts: list[asyncio.Future[Any]] = [asyncio.ensure_future(_follow(cluster, run, hear)), asyncio.ensure_future(heard.wait())]
        try:
            done, _ = await asyncio.wait(parts, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            try:
                if leave is not None:
                    await _left(leave, say)
            finally:
                await cluster.delete("ConfigMap", run.namespace, run.frozen.name)
                say(f"{OWN} {run.name} is removed; its claims stay")
    if not done:
        raise Failed(f"{run.name} has no result after {limit:.0f} s (--timeout);{waited or ' it said nothing'}")
    if parts[0] in done and parts[0].exception() is not None:
        await parts[0]


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


async def _until_pods_are_gone(cluster: Cluster, run: Run) -> None:
    """Wait for pods of an earlier run that still end: their log must not be taken for this one's. Raises ConfigError."""

    async def are_left() -> bool:
        pods = (await _observe(cluster, run)).pods
        return bool(pods) and all(map(is_terminating, pods))

    await _until_gone(run, are_left, f"pods of an earlier {run.name} are still terminating", "pods")


async def _until_gone(run: Run, are_left: Callable[[], Awaitable[bool]], problem: str, kinds: str) -> None:
    """Wait until nothing is left of an earlier run. Raises ConfigError with the `problem`, if that lasts, and how to see the `kinds`."""
    end = time.monotonic() + GONE_SECONDS
    while await are_left():
        if time.monotonic() > end:
            raise ConfigError(f"{problem} after {GONE_SECONDS:.0f} s: kubectl get {kinds} -n {run.namespace}")
        await asyncio.sleep(LOOK_SECONDS)


def _print(line: str) -> None:
    put(line, flush=True)


def _detached(run: Run) -> str:
    where = f"-n {run.namespace}"
    return (
        f"\nlockstep: job {run.name} runs on; half a minute after its end its pods go and its nodes are free (Job {keeper_name(run.name)}"
        f" sees to that)\nFollow it: lockstep logs {run.name} {where} -f\nHow it ended: lockstep why {run.name} {where}"
        f"\nStop it: kubectl delete configmap {run.frozen.name} {where} (checkpoints and claims stay)"
    )


async def _ended_since(cluster: Cluster, run: Run) -> int | None:
    """The exit code of a run whose pods have gone at its end, by the record on its volume; None: look again. Raises ConfigError."""
    stateful_set = await cluster.get("StatefulSet", run.namespace, run.name)
    if stateful_set is None or stateful_set["spec"].get("replicas"):
        return None
    async with beside(cluster, run.namespace, run.name, say=_print) as place:
        path = f"{run.frozen.parsed.run_dir}/gang/end.json"
        try:
            end = answer_of(await output_of(place, ["cat", path]), place.name)
        except NotRunning:  # the reader has gone: the next look makes another
            return None
        except ProgramFailed:
            end = {}
    if end.get("jobUid") != run.frozen.parsed.job.uid or str(end.get("state")) not in ENDS:
        raise ConfigError(
            f"{run.name} has no pods and has not ended: start it again with lockstep run -f FILE --in-namespace -n {run.namespace}"
        )
    is_complete = end.get("state") == State.COMPLETE.value
    _print(
        f"{'Complete' if is_complete else 'Failed'}: {end.get('message')}; its nodes are free, its log: lockstep logs {run.name} -n"
        f" {run.namespace}"
    )
    return DONE if is_complete else FAILED


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
    await _remove_finished(cluster, run, say)
    await create_claims(cluster, run.resolved)
    first, *rest = objects(run)
    if over is not None:
        first["metadata"]["ownerReferences"] = [over]
    try:
        created = await cluster.create(first)
        owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": run.frozen.name, "uid": created["metadata"]["uid"], "controller": True}
        for item in rest:
            item["metadata"]["ownerReferences"] = [owner]
            created = await cluster.create(item)
        if over is None:  # (the StatefulSet comes last)
            await _start_keeper(cluster, {**created, "spec": item["spec"]}, owner, say)
    except BaseException:  # whatever it is: half of a run is nobody's
        with contextlib.suppress(ApiError, OSError):
            await cluster.delete("ConfigMap", run.namespace, run.frozen.name)
        raise
    end = "leaves it running" if over is None else "removes it"
    say(f"{OWN} {run.name} on {number_of(run.frozen.nodes, 'node')} in namespace {run.namespace}; Ctrl-C {end}")


async def _ended_run(cluster: Cluster, name: str, place: str) -> Earlier:
    """Identity of the run that ended. Its volume has whether it failed, and agents look there. Raises ConfigError when there is no such
    run.
    """
    selector = {"labelSelector": f"{names.LABEL_JOB}={name}"}
    items = (await cluster.list("ConfigMap", place, selector))["items"]
    config = next((item for item in items if item["metadata"]["name"].startswith(names.run_name(name, ""))), None)
    if config is None or owner_uid(config) is not None:
        raise ConfigError(
            f"there is no run {name} without an operator in namespace {place}: start it with lockstep run -f FILE --in-namespace"
        )
    before = parse_run(config["data"][names.RUN_KEY])
    return Earlier(before.job.uid, before.restart.retry)


async def _refuse_taken_name(cluster: Cluster, run: Run) -> None:
    """Raise ConfigError where a TrainingJob has the run's name, also one without pods: no verb could tell the two apart."""
    if (await read_object(cluster, "TrainingJob", run.namespace, run.name)).first is not None:
        delete = f"lockstep delete {run.name} -n {run.namespace}"
        raise ConfigError(
            f"namespace {run.namespace} has a TrainingJob {run.name}, and nothing was created: give this run another name, or remove the"
            f" job first ({delete})"
        )


async def _remove_finished(cluster: Cluster, run: Run, say: Say) -> None:
    """Remove a run of this name that has ended, once its pods have ended. Raises ConfigError for one that runs, or that is an
    operator's.
    """
    stateful_set = await cluster.get("StatefulSet", run.namespace, run.name)
    if stateful_set is None:
        return
    conflict = f"StatefulSet {run.name} already exists in namespace {run.namespace}"
    owner = _owning_run(stateful_set, run.name)
    if owner is None:
        raise ConfigError(f"{conflict}, and this command did not create it: give this job another name")
    if stateful_set["spec"].get("replicas") != 0 and _exit_code(await _observe(cluster, run)) is None:
        raise ConfigError(f"{conflict} and runs: {_ways_out(stateful_set, run, owner)}")
    say(f"lockstep: removing the objects of the finished run {owner}")
    await cluster.delete("ConfigMap", run.namespace, owner)
    leftovers = [(item["kind"], item["metadata"]["name"]) for item in [*objects(run)[1:], *keeper(stateful_set, {})]]

    async def are_left() -> bool:
        objects_left = [await cluster.get(kind, run.namespace, name) for kind, name in leftovers]
        return any(objects_left) or bool((await _observe(cluster, run)).pods)

    await _until_gone(run, are_left, f"objects of the finished run {owner} still exist", "all")


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
        if had_pods and observed.at_zero and not status and (code := await _ended_since(cluster, run)) is not None:
            return code  # (the keeper has taken its pods while this did not look)
        had_pods = had_pods or bool(observed.pods)
        place = placing(observed, now)
        begun = (begun or now) if _comes_up(observed) else None
        code = None if place.lets_go else _exit_code(observed)
        if code is None and not place.lets_go and _is_given_up(run, begun, now, say):
            return FAILED
        if code is not None:
            return code
        await _follow_placing(cluster, run, observed, place)
        status = {"placement": place.status.to_dict()} if place.status is not None else {}
        text = _waiting_for(observed, run, place)
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


async def _observe(cluster: Cluster, run: Run, status: Object | None = None) -> Observed:
    """Observe the run's objects. `status`: as a TrainingJob would have it."""
    selector = {"labelSelector": f"{names.LABEL_JOB}={run.name}"}
    place = run.namespace
    pods = (await cluster.list("Pod", place, selector))["items"]
    stateful_set = await cluster.get("StatefulSet", place, run.name)
    quiet = all(pod["status"].get("phase") == "Running" for pod in pods) and len(pods) == run.frozen.nodes
    claims = Listing("PersistentVolumeClaim") if quiet else await list_kind(cluster, "PersistentVolumeClaim", place)
    warnings = Listing("Event") if quiet else await list_kind(cluster, "Event", place, {"fieldSelector": "type=Warning"})
    spec = {"startTimeoutSeconds": run.frozen.parsed.timeouts.start_seconds}
    job = {"metadata": {"name": run.name, "namespace": place, "uid": run.frozen.parsed.job.uid}, "spec": spec, "status": status or {}}
    return Observed(
        job=job,
        objects={} if stateful_set is None else {("StatefulSet", run.name): stateful_set},
        pods=tuple(pods),
        claims={claim["metadata"]["name"]: claim for claim in claims.items},
        sees_claims=claims.seen,
        warnings=warnings.items,
    )


def _exit_code(observed: Observed) -> int | None:
    """Return that of node 0; once the run is scaled to zero, no pod follows one that has saved."""
    return exit_code(observed.pod(0), replaced=observed.replicas > 0)


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


def _waiting_for(observed: Observed, run: Run, place: Placing) -> str:
    """Sentence about what the run waits for; '' once all pods run."""
    if place.lets_go or place.is_away:
        return place.message
    return waits_for(View(observed=observed, wanted_pods=run.frozen.nodes, now=time.time(), place=place))


async def _scale(cluster: Cluster, run: Run, replicas: int) -> None:
    path = path_of("StatefulSet", run.namespace, run.name)
    await cluster.request("PATCH", path, {"spec": {"replicas": replicas}}, content_type="application/merge-patch+json")
