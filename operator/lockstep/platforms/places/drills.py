"""Carries out the drills: hurts a running job in one stated way, waits until it is well again, and measures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE, pod_name
from lockstep.api.objects import Object, has_ended, is_true
from lockstep.kube.cluster import FORBIDDEN, MERGE, NOT_FOUND, ApiError, Client, Cluster
from lockstep.kube.kinds import KINDS, path_of
from lockstep.plan.pages.drill import RESTARTS, DrillOutcome, Fault, Right, cost_of, has_recovered, rights
from lockstep.plan.pages.logs import LogSelection, node_of_rank
from lockstep.platforms.clusters.listings import may
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.places.drilledjob import DrilledJob, DrillWatch, VerbStream

KILL = 9
START_SECONDS = 30.0
AT_ONCE: Object = {"gracePeriodSeconds": 0}
SAVE_FAILED = "CHECKPOINT step"
OPERATOR_PODS = "app.kubernetes.io/name=lockstep,app.kubernetes.io/component=operator"


def missing_rights(client: Client, fault: Fault, namespace: str) -> list[Right]:
    """Rights that the drill needs and your account lacks. The API server is asked, nothing is tried."""

    home = operator_home(client, namespace) if fault is Fault.KILL_OPERATOR else OPERATOR_NAMESPACE
    needed, kinds = rights(fault, namespace, home), {kind.plural: name for name, kind in KINDS.items()}

    async def ask(cluster: Cluster) -> list[bool]:
        asks = (may(cluster, right.verb, kinds[right.resource], right.namespace, right.subresource) for right in needed)
        return await asyncio.gather(*asks)

    return [right for right, allowed in zip(needed, client.run(ask), strict=True) if not allowed]


def run_drill(drilled: DrilledJob, fault: Fault, rank: int, fill_bytes: int) -> DrillOutcome:
    """Cause the fault and measure the recovery.

    Raises ConfigError before anything is hurt, ProgramFailed when the fault could not be caused, Failed when the job did not recover.
    """
    pods = drilled.job.pods
    if fault is Fault.KILL_OPERATOR:
        assert pods is not None  # noqa: S101 (the verb refuses it elsewhere)
        return _kill_operator(drilled, pods)
    if fault is Fault.FILL_DISK:
        return _fill_disk(drilled, fill_bytes)
    node = node_of_rank(drilled.job.layout(), rank)
    hurts: dict[Fault, Callable[[], Object]] = {
        Fault.KILL_RANK: lambda: drilled.on_node(node, "hit", rank=rank, number=KILL),
        Fault.CORRUPT_CHECKPOINT: lambda: drilled.on_node(node, "corrupt", rank=rank),
        Fault.LOSE_NODE: lambda: drilled.on_node(node, "lose", rank=rank) if pods is None else _delete_pod(drilled, pods, node),
    }
    away = contextlib.nullcontext() if pods is None or fault is not Fault.LOSE_NODE else _cordoned(drilled, pods, node)
    with away, DrillWatch(drilled, node) as watch, _frozen(drilled, node, rank) if fault is Fault.FREEZE_RANK else contextlib.nullcontext():
        hurt = hurts[fault]() if fault in hurts else {}
        drilled.say(f"{fault}: done to rank {rank} on node {node}; waiting until the job trains again")
        outcome = _recovery(drilled, DrillOutcome(fault, f"rank {rank} on node {node}", drilled.attempt), watch)
    return _with_step_back(drilled, outcome, hurt) if fault is Fault.CORRUPT_CHECKPOINT else outcome


def _until(drilled: DrilledJob, what: str, done: Callable[[Object], bool]) -> Object:
    """Return the first status of the job that is so. Raises Failed where it has ended before, or takes too long."""

    def look() -> Object | None:
        status = drilled.job.look_again()
        if is_true(status, "Failed"):
            raise Failed(f"the job failed: {(status.get('failure') or {}).get('message', '')}: lockstep why {drilled.job.at}")
        if done(status):
            return status
        if has_ended(status):
            raise Failed(f"the job was complete before {what}")
        return None

    return drilled.until(what, look)


def _recovery(drilled: DrilledJob, outcome: DrillOutcome, watch: DrillWatch) -> DrillOutcome:
    assert outcome.fault in RESTARTS  # noqa: S101 (an invariant of the caller)
    attempt = outcome.attempt

    _until(
        drilled,
        "the failure in the job's status",
        lambda status: cost_of(status, attempt) is not None or has_recovered(status, attempt, False),
    )
    named = watch.since_the_fault()
    status = _until(drilled, "the recovery", lambda status: has_recovered(status, attempt, drilled.tells_steps))
    well, cost = watch.since_the_fault(), cost_of(status, attempt) or {}
    return replace(
        outcome,
        stopped_seconds=watch.stopped_seconds(),
        started_seconds=watch.first_heard_seconds("started"),
        named_seconds=named,
        named=f"{cost['cause']}: {cost['message']}" if cost else "",
        downtime_seconds=cost.get("downtimeSeconds"),
        lost_steps=cost.get("lostSteps"),
        notes=[*watch.notes, f"all ranks ran again after {well:.1f} s, according to its status"],
    )


def _with_step_back(drilled: DrilledJob, outcome: DrillOutcome, hurt: Object) -> DrillOutcome:
    """Note the step back from the damaged commit. Raises Failed if there was none."""
    record = drilled.on_node(0, "started_from", attempt=outcome.attempt + 1)
    if record.get("step") is None or hurt.get("step") is None or record["step"] >= hurt["step"]:
        raise Failed(
            f"{hurt.get('damaged')} was damaged, but attempt {outcome.attempt + 1} started from {record.get('start')}: it did not step back"
        )
    note = f"damaged {hurt.get('damaged')}; attempt {outcome.attempt + 1} went back to {record.get('start') or 'the beginning'}"
    return replace(outcome, notes=[*outcome.notes, note])


@contextmanager
def _frozen(drilled: DrilledJob, node: int, rank: int) -> Iterator[None]:
    """Freeze the rank meanwhile. The node itself lets it go on when this process is gone."""
    stream = VerbStream(drilled, node, "freeze", rank=rank)
    with stream:
        try:
            if not stream.wait("hit", START_SECONDS):
                raise Failed(f"rank {rank} was not frozen: {stream.problem or f'node {node} says nothing'}")
            yield
        finally:
            with contextlib.suppress(Failed, OSError):  # (the node has gone, and the rank with it)
                if drilled.on_node(node, "thaw", rank=rank).get("thawed") is True:
                    drilled.say(f"{Fault.FREEZE_RANK}: rank {rank} on node {node} goes on")
            stream.close()


def _delete_pod(drilled: DrilledJob, pods: Target, node: int) -> Object:
    pods.client.request("DELETE", path_of("Pod", pods.namespace, pod_name(drilled.name, node)), AT_ONCE)
    return {}


@contextmanager
def _cordoned(drilled: DrilledJob, pods: Target, node: int) -> Iterator[None]:
    """Cordon the Node of a node's pod meanwhile. Raises ConfigError for one that is cordoned already."""
    name = pods.client.request("GET", path_of("Pod", pods.namespace, pod_name(drilled.name, node)))["spec"]["nodeName"]
    if pods.client.request("GET", path_of("Node", None, name))["spec"].get("unschedulable"):
        raise ConfigError(f"node {name} is cordoned already: uncordon it first, or choose another rank")
    drilled.say(f"{Fault.LOSE_NODE}: node {name} is cordoned until this ends; if this is killed: kubectl uncordon {name}")
    try:
        _set_unschedulable(pods.client, name, True)
        yield
    finally:
        _set_unschedulable(pods.client, name, None)
        drilled.say(f"{Fault.LOSE_NODE}: node {name} takes pods again")


def _set_unschedulable(client: Client, node: str, value: bool | None) -> None:
    client.request("PATCH", path_of("Node", None, node), {"spec": {"unschedulable": value}}, None, MERGE)


def _kill_operator(drilled: DrilledJob, pods: Target) -> DrillOutcome:
    """Delete the operator's leader. Training must not notice: the attempt stays, steps go on, and another replica, or the next pod, hears
    of them.
    """
    before = drilled.job.look_again()
    leader = _leader(pods)
    pods.client.request("DELETE", path_of("Pod", operator_home(pods.client, pods.namespace), leader), AT_ONCE)
    hit = time.monotonic()
    drilled.say(f"{Fault.KILL_OPERATOR}: deleted pod {leader}; waiting until another one leads and writes the job's progress")
    drilled.until("another leader", lambda: _leader(pods) not in ("", leader))
    led = time.monotonic() - hit
    last_update = (before.get("trainer") or {}).get("lastUpdateTime")
    after = _until(drilled, "progress written by it", lambda now: (now.get("trainer") or {}).get("lastUpdateTime") != last_update)
    steps = [(status.get("trainer") or {}).get("step") for status in (before, after)]
    if after["attempts"] != before["attempts"]:
        raise Failed(f"attempt {before['attempts']} became {after['attempts']}: training was not left alone: lockstep why {drilled.job.at}")
    notes = [
        f"{_leader(pods)} leads after {led:.1f} s",
        f"training went on: step {steps[0]} to {steps[1]} in attempt {after['attempts']}",
    ]
    heard = time.monotonic() - hit
    attempt = int(after["attempts"])
    return DrillOutcome(Fault.KILL_OPERATOR, f"pod {leader}", attempt, named_seconds=heard, downtime_seconds=0, lost_steps=0, notes=notes)


def operator_home(client: Client, namespace: str) -> str:
    """Namespace of the operator that works in `namespace`: itself, where it has one of its own."""
    try:
        client.request("GET", path_of("ServiceAccount", namespace, OPERATOR_NAME))
    except ApiError as error:
        if error.status not in (FORBIDDEN, NOT_FOUND):
            raise
        return OPERATOR_NAMESPACE
    return namespace


def _leader(pods: Target) -> str:
    """Name of the pod that holds the Lease; '' if there is none."""
    home = operator_home(pods.client, pods.namespace)
    lease = pods.client.request("GET", path_of("Lease", home, OPERATOR_NAME))
    listed = pods.client.request("GET", path_of("Pod", home), None, {"labelSelector": OPERATOR_PODS})
    holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
    return holder if holder in {pod["metadata"]["name"] for pod in listed["items"]} else ""


def _fill_disk(drilled: DrilledJob, most: int) -> DrillOutcome:
    """Fill the volume. A save must fail and be reported, the attempt must go on, and the next save with room must be a commit again."""
    before = drilled.job.look_again()
    with VerbStream(drilled, 0, "fill", most=most, seconds=drilled.timeout_seconds) as filling:
        try:
            drilled.until("a full volume", lambda: filling.heard_at("full") or filling.ended)
            if filling.heard_at("full") is None:
                raise ConfigError(f"the volume of the run's folder was not filled: {filling.problem} (--fill-at-most)")
            hit = time.monotonic()
            drilled.say(f"{Fault.FILL_DISK}: the volume is full; waiting for a save that fails")
            line = drilled.until("a save that fails", lambda: _failed_save(drilled, hit))
            failed = time.monotonic() - hit
        finally:
            drilled.on_node(0, "empty")
            drilled.say(f"{Fault.FILL_DISK}: the volume has its room again")
    freed, step = time.monotonic(), _committed(drilled.job.look_again())
    after = _until(drilled, "a commit after there was room again", lambda status: _committed(status) > step)
    if after["attempts"] != before["attempts"]:
        raise Failed(
            f"attempt {before['attempts']} became {after['attempts']}: a full volume must not end an attempt: lockstep why {drilled.job.at}"
        )
    notes = [f"committed again {time.monotonic() - freed:.1f} s after there was room: step {_committed(after)}"]
    done = "volume of the run's folder, from node 0"
    attempt = int(after["attempts"])
    return DrillOutcome(Fault.FILL_DISK, done, attempt, named_seconds=failed, downtime_seconds=0, lost_steps=0, named=line, notes=notes)


def _committed(status: Object) -> int:
    return int((status.get("checkpoint") or {}).get("lastCommittedStep", 0))


def _failed_save(drilled: DrilledJob, since: float) -> str | None:
    """Line of rank 0 about a save that failed; None if there is none yet."""
    selection = LogSelection(since_seconds=int(time.monotonic() - since) + 2)

    async def look() -> str | None:
        async with contextlib.aclosing(drilled.job.lines(selection, drilled.say)) as lines:
            async for line in lines:
                if SAVE_FAILED in line and "FAILED" in line:
                    return line
        return None

    return asyncio.run(look())
