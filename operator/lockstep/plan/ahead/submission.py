"""Decisions of `lockstep run -f` on a cluster: what to do about a job that has the name, and what a new job's status says so far (pure)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.names import FIXED_FIELDS, FRESH
from lockstep.api.objects import Object, Typed, condition, go_on_words, is_true
from lockstep.plan.reasons import Reason
from lockstep_spec.words import listed

OF_VERBS = ("suspend", "restart.retry")
"""Fields that verbs set in an existing job. A job file that leaves them out doesn't ask for another value."""
MENDED_BY_OTHERS = frozenset(
    {
        Reason.PREVIOUS_JOB_REMAINS, Reason.CLAIM_DELETED, Reason.SERVICE_ACCOUNT_NOT_FOUND, Reason.WRITE_REFUSED, Reason.FROZEN_RUN_LOST,
        Reason.NAME_TAKEN, Reason.INVALID_CLUSTER,
    }
)  # fmt: skip
"""Refusals of the operator that pass without a change of the job: it starts by itself then."""
OF_CLUSTER = frozenset(
    {Reason.CLUSTER_NOT_FOUND, Reason.NO_DEFAULT_CLUSTER, Reason.SEVERAL_DEFAULT_CLUSTERS, "RailResourceInvalid", "ClaimSizeInvalid"}
)
"""Refusals that only a deployment, or another cluster, can end. A new job doesn't wait for them."""
UNREADABLE = "fields of another version"


@dataclass(frozen=True)
class SubmittedAs:
    """A job as it was submitted to a cluster."""

    typed: Typed
    cluster: str
    """Cluster whose file counts, though it may not have been typed."""
    namespace: str
    place: str
    """The cluster in a sentence."""
    elsewhere: str = ""
    """Options by which other verbs reach the same API server, with a space in front; "" where they ask it by themselves."""

    def again(self, *more: str, anew: bool = False) -> str:
        """Command that submits it once more; with --fresh if that was typed, or with `anew`."""
        return self.typed.again(*more, *(("--fresh",) if anew or self.typed.is_fresh else ()))

    def apply(self, states: str | None, there: str | None) -> str:
        """Command that changes the job which is there. `states`: spec.cluster of the file or of --cluster; `there`: that of the job, which
        can't change once it is set.
        """
        file, options, is_fresh = self.typed.file, self.typed.options, self.typed.is_fresh
        kubectl = shlex.join(["kubectl", "apply", *self.typed.context_words])
        if not (is_fresh or {"--set", "--cluster"} & set(options) or states != there):
            return f"{kubectl} -n {self.namespace} -f {shlex.quote(file)}"
        more = [
            *(() if "--cluster" in options else ("--cluster", self.cluster)),
            *(() if "-n" in options else ("-n", self.namespace)),
        ]
        changes = (*((FRESH,) if is_fresh else ()), *((f"cluster={there}",) if there else ()))
        stated = [word for change in changes for word in ("--set", change)]
        return f"{shlex.join(['lockstep', 'render', '-f', file, *options, *more, *stated, '-o', 'job'])} | {kubectl} -f -"


def differences(wanted: TrainingJob, existing: Object) -> tuple[str, ...]:
    """Fields of spec in which the job on the cluster is another one, sorted. A cluster that only one of them names is none: it may be the
    default.
    """
    try:
        there = TrainingJobSpec.model_validate(existing["spec"])
    except ValidationError:
        return (UNREADABLE,)
    ours, theirs = (dict(_leaves("", spec.model_dump(mode="json", by_alias=True, exclude_none=True))) for spec in (wanted.spec, there))
    fields = {field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)} - set(OF_VERBS)
    return tuple(sorted(fields - ({"cluster"} if wanted.spec.cluster is None or there.cluster is None else set())))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of each field that is no mapping; an empty mapping is as good as none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    else:
        yield path, value


def name_taken(wanted: TrainingJob, existing: Object, submitted: SubmittedAs) -> tuple[str, ...]:
    """Return why a job that is there can't be followed as the one that was submitted: a sentence, then commands. () if it can: it is the
    same, and has not ended.
    """
    name, namespace, status = wanted.metadata.name, submitted.namespace, existing.get("status") or {}
    fields = differences(wanted, existing)
    is_stopped = bool(existing["spec"].get("suspend")) and not wanted.spec.suspend
    if "deletionTimestamp" in existing["metadata"]:
        return (
            (
                f"job {name} of namespace {namespace} is being deleted: run yours once it is gone (lockstep get -n"
                f" {namespace}{submitted.elsewhere})"
            ),
        )
    state = _state(status, is_stopped=is_stopped)
    if not fields and not state:
        return ()
    differs = f" and differs from {submitted.typed.file} in {listed(fields)}" if fields else ""
    sentence = f"namespace {namespace} has a job {name}, which {state or 'has not ended'}{differs}; nothing was changed:"
    return (sentence, *(f"  {command}   # {what}" for command, what in _steps(wanted, state, fields, submitted, existing)))


COMPLETE, FAILED, STOPPED = "is complete", "has failed", "is stopped"


def _state(status: Object, *, is_stopped: bool) -> str:
    """State of a job that is not to be followed; '' of one that runs or is about to."""
    if is_true(status, "Complete"):
        return COMPLETE
    if is_true(status, "Failed"):
        return FAILED
    return STOPPED if is_stopped else ""


def _steps(wanted: TrainingJob, state: str, fields: Sequence[str], submitted: SubmittedAs, existing: Object) -> Iterator[tuple[str, str]]:
    """(command, what it is for), the gentlest first. `existing`: the job on the cluster."""
    there = existing["spec"].get("cluster")
    name, is_training, states = wanted.metadata.name, wanted.spec.training is not None, wanted.spec.cluster
    place = f"{name} -n {submitted.namespace}{submitted.elsewhere}"
    yield {
        COMPLETE: (f"lockstep describe {place}", "shows where its results are"),
        FAILED: (f"lockstep why {place}", "explains why"),
        STOPPED: (f"lockstep resume {place}", f"as it is, to {go_on_words(existing)}"),
    }.get(state, (f"lockstep logs {place} -f", "follows it as it is"))
    if state == FAILED and not fields:
        yield f"lockstep retry {place}", f"to {go_on_words(existing)}"
    if fields == ("nodes",) and wanted.spec.nodes is not None and state in ("", STOPPED):
        yield f"lockstep scale {place} {wanted.spec.nodes}", "gives it your number of nodes"
    elif fields and state in ("", STOPPED) and not _is_fixed(fields):
        yield submitted.apply(states, there), "changes it; it takes that at its next start"
    anew = is_training and (state == COMPLETE or submitted.typed.is_fresh)
    goes_on = " goes on from its checkpoints" if is_training and not anew else " starts yours"
    yield f"lockstep delete {place}", f"removes it, its checkpoints stay; then {submitted.again(anew=anew)}{goes_on}"
    yield submitted.again("--set", f"metadata.name={name}-2"), "runs yours under another name"


def refuse_ended(wanted: TrainingJob, job: Object, at: str, retry: str, typed: Typed) -> None:
    """Raise ConfigError where a job that no operator keeps has ended: how, and commands for what one may want then.

    `at`: the job on a command line; `retry`: command that goes on from its failure.
    """
    status, name = job.get("status") or {}, str(job["metadata"]["name"])
    state = _state(status, is_stopped=False)
    if not state:
        return
    is_training = wanted.spec.training is not None
    first = f"lockstep describe {at}   # shows where its results are" if state == COMPLETE else f"lockstep why {at}   # explains why"
    steps = [first]
    if state == FAILED:
        steps.append(f"{retry}   # to {go_on_words(job)}")
    elif is_training:
        steps.append(f"{typed.again('--fresh')}   # trains anew")
    goes_on = "goes on from its checkpoints" if is_training else "starts yours"
    steps.append(f"lockstep delete {at}   # removes it, its files stay; then {typed.again()} {goes_on}")
    steps.append(f"{typed.again('--set', f'metadata.name={name}-2')}   # runs yours under another name")
    raise ConfigError(f"job {name} {state}; nothing was changed:", *(f"  {step}" for step in steps))


def _is_fixed(fields: Sequence[str]) -> bool:
    """Return True if the API server refuses a change of one of these."""
    return UNREADABLE in fields or any(field == fixed or field.startswith(f"{fixed}.") for field in fields for fixed in FIXED_FIELDS)


class SubmittedState(NamedTuple):
    """State of a job that was submitted."""

    line: str
    """Reason and sentence; '' before the operator has looked at it."""
    accepted: bool = False
    refused: str = ""
    """Message of the operator that refuses it."""
    is_final: bool = False
    """The refusal stands until somebody changes the job, or its cluster."""
    is_of_cluster: bool = False
    """The cluster's file is wrong, or was never deployed."""
    passes: bool = False
    """The refusal passes by itself."""
    is_ready: bool = False
    """A dev environment can be used."""


def standing(status: Object) -> SubmittedState:
    """Read the conditions of a job that was submitted, from its first look on."""
    progress, accepted = condition(status, "Progressing"), condition(status, "Accepted")
    line = f"{progress['reason']}: {progress['message']}" if progress else ""
    if accepted.get("status") != "False" or progress.get("reason") != accepted.get("reason"):  # (one with pods runs on as it was)
        return SubmittedState(line, accepted=accepted.get("status") == "True", is_ready=progress.get("reason") == Reason.READY)
    reason = accepted["reason"]
    return SubmittedState(
        line,
        refused=str(accepted["message"]),
        is_final=reason not in MENDED_BY_OTHERS,
        is_of_cluster=reason in OF_CLUSTER,
        passes=reason == Reason.PREVIOUS_JOB_REMAINS,
    )


def standstill(status: Object) -> str:
    """Return why a job with this status doesn't go on by itself, and what helps; '' if it may."""
    now = standing(status)
    if now.refused and now.is_final and not now.is_of_cluster:
        return f"the operator refuses it: {now.refused}"
    return str(condition(status, "Suspended")["message"]) if is_true(status, "Suspended") else ""
