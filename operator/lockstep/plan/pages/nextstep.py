"""The next command to type, by where a job stands and by what it failed of (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.api.names import pod_name
from lockstep.api.objects import Object, condition
from lockstep.plan.observed import Observed
from lockstep.plan.pages.remedies import Step, remedy
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.interactive import is_interactive, run_command

HOST_MEMORY = "HostMemory"
"""Stands for OutOfMemory in HELP_BY_CAUSE, where no GPU's memory was short."""
HELP_BY_CAUSE = {
    "UserCode": "the script failed by itself: correct it first",
    "Configuration": "the job asks for what can't be done: change what the message names",
    "OutOfMemory": "less at once: a smaller microBatchSize (the global batch stays), a shorter maxLength, or more nodes",
    HOST_MEMORY: "the node's own memory, not the GPU's: raise resources.limits.memory of the TrainingCluster, or take fewer ranks a node, fewer data loader workers or a smaller offload",
    "Fabric": "ranks lost each other: look at the fabric and at the node that is named",
    "Storage": "the volume is full, failed, or may not be written: make room on it, or mend what the message names, first",
    "NodeLost": "a node went away: another one must be there",
    "Preempted": "the pods had to make room: they start again when there is some",
    "Hang": "the stacks of all ranks: lockstep cp {job}:runs/{job}/logs stacks {place}, or the bundle below",
    "NonFinite": "the loss left the numbers: what the message names, else a lower learningRate or another precision",
    "Setup": "the image or the environment lacks what the message names",
    "Killed": "nobody of the job sent that signal: look who sent it, and at the pods' memory limit",
    "Hardware": "a GPU of that node failed: kubectl cordon the Node, so that the job starts on another one",
    "Internal": "this is Lockstep's own: please report it with the bundle",
}

_HOST_WORDS = (
    "host memory",
    "low on resource: memory",
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "DataLoader worker",
    "shm_size",
    "emory allocation",
    "runtime: out of memory",
    "/dev/shm",  # noqa: S108 (a word in a message)
    "SIGBUS",
)


def next_steps(observed: Observed, state: str, *, held: bool, message: str = "", stale: bool = False) -> tuple[Step, ...]:
    """The most useful one first. `message`: what is said of where the job stands, if more is seen than its status says. `stale`: nobody keeps the
    status up to date."""
    look = (Step(f"lockstep doctor -n {observed.namespace}", "what the operator lacks"),) if stale else ()
    steps = (*look, *_steps(observed, state, held=held))
    if state in ("Suspended", "Complete", "Failed", "Unseen"):
        return steps
    first = list(_remedies(observed, state, message))
    return tuple(dict.fromkeys((*first, *(step for step in steps if not (first and step.command.startswith("kubectl edit"))))))


def _remedies(observed: Observed, state: str, message: str) -> Iterator[Step]:
    """What its conditions ask for: of the one that keeps it from running first."""
    accepted, progressing = condition(observed.status, "Accepted"), condition(observed.status, "Progressing")
    healthy = condition(observed.status, "NodesHealthy")
    if state in ("Waiting", "NodeNotHeard") or (state == "Restarting" and progressing.get("status") == "False"):
        yield from _remedy(observed, progressing, message)
    if accepted.get("status") == "False" or accepted.get("reason") == Reason.CHANGE_PENDING:
        yield from _remedy(observed, accepted, message if state == "Refused" else "")
    if healthy.get("status") == "False":
        yield from _remedy(observed, healthy, "")


def _remedy(observed: Observed, found: Mapping[str, Any], message: str) -> Iterator[Step]:
    step = remedy(str(found.get("reason", "")), message or str(found.get("message", "")), observed.name, observed.namespace)
    if step is not None:
        yield step


def _steps(observed: Observed, state: str, *, held: bool) -> tuple[Step, ...]:
    job, place = observed.name, f"-n {observed.namespace}"
    bundle = Step(f"lockstep why {job} {place} --bundle {job}.tar.gz", "everything for whoever helps, without secrets")
    if state == "Failed":
        return _after_failure(observed, place, bundle, held=held)
    steps = {
        "Unseen": (Step(f"lockstep doctor {place}", "whether an operator works there"),),
        "Refused": (Step(f"kubectl edit tj {job} {place}", "change what the message names; the job then starts by itself"),),
        "Waiting": (Step(f"lockstep events {job} {place}", "what the cluster says of its pods"), bundle),
        "Starting": (Step(f"lockstep logs {job} {place} -f", "follow the start"),),
        "Ready": (Step(run_command(observed), "start a script of /workspace on all its nodes"),),
        "Running": (Step(f"lockstep logs {job} {place} -f", "follow it"), *_ask_ranks(observed), *_stop_run(observed)),
        "Restarting": (Step(f"lockstep logs {job} {place} -f", "follow the restart"), bundle),
        "NodeNotHeard": (bundle,),
        "Silent": (Step(f"kubectl logs {pod_name(job, 0)} {place} --tail 50", "what node 0 says; it runs on without the operator"), bundle),
        "Suspended": (Step(f"lockstep resume {job} {place}", "go on from the last checkpoint"),),
        "Complete": (Step(f"lockstep describe {job} {place}", "where its results are"),),
    }
    return steps.get(state, ())


def _ask_ranks(observed: Observed) -> tuple[Step, ...]:
    """Of ranks that tell no step nobody can say whether they hang."""
    if "step" in (observed.status.get("trainer") or {}):
        return ()
    return (Step(f"lockstep stacks {observed.name} -n {observed.namespace}", "where each rank is, should nothing come; they go on"),)


def _stop_run(observed: Observed) -> tuple[Step, ...]:
    """Of a dev environment: a script that was detached has nobody who could press Ctrl-C."""
    if not is_interactive(observed.job):
        return ()
    return (Step(f"lockstep stop {observed.name} --run -n {observed.namespace}", "end the script; the environment stays"),)


def _after_failure(observed: Observed, place: str, bundle: Step, *, held: bool) -> tuple[Step, ...]:
    job, failure = observed.name, observed.status.get("failure") or {}
    again = Step(f"lockstep retry {job} {place}", f"again from the last checkpoint; {advice(failure, job, place)}")
    failed = condition(observed.status, "Failed")
    reason = str(failed.get("reason", ""))
    if reason in (Reason.START_TIMEOUT, Reason.DEADLINE_EXCEEDED):
        again = remedy(reason, str(failed.get("message", "")), job, observed.namespace) or again
    look = Step(f"kubectl exec -it {pod_name(job, failure.get('node', 0))} {place} -- sh", "look into the pod while it is held")
    return (*((look,) if held else ()), again, bundle)


def advice(failure: Object, job: str, place: str) -> str:
    """What to do before it is started again."""
    kind = str(failure.get("cause", ""))
    if kind == "OutOfMemory" and is_of_the_host(failure):
        kind = HOST_MEMORY
    return HELP_BY_CAUSE.get(kind, "remove the cause first").replace("{job}", job).replace("{place}", place)


def is_of_the_host(failure: Object) -> bool:
    """Whether the memory that was short is the node's: no GPU's library says so otherwise."""
    words = " ".join((str(failure.get("message", "")), *map(str, failure.get("lastLines") or [])))
    exception = str(failure.get("exception", ""))
    of_the_host = exception == "bad_alloc" or (exception.endswith("MemoryError") and exception != "OutOfMemoryError")
    return of_the_host or any(word in words for word in _HOST_WORDS)
