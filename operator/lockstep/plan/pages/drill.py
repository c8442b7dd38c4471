"""Drills: which faults there are, what each needs and risks, and what a recovery has cost (pure)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.api.objects import Object, condition, is_true
from lockstep_spec.words import printable_line

WATCHED_NODES = 16


class Fault(StrEnum):
    """Fault that a drill causes in a running job."""

    KILL_RANK = "kill-rank"
    FREEZE_RANK = "freeze-rank"
    LOSE_NODE = "lose-node"
    KILL_OPERATOR = "kill-operator"
    FILL_DISK = "fill-disk"
    CORRUPT_CHECKPOINT = "corrupt-checkpoint"


RISKS = {
    Fault.KILL_RANK: "ends one rank by SIGKILL: all ranks restart{from_commit}",
    Fault.FREEZE_RANK: "stops one rank by SIGSTOP: the job stands still until the hang is noticed, then all ranks restart",
    Fault.LOSE_NODE: "takes a node from the job: it is cordoned, its pod of this job is deleted at once; it is uncordoned in the end",
    Fault.KILL_OPERATOR: "deletes the leading operator's pod: no operator looks after jobs until another replica leads; ranks run on",
    Fault.FILL_DISK: "leaves no room on the volume of the run's folder for a while: other writers there fail, too",
    Fault.CORRUPT_CHECKPOINT: "damages the newest commit for good and ends one rank: the job goes back to the commit before",
}
AFTER_INTERRUPT = {
    Fault.KILL_RANK: "the ranks that ended are started again by their agents",
    Fault.FREEZE_RANK: "no rank is frozen any more",
    Fault.LOSE_NODE: "the node takes pods again",
    Fault.KILL_OPERATOR: "another replica leads by itself",
    Fault.FILL_DISK: "the volume has its room again",
    Fault.CORRUPT_CHECKPOINT: "a commit that was damaged stays so, and the job starts again from the one before",
}
"""State that an interrupted drill leaves the cluster in."""
RISKS_WITHOUT_PODS = {
    **RISKS,
    Fault.LOSE_NODE: "ends a node's agent by SIGKILL, and its ranks with it: the agent is started again, and all ranks restart",
}
AFTER_WITHOUT_PODS = {**AFTER_INTERRUPT, Fault.LOSE_NODE: "the agent that ended is started again"}
RESTARTS = frozenset({Fault.KILL_RANK, Fault.FREEZE_RANK, Fault.LOSE_NODE, Fault.CORRUPT_CHECKPOINT})


@dataclass(frozen=True)
class Right:
    """A verb on a kind of object; in the job's namespace when none is said."""

    verb: str
    resource: str
    subresource: str = ""
    group: str = ""
    namespace: str | None = None
    cluster_wide: bool = False

    def __str__(self) -> str:
        place = " of the cluster" if self.cluster_wide else f" in namespace {self.namespace}"
        return f"{self.verb} {self.resource}{f'/{self.subresource}' if self.subresource else ''}{place}"


def rights(fault: Fault, namespace: str, home: str = OPERATOR_NAMESPACE) -> list[Right]:
    """Rights that your account needs for a drill. `home`: the operator's namespace."""
    exec_ = Right("create", "pods", "exec", namespace=namespace)
    own = [Right("list", "pods", namespace=namespace), exec_]
    more = {
        Fault.LOSE_NODE: [
            *(Right(verb, "pods", namespace=namespace) for verb in ("get", "delete")),
            *(Right(verb, "nodes", cluster_wide=True) for verb in ("get", "patch")),
        ],
        Fault.KILL_OPERATOR: [
            Right("list", "pods", namespace=home),
            Right("delete", "pods", namespace=home),
            Right("get", "leases", group="coordination.k8s.io", namespace=home),
        ],
        Fault.FILL_DISK: [Right("get", "pods", "log", namespace=namespace)],
    }
    return (own if fault is not Fault.KILL_OPERATOR else []) + more.get(fault, [])


def why_not_now(job: Object, fault: Fault) -> str:
    """Reason not to run this drill now; '' when there is none."""
    status, spec = job.get("status") or {}, job["spec"]
    progress = condition(status, "Progressing")
    if progress.get("reason") != "Running" or is_true(status, "Restarting"):
        message = progress.get("message", "nothing is known of it")
        return f"the job is not running ({progress.get('reason', 'Unknown')}: {message}): drills are for jobs whose ranks all run"
    most = int((spec.get("restart") or {}).get("maxRestarts", 3))
    used = int(status.get("restartsCountTowardsMax", 0))
    commit = (status.get("checkpoint") or {}).get("lastCommittedStep")
    if fault in RESTARTS and used >= most:
        return f"restart.maxRestarts is {most} and {used} are used since the last commit, so that one more failure would end the job"
    if fault in RESTARTS and spec.get("training") is not None and commit is None:
        return (
            "nothing is committed yet, so that all steps would be lost: wait for the first checkpoint (lockstep wait JOB --for"
            " CheckpointCommitted)"
        )
    if fault in (Fault.CORRUPT_CHECKPOINT, Fault.FILL_DISK) and spec.get("training") is None:
        return "this drill needs a job of Lockstep's trainer (spec.training): Lockstep doesn't know how a script saves"
    return ""


@dataclass(frozen=True)
class DrillOutcome:
    """Measurements of a drill; times in seconds from the fault, None where there is no such thing."""

    fault: Fault
    done: str
    """Action that was taken, and its target."""
    attempt: int
    """The attempt that it was done to."""
    stopped_seconds: float | None = None
    """Time until no rank of that attempt ran any more on any watched node."""
    named_seconds: float | None = None
    """Time until the job's status named it."""
    started_seconds: float | None = None
    """Time until ranks of the next attempt were there."""
    downtime_seconds: float | None = None
    """Time from the failure, as the gang noticed it, to the first step after it."""
    lost_steps: int | None = None
    named: str = ""
    """Cause and message, as status tells them."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of(status: Object, attempt: int) -> Object | None:
    """Entry of status.restartHistory for a failed attempt; for one that was stopped in order, as by a pod that ends, the facts of
    status.stop.
    """
    entry = next((entry for entry in status.get("restartHistory", []) if entry["attempt"] == attempt), None)
    stop = status.get("stop") or {}
    if entry is None and stop.get("attempt") == attempt:
        return {"cause": "Stopped", "message": stop.get("message", ""), "lostSteps": stop.get("lostSteps", 0)}
    return entry


def has_recovered(status: Object, attempt: int, tells_steps: bool) -> bool:
    """True if a later attempt than `attempt` runs and, where the job reports steps, has made one after the failure."""
    if condition(status, "Progressing").get("reason") != "Running" or int(status.get("attempts", 0)) <= attempt:
        return False
    cost = cost_of(status, attempt)
    return cost is None or cost["cause"] == "Stopped" or not tells_steps or "downtimeSeconds" in cost


def drill_page(outcome: DrillOutcome) -> str:
    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.1f} s"

    rows = (
        ("done", outcome.done), ("ranks stopped after", seconds(outcome.stopped_seconds)),
        ("named in status after", seconds(outcome.named_seconds)), ("named as", outcome.named),
        ("next attempt after", seconds(outcome.started_seconds)), ("downtime", seconds(outcome.downtime_seconds)),
        ("steps done again", "" if outcome.lost_steps is None else str(outcome.lost_steps)), *(("note", note) for note in outcome.notes),
    )  # fmt: skip
    return "\n".join([f"{outcome.fault}: recovered", *(f"  {label:<22} {printable_line(value)}" for label, value in rows if value)])
