"""The next command to type, by where a job stands and by what it failed of (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.api.names import pod_name
from lockstep.plan.interactive import run_command
from lockstep.plan.observed import Observed

HELP_BY_CAUSE = {
    "UserCode": "the script failed by itself: correct it first",
    "Configuration": "the job asks for what can't be done: change what the message names",
    "OutOfMemory": "less at once: a smaller microBatchSize (the global batch stays), a shorter maxLength, or more nodes",
    "Fabric": "ranks lost each other: look at the fabric and at the node that is named",
    "Storage": "the volume is full or failed: make room on it first",
    "NodeLost": "a node went away: another one must be there",
    "Preempted": "the pods had to make room: they start again when there is some",
    "Hang": "the stacks of all ranks are in the run's folder; the bundle has them",
    "NonFinite": "the loss left the numbers: a lower learningRate, or another precision",
    "Setup": "the image or the environment lacks what the message names",
    "Internal": "this is Lockstep's own: please report it with the bundle",
}


@dataclass(frozen=True)
class Step:
    """A command, and what it is for."""

    command: str
    what: str


def next_steps(observed: Observed, state: str, *, held: bool) -> tuple[Step, ...]:
    """The most useful one first."""
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
        "Running": (Step(f"lockstep logs {job} {place} -f", "follow it"),),
        "Restarting": (Step(f"lockstep logs {job} {place} -f", "follow the restart"), bundle),
        "Silent": (Step(f"kubectl logs {pod_name(job, 0)} {place} --tail 50", "what node 0 says; it runs on without the operator"), bundle),
        "Suspended": (Step(f"lockstep resume {job} {place}", "go on from the last checkpoint"),),
        "Complete": (Step(f"lockstep describe {job} {place}", "where its results are"),),
    }
    return steps.get(state, ())


def _after_failure(observed: Observed, place: str, bundle: Step, *, held: bool) -> tuple[Step, ...]:
    job, failure = observed.name, observed.status.get("failure") or {}
    cause = str(failure.get("cause", ""))
    again = Step(f"lockstep retry {job} {place}", f"again from the last checkpoint; {HELP_BY_CAUSE.get(cause, 'remove the cause first')}")
    look = Step(f"kubectl exec -it {pod_name(job, failure.get('node', 0))} {place} -- sh", "look into the pod while it is held")
    return (*((look,) if held else ()), again, bundle)
