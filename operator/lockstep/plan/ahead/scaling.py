"""Speed of a job's training on 1, 2, … n nodes: the short jobs that measure it, and what their steps say (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.errors import ConfigError
from lockstep.api.job import Restart, TrainingJob
from lockstep.api.objects import Object
from lockstep_spec.choices import Content
from lockstep_spec.words import number_of

WARM_UP_STEPS = 3
"""First steps, which allocate, compile and fill caches: they are not measured."""
EPOCHS_MAX = 10_000
NEVER = 1_000_000
FEW_NODES = 4
"""Up to so many nodes each number of them is measured; beyond, doublings."""
RECORDED = ("tokens", "stepSeconds", "medianRankSeconds", "optimizerSeconds", "saveWaitSeconds")
"""Values of a step's record that are read."""
COLUMNS = ("NODES", "RANKS", "TOKENS/S", "STEP TIME", "EFFICIENCY", "WAITING")
_WIDTHS = (6, 6, 11, 11, 11, 9)


@dataclass(frozen=True)
class Measured:
    """Speed on one number of nodes, or why there is none."""

    nodes: int
    ranks: int
    steps: int = 0
    """Steps that were measured."""
    tokens_per_second: float = 0.0
    """Tokens of all ranks together, prompts with them, per second."""
    step_seconds: float = 0.0
    """Mean."""
    waiting: float | None = None
    """Share of a step in which the median rank waited for others: 0 to 1. None: not known."""
    problem: str = ""


def sizes(stated: str | None, nodes: int) -> tuple[int, ...]:
    """Numbers of nodes to measure: those of --nodes, or 1 up to the job's. Raises ConfigError."""
    if stated is None:
        doublings = [2**power for power in range(nodes.bit_length()) if 2**power < nodes]
        return tuple(range(1, nodes + 1)) if nodes <= FEW_NODES else (*doublings, nodes)
    words = [word.strip() for word in stated.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= 1024 for word in words):
        raise ConfigError(f"--nodes {stated}: must be numbers of nodes from 1 to 1024 with commas between them, such as 1,2,4")
    return tuple(sorted(set(map(int, words))))


def scaling_job(job: TrainingJob, nodes: int, steps: int) -> TrainingJob:
    """The job for so many steps on so many nodes: from step 0, with its own batch, and without what isn't a step. Raises ConfigError.

    The learning rate doesn't change the speed of a step, so its schedule is left out, too.
    """
    spec = job.spec
    if spec.training is None:
        raise ConfigError(
            "bench scaling measures the steps of spec.training, but this job runs a script, whose steps Lockstep doesn't know"
        )
    optimization = spec.training.optimization.model_copy(
        update={"max_steps": WARM_UP_STEPS + steps + 1, "epochs": EPOCHS_MAX, "warmup_steps": "0"}
    )
    checkpoint = spec.training.checkpoint.model_copy(
        update={"every_steps": NEVER, "resume_from": "None", "content": Content.LITE, "replicas": 1}
    )
    training = spec.training.model_copy(
        update={
            "optimization": optimization, "checkpoint": checkpoint, "evaluation": None,
            "report_to": [],
        }
    )  # fmt: skip
    update = {
        "nodes": nodes, "training": training, "restart": Restart(max_restarts=0), "suspend": False,
        "active_deadline_seconds": None, "ttl_seconds_after_finished": None,
    }  # fmt: skip
    return job.model_copy(update={"spec": spec.model_copy(update=update)})


def measure(records: Mapping[str, Mapping[str, Any]], nodes: int, ranks: int) -> Measured:
    """Speed of a run by the records of its steps, by number: without the first ones, and without the last, of which no record tells the
    ranks' own time.
    """
    by_step = {int(step): record for step, record in records.items()}
    chosen = [step for step in sorted(by_step) if step > WARM_UP_STEPS and step + 1 in by_step]
    if not chosen or any(not by_step[step].get(name) for step in chosen for name in ("tokens", "stepSeconds")):
        return Measured(nodes, ranks, problem="its log has no step that could be measured")
    seconds = sum(by_step[step]["stepSeconds"] for step in chosen)
    own = [by_step[step + 1].get("medianRankSeconds") for step in chosen]
    others = sum(by_step[step].get(name) or 0.0 for step in chosen for name in ("optimizerSeconds", "saveWaitSeconds"))
    waiting = None if None in own else min(1.0, max(0.0, 1 - (sum(own) + others) / seconds))  # type: ignore[arg-type]
    tokens = sum(by_step[step]["tokens"] for step in chosen)
    return Measured(nodes, ranks, len(chosen), tokens / seconds, seconds / len(chosen), waiting)


def efficiency(one: Measured, base: Measured | None) -> float | None:
    """Speed of a node against that of a node of the smallest run: 1 is perfect. None: one of the two has no speed."""
    if base is None or one.problem or not base.tokens_per_second:
        return None
    return (one.tokens_per_second / one.nodes) / (base.tokens_per_second / base.nodes)


def base_of(measured: Sequence[Measured]) -> Measured | None:
    """Smallest run that has a speed."""
    return min((one for one in measured if not one.problem), key=lambda one: one.nodes, default=None)


def heading() -> str:
    return _aligned(COLUMNS)


def row(one: Measured, base: Measured | None) -> str:
    """Line of one number of nodes."""
    if one.problem:
        return f"{_aligned((str(one.nodes), str(one.ranks)))}  {one.problem}"
    share = efficiency(one, base)
    return _aligned((
        str(one.nodes), str(one.ranks), f"{one.tokens_per_second:.0f}", f"{one.step_seconds:.3g} s",
        "-" if share is None else f"{share:.0%}", "-" if one.waiting is None else f"{one.waiting:.0%}",
    ))  # fmt: skip


def _aligned(cells: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=False))


def batch_line(job: TrainingJob) -> str:
    """Sentence about what stays the same from one number of nodes to the next."""
    assert job.spec.training is not None  # noqa: S101 (`scaling_job` has refused others)
    optimization = job.spec.training.optimization
    if optimization.global_batch_size is not None:
        return f"every step has {number_of(optimization.global_batch_size, 'sample')} on any number of nodes (optimization.globalBatchSize)"
    return (
        f"every rank has {number_of(optimization.micro_batch_size, 'sample')} a step, so that a step has more on more nodes"
        " (optimization.microBatchSize)"
    )


def closing(measured: Sequence[Measured], *, one_machine: bool) -> Iterator[str]:
    """Lines below the table."""
    base = base_of(measured)
    if base is not None and base.nodes > 1:
        yield f"efficiency is against {number_of(base.nodes, 'node')}, the fewest that were measured"
    if one_machine and any(one.nodes > 1 for one in measured):
        yield "all nodes are processes of this machine and share its cores: on machines of their own the efficiency is another"


def as_json(measured: Sequence[Measured]) -> Object:
    """`runs`: a row each, without what isn't known; shares from 0 to 1."""
    base = base_of(measured)
    return {"runs": [_run_json(one, efficiency(one, base)) for one in measured]}


def _run_json(one: Measured, share: float | None) -> Object:
    if one.problem:
        return {"nodes": one.nodes, "ranks": one.ranks, "problem": one.problem}
    values = {
        "nodes": one.nodes, "ranks": one.ranks, "steps": one.steps, "tokensPerSecond": round(one.tokens_per_second, 3),
        "stepSeconds": round(one.step_seconds, 6), "efficiency": share, "waiting": one.waiting,
    }  # fmt: skip
    return {key: round(value, 4) if key in ("efficiency", "waiting") else value for key, value in values.items() if value is not None}
