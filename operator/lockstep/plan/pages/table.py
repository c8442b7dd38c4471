"""Tables and pages of `lockstep get` and `lockstep describe`, from the objects as the API server has them, and marks on statuses that are
stale (pure).

An operator that is away, doesn't lead or lacks rights writes no status. Its Lease says when it last led; a status itself can't: it is
written when something changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import ANNOTATION_TROUBLE
from lockstep.api.objects import Object, condition, has_ended, is_run, is_true
from lockstep.plan.times import seconds_of, timestamp
from lockstep_spec.words import duration, number_of, printable_line

COLUMNS = ("NAME", "NODES", "RANKS", "STEP", "PROGRESS", "RESTARTS", "STATE", "AGE")
VERDICTS = {"True": ", verified", "False": ", NOT as asked"}
"""Status of FabricVerified → what follows the fabric's name; nothing where it is unknown."""
WIDE = (*COLUMNS, "CLUSTER", "TRANSPORT", "CHECKPOINT", "LEFT", "LOSS", "MESSAGE")
OVERVIEW = ("NAME", "STATE", "STEP", "LOSS", "STEP TIME", "TOKENS/S", "LEFT", "RESTARTS", "GOODPUT", "TRANSPORT")
CONDITION = "StatusCurrent"
"""Condition that `get` adds to a job of which nothing has been heard; the API server has none of this type."""


def row(job: Object, now: float, columns: Sequence[str] = COLUMNS, default_nodes: int | None = None) -> tuple[str, ...]:
    """One job's cells in these columns. A job that has ended has the number of nodes and ranks that it had.

    `default_nodes`: those of a job that states none; None: nobody knows.
    """
    status = job.get("status", {})
    trainer, ranks, summary = status.get("trainer", {}), status.get("ranks", {}), condition(status, "Progressing")
    commit, cluster = status.get("checkpoint") or {}, status.get("cluster", {})
    ended, desired, left = has_ended(status), ranks.get("desired"), trainer.get("estimatedRemainingSeconds")
    nodes = job["spec"].get("nodes") or len(ranks.get("order") or []) or default_nodes
    cells = {
        "NAME": job["metadata"]["name"],
        "NODES": str(nodes or "-") if ended else f"{running_nodes(status)}/{nodes or '?'}",
        "RANKS": str(desired or "-") if ended else f"{ranks.get('ready', 0)}/{'?' if desired is None else desired}",
        "STEP": of_total(trainer.get("step", commit.get("lastCommittedStep")), trainer.get("totalSteps")),
        "PROGRESS": _percentage(trainer.get("progressPercentage")),
        "RESTARTS": status.get("restarts", 0),
        "STATE": summary.get("reason", "Unknown") + (" (stale)" if condition(status, CONDITION).get("status") == "False" else ""),
        "AGE": age(job["metadata"].get("creationTimestamp"), now),
        "CLUSTER": cluster.get("name", "-"),
        "TRANSPORT": cluster.get("transport", "-"),
        "CHECKPOINT": commit.get("lastCommittedStep", "-"),
        "LEFT": "-" if left is None else duration(left),
        "LOSS": metric(trainer, "loss"),
        "STEP TIME": metric(trainer, "stepSeconds", " s"),
        "TOKENS/S": metric(trainer, "tokensPerSecond"),
        "GOODPUT": _percentage((status.get("goodput") or {}).get("percentage")),
        "MESSAGE": summary.get("message", ""),
    }
    return tuple(printable_line(str(cells[column])) for column in columns)


def _percentage(share: int | None) -> str:
    return "-" if share is None else f"{share}%"


def running_nodes(status: Object) -> int:
    """Pods that run; a status that an operator of before has written says only how many exist."""
    return int(status["runningNodes"] if "runningNodes" in status else status.get("nodes", 0))


def describe(job: Object, events: list[Object], now: float, where: str) -> Iterator[str]:
    """A page about one job, line by line. `where`: the place that it is in, such as `in namespace team`."""
    return map(printable_line, _page(job, events, now, where))


def _page(job: Object, events: list[Object], now: float, where: str) -> Iterator[str]:
    metadata, spec, status = job["metadata"], job["spec"], job.get("status", {})
    yield f"Name        {metadata['name']} ({where}, {age(metadata.get('creationTimestamp'), now)} old)"
    yield f"Work        {_work(spec)}"
    yield from _where(spec, status)
    yield from _training(status, now)
    yield from _failure(status)
    yield from _restarts(status)
    yield from _result(status)
    yield ""
    yield "Conditions"
    for entry in status.get("conditions", []):
        yield f"  {entry['type']:20} {entry['status']:8} {entry['reason']:22} {entry['message']}"
    if not status.get("conditions"):
        yield "  none yet: does an operator work here? (lockstep doctor)"
    yield ""
    yield "Events"
    for event in events:
        yield (
            f"  {age(event.get('lastTimestamp') or event.get('eventTime'), now):>5}  {event.get('reason', ''):22}"
            f" {event.get('message', '')}"
        )
    if not events:
        yield "  none are kept any more"


def _work(spec: Object) -> str:
    if "training" in spec:
        training = spec["training"]
        return (
            f"training of {training['model']['name']} ({training.get('method', 'LoRA')},"
            f" {training.get('zeroStage', 'the default ZeRO stage')})"
        )
    if "script" in spec:
        script = spec["script"]
        program = script.get("command") or (["-m", script["module"]] if "module" in script else [script["path"]])
        return " ".join(["script", *program, *script.get("args", [])])
    return "dev environment: runs what it is asked to" if spec.get("type") == "Interactive" else "nothing is asked for"


def _where(spec: Object, status: Object) -> Iterator[str]:
    profile, ranks, run = status.get("cluster", {}), status.get("ranks", {}), status.get("run", {})
    if profile:
        yield f"Cluster     {profile['name']}, between nodes {profile['transport']}"
    yield (
        f"Ranks       {ranks.get('ready', 0)} of {ranks.get('desired', '?')} ready, on {running_nodes(status)} of {spec.get('nodes', '?')}"
        " nodes"
    )
    if ranks.get("order"):
        yield f"Order       ranks follow the racks: nodes {', '.join(map(str, ranks['order']))}"
    fabric = condition(status, "FabricVerified")
    if fabric:
        verdict = VERDICTS.get(fabric["status"], "")
        yield f"Fabric      {status.get('fabric', {}).get('transport', 'not known yet')}{verdict}: {fabric.get('message', '')}"
    if run.get("pending"):
        yield "Pending     spec or TrainingCluster have changed since the start: that takes effect at the next start from zero pods"


def _training(status: Object, now: float) -> Iterator[str]:
    trainer, commit = status.get("trainer", {}), status.get("checkpoint", {})
    if trainer:
        doing = "" if is_true(status, "Complete") else _doing(trainer)
        yield f"Step        {of_total(trainer.get('step'), trainer.get('totalSteps'))}{doing}"
        metrics = ", ".join(f"{entry['name']} {entry['value']}" for entry in trainer.get("metrics", []))
        yield f"Metrics     {metrics or 'none yet'}"
    if "goodput" in status:
        share = status["goodput"].get("percentage")
        until = "" if status.get("stop") or has_ended(status) else ", up to its newest step,"
        yield "Goodput     " + (
            "unknown: no step was reported" if share is None else f"{share}% of the time that its pods were there{until} was training"
        )
    if commit:
        path = f", {commit['path']}" if "path" in commit else ""
        yield f"Checkpoint  step {commit['lastCommittedStep']}, {age(commit['lastCommitTime'], now)} ago{path}"
    if is_true(status, "SavesFailing"):
        yield f"Saves       {condition(status, 'SavesFailing')['message']}"


def _doing(trainer: Object) -> str:
    left = trainer.get("estimatedRemainingSeconds")
    parts = (trainer.get("activity"), None if left is None else f"{duration(left)} left")
    return f" ({', '.join(filter(None, parts))})" if any(parts) else ""


def _failure(status: Object) -> Iterator[str]:
    failure = status.get("failure")
    if not failure:
        return
    yield f"Failure     {failure.get('cause', 'Unknown')}: {failure.get('message', '')}"
    for line in failure.get("lastLines", [])[-5:]:
        yield f"            | {line}"


def _restarts(status: Object) -> Iterator[str]:
    history = status.get("restartHistory", [])
    if not history:
        return
    counted = number_of(status.get("restartsCountTowardsMax", 0), "failure")
    yield f"Restarts    {status.get('restarts', 0)}; since the last new checkpoint {counted}, of those that restart.maxRestarts counts"
    for entry in history:
        down = entry.get("downtimeSeconds")
        cost = f"{number_of(entry['lostSteps'], 'step')} lost, " + ("not training again yet" if down is None else f"{duration(down)} down")
        yield f"            attempt {entry['attempt']}, {entry['cause']}: {entry['message']} ({cost})"


def _result(status: Object) -> Iterator[str]:
    result = status.get("result", {})
    for key, label in (("adapter", "Adapter"), ("model", "Model")):
        if key in result:
            yield f"{label:11} {result[key]}"
    if "evalLossBefore" in result:
        yield f"Eval loss   {result['evalLossBefore']} before, {result.get('evalLossAfter', '?')} after"
    if "note" in result:
        yield f"Note        {result['note']}"


def metric(trainer: Object, name: str, unit: str = "") -> str:
    return next((f"{entry['value']}{unit}" for entry in trainer.get("metrics", []) if entry["name"] == name), "-")


def of_total(step: int | None, total: int | None) -> str:
    return "-" if step is None else f"{step}/{total}" if total is not None else str(step)


def age(stamp: str | None, now: float) -> str:
    """Time since then, as kubectl writes it; `-` when nobody says when."""
    return "-" if not stamp else duration(max(0, now - seconds_of(stamp)))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """One line a row, each column as wide as its longest cell; all rows have as many cells. Nothing in them acts on a terminal."""
    rows = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


STALE_SECONDS = 30.0
"""Another replica leads 17 seconds after the last one's death, and clocks differ a little."""


@dataclass(frozen=True)
class Unheard:
    """Statuses are not written any more."""

    since: str
    """RFC 3339."""
    why: str

    def text(self, now: float) -> str:
        return f"{self.why} since {self.since} ({age(self.since, now)} ago): what is shown is from before; lockstep doctor says more"


def unheard_of(lease: Mapping[str, Any], now: float) -> Unheard | None:
    """Silence that the operator's Lease shows; None: it leads, and works."""
    spec, annotations = lease.get("spec") or {}, lease["metadata"].get("annotations") or {}
    renewed = _seconds(spec.get("renewTime")) or _seconds(lease["metadata"].get("creationTimestamp"))
    if renewed is None:
        return None
    if now - renewed > STALE_SECONDS:
        holder = spec.get("holderIdentity")
        who = f"the operator ({printable_line(str(holder))[:80]}) has not been heard" if holder else "no operator has led"
        return Unheard(timestamp(renewed), who)
    since, _, lack = str(annotations.get(ANNOTATION_TROUBLE, "")).partition(" ")
    return Unheard(since, f"the operator lacks a right ({printable_line(lack)[:200]})") if lack and _seconds(since) is not None else None


def _seconds(stamp: object) -> float | None:
    try:
        return seconds_of(stamp) if isinstance(stamp, str) else None
    except ValueError:
        return None


def is_open(job: Object) -> bool:
    """Return True if more is to be heard of the job from the operator: it has not ended, and is no run without one."""
    return not (is_run(job) or has_ended(job.get("status") or {}))


def marked(job: Object, unheard: Unheard | None, now: float) -> Object:
    """The job as `get` prints it: one that is open, of which nothing has been heard, has CONDITION with status False."""
    if unheard is None or not is_open(job):
        return job
    status = job.get("status") or {}
    condition = {
        "type": CONDITION, "status": "False", "reason": "OperatorSilent", "message": unheard.text(now), "lastTransitionTime": unheard.since,
        "observedGeneration": status.get("observedGeneration", 0),
    }  # fmt: skip
    return {**job, "status": {**status, "conditions": [*(status.get("conditions") or []), condition]}}
