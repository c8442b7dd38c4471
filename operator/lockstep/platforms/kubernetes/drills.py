"""Carries out the drills: hurts a running job in one stated way, waits until it is well again, and measures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import CONTAINER, OPERATOR_NAME, OPERATOR_NAMESPACE, pod_name
from lockstep.plan.drill import RESTARTS, WATCHED_PODS, Fault, Outcome, Right, entry_of, has_recovered, rights
from lockstep.plan.observed import Object, is_true
from lockstep.platforms.kubernetes.files import run_in_pod
from lockstep.platforms.kubernetes.jobs import job_status

T = TypeVar("T")
SOURCE = Path(__file__).with_name("drill_in_pod.py")
KILL, STOP = 9, 19
POLL_SECONDS = 0.2
SAVE_FAILED = "CHECKPOINT step"
OPERATOR_PODS = "app.kubernetes.io/name=lockstep,app.kubernetes.io/component=operator"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """The job that is drilled, and how its cluster is reached."""

    client: Any
    core: Any
    job: Object
    timeout_seconds: float
    say: Say

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])

    @property
    def attempt(self) -> int:
        return int(self.job["status"]["attempts"])

    @property
    def tells_steps(self) -> bool:
        return "step" in (self.job["status"].get("trainer") or {})

    def status(self) -> Object:
        return job_status(self.client, self.namespace, self.name)

    def pod_of(self, rank: int) -> str:
        """Raises ConfigError for a rank that the job doesn't have."""
        desired, nodes = int(self.job["status"]["ranks"]["desired"]), int(self.job["status"]["nodes"])
        if not 0 <= rank < desired:
            raise ConfigError(f"--rank is {rank}, but the job has ranks 0 to {desired - 1}")
        return pod_name(self.name, rank // (desired // nodes))

    def in_pod(self, pod: str, verb: str, **arguments: Any) -> Object:
        """The last answer. Raises PodError."""
        answer: Object = json.loads(run_in_pod(self.core, self.namespace, pod, _command(verb, arguments)).strip().splitlines()[-1])
        return answer

    def until(self, what: str, look: Callable[[], T | None]) -> T:
        """The first result that is neither None nor False. Raises Failed after the time that was given."""
        end = time.monotonic() + self.timeout_seconds
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(POLL_SECONDS)
        raise Failed(f"{what} did not happen within {self.timeout_seconds:.0f} s (--timeout): lockstep why {self.name} -n {self.namespace}")


def _command(verb: str, arguments: Object) -> list[str]:
    return ["python3", "-c", SOURCE.read_text(encoding="utf-8"), verb, json.dumps(arguments)]


def missing_rights(client: Any, fault: Fault, namespace: str) -> list[Right]:
    """What the asker may not do of what the drill does. The API server is asked, nothing is tried."""
    from kubernetes.client import AuthorizationV1Api

    def may(right: Right) -> bool:
        asked = {"verb": right.verb, "group": right.group, "resource": right.resource, "subresource": right.subresource}
        body = {"spec": {"resourceAttributes": {**asked, "namespace": right.namespace or ""}}}
        return bool(AuthorizationV1Api(client).create_self_subject_access_review(body).status.allowed)

    return [right for right in rights(fault, namespace) if not may(right)]


def run_drill(place: Place, fault: Fault, rank: int, fill_bytes: int) -> Outcome:
    """Raises ConfigError before anything is hurt, PodError when the fault could not be done, Failed when the job did not recover."""
    if fault is Fault.KILL_OPERATOR:
        return _kill_operator(place)
    if fault is Fault.FILL_DISK:
        return _fill_disk(place, fill_bytes)
    hurts: dict[Fault, Callable[[str], Object]] = {
        Fault.KILL_RANK: lambda pod: place.in_pod(pod, "hit", rank=rank, number=KILL),
        Fault.FREEZE_RANK: lambda pod: place.in_pod(pod, "hit", rank=rank, number=STOP),
        Fault.CORRUPT_CHECKPOINT: lambda pod: place.in_pod(pod, "corrupt", rank=rank),
        Fault.LOSE_NODE: lambda pod: _delete_pod(place, pod),
    }
    pod = place.pod_of(rank)
    away = _cordoned(place, pod) if fault is Fault.LOSE_NODE else contextlib.nullcontext()
    with away, _Watch(place, pod) as watch:
        hurt = hurts[fault](pod)
        place.say(f"{fault}: done to rank {rank} in pod {pod}; waiting until the job trains again")
        outcome = _recovery(place, Outcome(fault, f"rank {rank} in pod {pod}", place.attempt), watch)
    return _with_step_back(place, outcome, hurt) if fault is Fault.CORRUPT_CHECKPOINT else outcome


def _recovery(place: Place, outcome: Outcome, watch: _Watch) -> Outcome:
    assert outcome.fault in RESTARTS  # noqa: S101 (an invariant of the caller)
    attempt = outcome.attempt

    def look(done: Callable[[Object], bool]) -> Object | None:
        status = place.status()
        if is_true(status, "Failed"):
            raise Failed(
                f"the job failed: {(status.get('failure') or {}).get('message', '')}: lockstep why {place.name} -n {place.namespace}"
            )
        return status if done(status) else None

    place.until("the failure's name in status", lambda: look(lambda status: entry_of(status, attempt) is not None))
    named = watch.since_the_fault()
    ended = lambda status: has_recovered(status, attempt, tells_steps=place.tells_steps)  # noqa: E731
    status = place.until("the recovery", lambda: look(ended))
    entry = entry_of(status, attempt) or {}
    return replace(
        outcome,
        stopped_seconds=watch.all_said("stopped"),
        started_seconds=watch.first_said("started"),
        named_seconds=named,
        named=f"{entry['cause']}: {entry['message']}",
        downtime_seconds=entry.get("downtimeSeconds"),
        lost_steps=entry["lostSteps"],
        notes=watch.notes,
    )


def _with_step_back(place: Place, outcome: Outcome, hurt: Object) -> Outcome:
    """The gang counts from the newest commit that it heard of; the damaged one had to be left out."""
    record = place.in_pod(pod_name(place.name, 0), "started_from", attempt=outcome.attempt + 1)
    if record["step"] is None or record["step"] >= hurt["step"]:
        raise Failed(
            f"{hurt['damaged']} was damaged, but attempt {outcome.attempt + 1} started from {record['start']}: it did not step back"
        )
    more = int(hurt["step"]) - int(record["step"])
    note = f"damaged {hurt['damaged']}; attempt {outcome.attempt + 1} went back to {record['start'] or 'the beginning'}"
    return replace(outcome, lost_steps=(outcome.lost_steps or 0) + more, notes=[*outcome.notes, note])


def _delete_pod(place: Place, pod: str) -> Object:
    place.core.delete_namespaced_pod(pod, place.namespace, grace_period_seconds=0)
    return {}


@contextmanager
def _cordoned(place: Place, pod: str) -> Iterator[None]:
    """The pod's node takes no pods meanwhile. One that took none before stays as it was."""
    node = place.core.read_namespaced_pod(pod, place.namespace).spec.node_name
    if place.core.read_node(node).spec.unschedulable:
        raise ConfigError(f"node {node} is cordoned already: uncordon it first, or choose another rank")
    place.core.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        place.core.patch_node(node, {"spec": {"unschedulable": None}})


def _kill_operator(place: Place) -> Outcome:
    """Training must not notice: the attempt stays, steps go on, and another replica, or the next pod, hears of them."""
    before = place.status()
    leader = _leader(place)
    place.core.delete_namespaced_pod(leader, OPERATOR_NAMESPACE, grace_period_seconds=0)
    hit = time.monotonic()
    place.say(f"{Fault.KILL_OPERATOR}: deleted pod {leader}; waiting until another one leads and writes the job's progress")
    place.until("another leader", lambda: _leader(place) not in ("", leader))
    led = time.monotonic() - hit
    told = (before.get("trainer") or {}).get("lastUpdateTime")
    after = place.until("progress written by it", lambda: _news(place.status(), told))
    steps = [(status.get("trainer") or {}).get("step") for status in (before, after)]
    if after["attempts"] != before["attempts"]:
        raise Failed(f"attempt {before['attempts']} became {after['attempts']}: training was not left alone: lockstep why {place.name}")
    notes = [f"{_leader(place)} leads after {led:.1f} s", f"training went on: step {steps[0]} to {steps[1]} in attempt {after['attempts']}"]
    heard = time.monotonic() - hit
    attempt = int(after["attempts"])
    return Outcome(Fault.KILL_OPERATOR, f"pod {leader}", attempt, named_seconds=heard, downtime_seconds=0, lost_steps=0, notes=notes)


def _news(status: Object, told: str | None) -> Object | None:
    return status if (status.get("trainer") or {}).get("lastUpdateTime") != told else None


def _leader(place: Place) -> str:
    """The pod that holds the Lease and is there; ''."""
    from kubernetes.client import CoordinationV1Api

    lease = CoordinationV1Api(place.client).read_namespaced_lease(OPERATOR_NAME, OPERATOR_NAMESPACE)
    pods = {pod.metadata.name for pod in place.core.list_namespaced_pod(OPERATOR_NAMESPACE, label_selector=OPERATOR_PODS).items}
    holder = str(lease.spec.holder_identity if lease.spec is not None else "")
    return holder if holder in pods else ""


def _fill_disk(place: Place, most: int) -> Outcome:
    """A save must fail and be told, the attempt must go on, and the next save with room must be a commit again."""
    pod, before = pod_name(place.name, 0), place.status()
    with _Stream(place, pod, "fill", most=most, seconds=place.timeout_seconds) as filling:
        try:
            place.until("a full volume", lambda: filling.said("full") or filling.ended)
            if filling.said("full") is None:
                raise ConfigError(f"the volume of the run's folder was not filled: {filling.problem} (--fill-at-most)")
            hit = time.monotonic()
            place.say(f"{Fault.FILL_DISK}: the volume is full; waiting for a save that fails")
            line = place.until("a save that fails", lambda: _failed_save(place, pod, hit))
            failed = time.monotonic() - hit
        finally:
            place.in_pod(pod, "empty")
    freed, step = time.monotonic(), _committed(place.status())
    after = place.until("a commit after there was room again", lambda: _newer_commit(place.status(), step))
    if after["attempts"] != before["attempts"]:
        raise Failed(
            f"attempt {before['attempts']} became {after['attempts']}: a full volume must not end an attempt: lockstep why {place.name}"
        )
    notes = [f"committed again {time.monotonic() - freed:.1f} s after there was room: step {_committed(after)}"]
    done = f"volume of the run's folder, from pod {pod}"
    attempt = int(after["attempts"])
    return Outcome(Fault.FILL_DISK, done, attempt, named_seconds=failed, downtime_seconds=0, lost_steps=0, named=line, notes=notes)


def _committed(status: Object) -> int:
    return int((status.get("checkpoint") or {}).get("lastCommittedStep", 0))


def _newer_commit(status: Object, step: int) -> Object | None:
    return status if _committed(status) > step else None


def _failed_save(place: Place, pod: str, since: float) -> str | None:
    """What rank 0 said of it."""
    seconds = int(time.monotonic() - since) + 2
    log: str = place.core.read_namespaced_pod_log(pod, place.namespace, container=CONTAINER, since_seconds=seconds)
    return next((line for line in log.splitlines() if SAVE_FAILED in line and "FAILED" in line), None)


class _Stream:
    """A verb that runs in a pod and says things meanwhile, each with the time at which it was heard here."""

    def __init__(self, place: Place, pod: str, verb: str, **arguments: Any) -> None:
        self._place, self._pod, self._command = place, pod, _command(verb, arguments)
        self._heard: list[tuple[float, Object]] = []
        self.ended = False
        self.problem = ""
        self._thread = threading.Thread(target=self._listen, name=f"drill {pod}", daemon=True)

    def __enter__(self) -> _Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(5.0)

    def said(self, key: str) -> float | None:
        """When it first said so."""
        return next((when for when, said in list(self._heard) if key in said), None)

    def wait(self, key: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.said(key) is None and not self.ended and time.monotonic() < end:
            time.sleep(0.02)
        return self.said(key) is not None

    def _listen(self) -> None:
        from kubernetes.client import ApiClient, CoreV1Api
        from kubernetes.stream import stream

        core = CoreV1Api(ApiClient(self._place.client.configuration))  # a stream changes its client while it opens
        try:
            session = stream(
                core.connect_get_namespaced_pod_exec, self._pod, self._place.namespace, command=self._command,
                stdin=False, stdout=True, stderr=True, tty=False, _preload_content=False,
            )  # fmt: skip
            with contextlib.closing(session):
                self._read(session)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        self.ended = True

    def _read(self, session: Any) -> None:
        rest = ""
        while session.is_open():
            session.update(timeout=1)
            self.problem += session.read_stderr() if session.peek_stderr() else ""
            *lines, rest = (rest + (session.read_stdout() if session.peek_stdout() else "")).split("\n")
            self._heard += [(time.monotonic(), json.loads(line)) for line in lines if line]


class _Watch:
    """Sees in the pods of a job when the ranks of its attempt end and when the next ones come."""

    def __init__(self, place: Place, target: str) -> None:
        nodes = int(place.job["status"]["nodes"])
        pods = list(dict.fromkeys([target, *(pod_name(place.name, node) for node in range(nodes))]))[:WATCHED_PODS]
        self._streams = {pod: _Stream(place, pod, "watch", attempt=place.attempt, seconds=place.timeout_seconds) for pod in pods}
        self.notes = [f"{len(pods)} of {nodes} nodes were watched"] if len(pods) < nodes else []
        self._place = place
        self._hit = 0.0

    def __enter__(self) -> _Watch:
        for stream in self._streams.values():
            stream.__enter__()
        for pod, stream in self._streams.items():
            if not stream.wait("watching", 30.0):
                raise Failed(f"pod {pod} could not be watched: {stream.problem}")
        self._hit = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        return  # the threads end with the streams, or with this process

    def since_the_fault(self) -> float:
        return time.monotonic() - self._hit

    def all_said(self, key: str) -> float | None:
        """When the last pod that was there all the time said so, since the fault."""
        said = [stream.said(key) for stream in self._streams.values()]
        times = [when - self._hit for when in said if when is not None]
        return max(times) if times else None

    def first_said(self, key: str) -> float | None:
        times = [when - self._hit for stream in self._streams.values() if (when := stream.said(key)) is not None]
        return min(times) if times else None
