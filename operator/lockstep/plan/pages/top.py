"""Snapshot of a job for `lockstep top`: as plain values, and as lines (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lockstep.api.names import node_index
from lockstep.api.objects import Object, condition
from lockstep.plan.pages.load import load_page
from lockstep.plan.pages.logs import layout_of, nodes_of, ranks_of_node
from lockstep.plan.pages.table import OVERVIEW, VERDICTS, age, aligned, of_total, row
from lockstep_gang.contract.layout import RankLayout
from lockstep_spec.words import binary_size, duration

LOCAL = "local run"
"""Instead of a namespace."""
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
ANSWERED = ("gigabits", "cpu", "memory", "gpus", "rankLoads", "gpuProblem", "problem", "ageSeconds", "notAsked")


def snapshot(job: Object, pods: Sequence[Object], answers: Mapping[int, Object]) -> Object:
    """`answers`: by node, what it said of itself (`runfolder.Watch`) or `{"problem": …}`. Values that nobody knows are left out."""
    status = job.get("status", {})
    trainer, fabric, verified = status.get("trainer", {}), status.get("fabric", {}), condition(status, "FabricVerified")
    summary = condition(status, "Progressing")
    layout = layout_of(status.get("ranks") or {}, nodes_of(job))
    values = {
        "job": job["metadata"]["name"],
        "namespace": job["metadata"]["namespace"],
        "state": summary.get("reason", "Unknown"),
        "message": summary.get("message", "no status yet: does an operator work here? (lockstep doctor)"),
        **{key: trainer.get(key) for key in ("activity", "step", "totalSteps", "progressPercentage", "estimatedRemainingSeconds")},
        "attempts": status.get("attempts"),
        "restarts": status.get("restarts", 0),
        "goodputPercentage": status.get("goodput", {}).get("percentage"),
        "metrics": {one["name"]: one["value"] for one in trainer.get("metrics", [])},
        "checkpoint": status.get("checkpoint"),
        "transport": status.get("cluster", {}).get("transport"),
        "fabric": {"uses": fabric.get("transport"), "verified": verified.get("status"), "message": verified.get("message", "")},
        "ranks": {key: value for key, value in (status.get("ranks") or {}).items() if key not in ("order", "perNode")},
        "loss": _curve(answers, trainer.get("step")),
        "nodes": [_node(layout, pod, answers) for pod in sorted(pods, key=lambda pod: node_index(pod["metadata"]["name"]))],
    }
    return {key: value for key, value in values.items() if value not in (None, {})}


def _curve(answers: Mapping[int, Object], reached: int | None) -> list[list[float]]:
    """Losses by step, without those of an earlier attempt behind the step that this one has reached."""
    curve: Object = next((answer["curve"] for answer in answers.values() if answer.get("curve")), {})
    return [
        [int(step), values["loss"]]
        for step, values in curve.items()
        if values.get("loss") is not None and (reached is None or int(step) <= reached)
    ]


def _node(layout: RankLayout, pod: Object, answers: Mapping[int, Object]) -> Object:
    node = node_index(pod["metadata"]["name"])
    answer = answers.get(node, {})
    ranks = ranks_of_node(layout, node)
    on = pod.get("spec", {}).get("nodeName")
    return {"node": node, "pod": pod["metadata"]["name"], **({"nodeName": on} if on else {}), "ranks": list(ranks), **_facts(answer)}


def machine_node(host: str, ranks: Sequence[int], answer: Object) -> Object:
    """Node of a snapshot that is a machine and no pod. `ranks`: those that should run there."""
    return {"node": 0, "host": host, "ranks": list(ranks), **_facts(answer)}


def _facts(answer: Object) -> Object:
    running = {"ranksRunning": answer["ranks"]} if "ranks" in answer else {}
    return {**running, **{key: answer[key] for key in ANSWERED if answer.get(key)}}


def top_page(view: Object, now: float, width: int | None = None) -> Iterator[str]:
    """The snapshot for a person. `width`: of the terminal, in characters; None: no limit."""
    yield f"{view['job']}  {view['state']}  {_progress(view)}"
    if view["state"] != "Running":
        yield f"  {view['message']}"
    if view["loss"]:
        yield f"loss        {_loss(view['loss'], CURVE_WIDTH if width is None else max(20, min(CURVE_WIDTH, width - 50)))}"
    if speed := _speed(view.get("metrics", {})):
        yield f"speed       {speed}"
    fabric = view["fabric"]
    uses = fabric.get("uses") or view.get("transport") or "not known yet"
    if view["namespace"] != LOCAL:  # processes of one machine have none
        yield f"fabric      {uses}{_verified(fabric)}"
    if "checkpoint" in view:
        when = view["checkpoint"].get("lastCommitTime")
        yield f"checkpoint  step {view['checkpoint']['lastCommittedStep']}" + (f", {age(when, now)} ago" if when else "")
    goodput = (
        f"{view['goodputPercentage']}% of the pods' time was training" if "goodputPercentage" in view else "unknown: no step was reported"
    )
    yield f"goodput     {goodput}; attempt {view.get('attempts', '-')}, {view['restarts']} restart{'' if view['restarts'] == 1 else 's'}"
    if view["nodes"]:
        yield ""
        yield from load_page(view["nodes"], width)


def _progress(view: Object) -> str:
    parts = [f"step {of_total(view['step'], view.get('totalSteps'))}" if "step" in view else "no step yet"]
    parts += [f"{view['progressPercentage']}%"] if "progressPercentage" in view else []
    if view["state"] == "Complete":
        return ", ".join(parts)
    parts += [f"{duration(view['estimatedRemainingSeconds'])} left"] if "estimatedRemainingSeconds" in view else []
    ranks = view.get("ranks", {})
    parts += [f"{ranks.get('ready', 0)} of {ranks['desired']} ranks"] if "ready" in ranks else []
    return ", ".join(parts)


def _loss(curve: list[list[float]], width: int) -> str:
    values = [value for _, value in curve]
    return (
        f"{sparkline(values, width)}  {values[0]:.4g} at step {curve[0][0]:.0f}, {values[-1]:.4g} at step {curve[-1][0]:.0f}, least"
        f" {min(values):.4g}"
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """A bar a value, of their means where there are more than `width`; the least is the lowest."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / span * len(BARS)))] for mean in means)


def _speed(metrics: Mapping[str, str]) -> str:
    shown = (
        ("stepSeconds", "{} s a step"), ("tokensPerSecond", "{} tokens/s"), ("mfu", "MFU {}"),
        ("peakMemoryBytes", "peak memory {}"), ("saveWaitSeconds", "{} s waited for saves"),
    )  # fmt: skip
    return ", ".join(
        text.format(_bytes(metrics[name]) if name == "peakMemoryBytes" else metrics[name]) for name, text in shown if name in metrics
    )


def _verified(fabric: Object) -> str:
    word = VERDICTS.get(fabric.get("verified") or "", "")
    return f"{word}: {fabric['message']}" if fabric.get("message") else word


def _bytes(count: Any) -> str:
    try:
        value = float(count)
    except (TypeError, ValueError):
        return str(count)
    return binary_size(value)


def overview(jobs: Sequence[Object]) -> Iterator[str]:
    """A line a job, those that run first."""
    rows = sorted((row(job, 0.0, OVERVIEW) for job in jobs), key=lambda cells: (cells[OVERVIEW.index("STATE")] != "Running", cells[0]))
    yield from aligned([OVERVIEW, *rows])
