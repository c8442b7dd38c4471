"""Kubernetes objects as plain dicts: what can be asked of any of them. Imports nothing but names, so that help pages stay fast."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from lockstep.api.names import ANNOTATION_TYPED, FRESH

Object = dict[str, Any]
DEFINITION = "CustomResourceDefinition"
CLAIM = "PersistentVolumeClaim"
NO_PODS = "NoPods"
DEPTH_MAX = 64
"""Levels of lists and maps that an object may have. JSON has no limit, and every reader has one somewhere."""
TOO_DEEP = f"(deeper than {DEPTH_MAX} levels)"
"""Stands where an object was cut off."""


def plural(kind: str) -> str:
    """Name of several objects of a kind."""
    return f"{kind[:-1]}ies" if kind.endswith("y") else kind if kind.endswith("s") else f"{kind}s"


def condition(status: Object, kind: str) -> Object:
    """The condition of this type; empty when there is none yet."""
    return next((item for item in status.get("conditions") or [] if item["type"] == kind), {})


def is_true(status: Object, kind: str) -> bool:
    return bool(condition(status, kind).get("status") == "True")


def has_no_pods(status: Object) -> bool:
    """Return True if a run without an operator with this status has no pods, and whether it has ended wasn't looked up or isn't known."""
    return bool(condition(status, "Progressing").get("reason") == NO_PODS)


def has_ended(status: Object) -> bool:
    """Return True if a TrainingJob with this status has completed or failed."""
    return is_true(status, "Complete") or is_true(status, "Failed")


def current_status(job: Object) -> Object:
    """Return a TrainingJob's status without what its spec has taken back, and the operator has yet to: a stop, a refusal, a failure before
    restart.retry was raised.
    """
    status, spec = job.get("status") or {}, job.get("spec") or {}
    generation, session = job["metadata"].get("generation", 0), status.get("interactive") or {}
    asked = int((spec.get("restart") or {}).get("retry") or 0)
    gone = set()
    if condition(status, "Suspended").get("reason") == "Idle":
        if asked > int(session.get("retry") or 0):
            gone.add(("Suspended", "True"))
    elif not spec.get("suspend", True):
        gone.add(("Suspended", "True"))
    if status.get("observedGeneration", generation) < generation:
        gone.add(("Accepted", "False"))
    if gone:
        status = {**status, "conditions": [item for item in status.get("conditions") or [] if (item["type"], item["status"]) not in gone]}
    if not is_true(status, "Failed") or asked <= int(status.get("retry") or 0):
        return status
    raised = {"reason": "Retried", "message": f"restart.retry was raised, to {go_on_words(job)}"}
    others = [item for item in status["conditions"] if item["type"] not in ("Failed", "Progressing")]
    now = [{"type": "Failed", "status": "False", **raised}, {"type": "Progressing", "status": "Unknown", **raised}]
    return {**status, "conditions": [*others, *now]}


def go_on_words(job: Object, *, committed: bool = False) -> str:
    """Return what the next start of a TrainingJob does, as it follows "to". It names a checkpoint only where one is known: in status, or by
    `committed`.
    """
    spec = job.get("spec") or {}
    if committed or ((job.get("status") or {}).get("checkpoint") or {}).get("lastCommittedStep") is not None:
        return "go on from the last checkpoint"
    if spec.get("script"):
        return "start the script again (it goes on if it looks for its own checkpoints; transformers: resume_from_checkpoint)"
    return "start it again (at step 0, unless it finds a checkpoint)" if spec.get("training") else "start it again"


def typed_command(job: Object, again: str) -> str:
    """Return the command that starts a job again, as it was typed; where that isn't known, with FILE and `again`, words that lead to its
    place.
    """
    return str((job["metadata"].get("annotations") or {}).get(ANNOTATION_TYPED) or f"lockstep run -f FILE {again}")


def typed_file(job: Object) -> str:
    """Return the job file in the command that started a job, as one word of another command; FILE where none is known."""
    words = shlex.split(typed_command(job, "").partition(" -- ")[0])
    return shlex.quote(words[words.index("-f") + 1]) if "-f" in words else "FILE"


def is_run(job: Object) -> bool:
    """Return True for `lockstep run --in-namespace`: no TrainingJob, and its containers are started again at its end."""
    return bool(job.get("kind") == "ConfigMap")


def uid_of(item: Object) -> str:
    """Return the object's uid; '' if it has none."""
    return str((item.get("metadata") or {}).get("uid", ""))


def conditions_of(status: Object) -> dict[str, Object]:
    return {item["type"]: item for item in status.get("conditions") or []}


def claim_names(pod: Object) -> list[str]:
    volumes = pod["spec"].get("volumes") or []
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def last_end(status: Object) -> Object:
    """End of the container with this status, if it has ended; else its end before its newest restart. Empty if there is none."""
    return status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated") or {}


def is_running(pod: Object) -> bool:
    """Return True if all containers of a pod run."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return bool(statuses) and all("running" in status.get("state", {}) for status in statuses)


def restricted_context(user: int | None) -> Object:
    """Return the securityContext of a container that Pod Security `restricted` asks for. `user` is its group, too; None: the SCC
    chooses.
    """
    own = {} if user is None else {"runAsUser": user, "runAsGroup": user}
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True, **own}


class Typed(NamedTuple):
    """A command that runs a job, as it was typed."""

    file: str
    """Job file; '' for a program behind --."""
    options: tuple[str, ...] = ()
    """Options that lead to the same job in the same place: --cluster, -n, --local, --set."""
    changes: tuple[str, ...] = ()
    """Values of --set, with those that other options stand for."""
    cluster: str | None = None
    """Value of --cluster."""
    context: str | None = None
    """Value of --context, which kubectl takes, too."""

    @property
    def is_fresh(self) -> bool:
        """Return True if --fresh was typed, or what it stands for."""
        return FRESH in self.changes

    def again(self, *more: str) -> str:
        """Command that runs it once more."""
        return shlex.join(["lockstep", "run", "-f", self.file, *self.options, *self.context_words, *more])

    @property
    def context_words(self) -> tuple[str, ...]:
        """Option that chooses the context."""
        return ("--context", self.context) if self.context else ()
