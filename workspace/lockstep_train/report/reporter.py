"""Reporter of a run: what happens is reported once, and goes wherever it is wanted."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep_machine.readings import stat_fields
from lockstep_train.base.runfile import RunConfig
from lockstep_train.report.agent import Agent
from lockstep_train.report.jsonl import JsonLog
from lockstep_train.report.sinks.choose import open_sinks
from lockstep_train.report.sinks.sink import MetricsSink, Point
from lockstep_train.report.terminal import Terminal, checkpoint_line, evaluation_line, metric_text, step_line

PROCESS = Path("/proc/self")


def process_start(process: Path = PROCESS) -> float:
    """Start of this process, on the clock since boot: the operating system's word, so that Python's own start is in it."""
    return int(stat_fields(process)[19]) / os.sysconf("SC_CLK_TCK")


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StartUp:
    """Seconds that each part of a start takes, from the process's own start to the end of its first step: the cost of a restart.

    `done` ends a part and begins the next. The same part may come again: its times add up.
    """

    def __init__(self, began: float | None = None, clock: Callable[[], float] = since_boot) -> None:
        self._clock = clock
        self._began = self._last = process_start() if began is None else began
        self._parts: dict[str, float] = {}
        self._finished = False

    def done(self, part: str) -> None:
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def finish(self, part: str) -> dict[str, float] | None:
        """End the last part; seconds of each, to hundredths, and of all as `total`. None, and nothing done, after the first time."""
        if self._finished:
            return None
        self._finished = True
        self.done(part)
        return {name: round(seconds, 2) for name, seconds in {**self._parts, "total": self._last - self._began}.items()}


def startup_line(seconds: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total" and value >= 0.05)
    return f"Start-up: {seconds['total']:.1f} s to the end of the first step ({parts})"


MEASUREMENTS = ("train_log", "eval_log", "expert_usage")
DRAIN_SECONDS = {"Done": 15.0, "Stopped": 8.0, "Failed": 3.0}
"""Seconds that the end of a run waits for its metrics to arrive, all destinations together."""
STATUS_METRICS = (
    "loss", "learningRate", "gradientNorm", "tokensPerSecond", "mfu", "stepSeconds", "peakMemoryBytes", "skippedSteps", "saveWaitSeconds",
    "saveSeconds", "saveFailures", "savesSkipped",
)  # fmt: skip
"""Values of a step that the job's status shows."""
EVENTS_KEPT = 200
"""Most events of the start-up, before the files are open."""


class Reporter:
    """Reports of rank 0; other ranks only tell their agent that they live. Any thread may call it, and nothing here raises."""

    def __init__(self, socket_path: str | None, rank: int, began: float | None = None) -> None:
        """`began`: when the start began, on the clock since boot; None: when the process did."""
        self.agent = Agent(socket_path, rank)
        self._first = rank == 0
        self._terminal = Terminal(sys.stdout)
        self._logs: dict[str, JsonLog] = {}
        self._sinks: list[MetricsSink] = []
        self._early: list[dict[str, Any]] = []
        self._step = 0
        self.startup = StartUp(began)
        self.out_of_memory_advice: list[str] = []
        """Lines for a rank whose device runs out of memory, once there is a plan."""

    def open_run(self, config: RunConfig, resumed_step: int, attempt: int | None = None) -> None:
        """Write everything also to the run's logs from here on, and send it where `metrics` says."""
        self.open_logs(config.run_dir / "logs", resumed_step, attempt)
        if self._first:
            self._sinks = open_sinks(config, resumed_step, self.event)

    def open_logs(self, folder: Path, resumed_step: int, attempt: int | None = None) -> None:
        """Write to the files in `folder`; what they hold of steps after `resumed_step` is undone."""
        self._step = resumed_step
        if not self._first:
            return
        for name in MEASUREMENTS:
            # a run that starts at step 0 measures even step 0, the evaluation before training, anew
            self._open(folder / f"{name}.jsonl", resumed_step or -1, attempt, history=False)
        self._open(folder / "events.jsonl", resumed_step, attempt, history=True)
        for event in self._early:
            self._write("events", {"step": resumed_step, **event})
        self._early.clear()

    def _open(self, path: Path, resumed_step: int, attempt: int | None, history: bool) -> None:
        try:
            self._logs[path.stem] = JsonLog(path, resumed_step, attempt, history)
        except OSError as error:
            self.say(f"{path} can't be written ({error.strerror}): training goes on without it")

    def close(self, outcome: str = "Done") -> None:
        """End the run's reports: Done, Stopped or Failed. Waits a bounded time for the destinations of metrics; may be called twice."""
        self.end_bar()
        self._close_sinks(outcome)
        for log in self._logs.values():
            log.close()

    def end_bar(self) -> None:
        """End the bar: what others print next gets a line of its own."""
        self._terminal.close()

    def _close_sinks(self, outcome: str) -> None:
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(outcome)
        deadline = time.monotonic() + DRAIN_SECONDS[outcome]
        for sink in sinks:
            drained = sink.drained(deadline - time.monotonic())
            if sink.dropped or not drained:
                line = f"{sink.name} is missing some metrics ({sink.dropped} points dropped); the files in logs/ have all of them"
                self.event("sinkIncomplete", line=line, sink=sink.name, droppedPoints=sink.dropped)

    def say(self, line: str) -> None:
        """Print a line on rank 0's standard output."""
        if self._first:
            self._terminal.line(line)

    def activity(self, activity: str) -> None:
        self.agent.send_activity(activity)

    def resumed(self, step: int, total: int, commit: Path) -> None:
        """Report what is done already when this start begins: shown before its own first step."""
        if self._first:
            self.agent.send("activity", activity="Resume", step=step, totalSteps=total, path=str(commit))

    def event(self, kind: str, *, line: str | None = None, step: int | None = None, **fields: Any) -> None:
        """Report something that happens now and then: a record in events.jsonl and, with `line`, a line for people.

        `kind` is camelCase, `fields` are what a tool may read, with units in their names. Default `step`: the last finished one.
        """
        if line is not None:
            self.say(line)
        if not self._first:
            return
        record = {"kind": kind, **fields}
        if self._logs:
            self._write("events", {"step": self._step if step is None else step, **record})
        elif len(self._early) < EVENTS_KEPT:
            self._early.append(record if step is None else {"step": step, **record})

    def step(self, step: int, total: int, epoch: float, remaining_seconds: float | None, values: Mapping[str, float | None]) -> None:
        """Report a step. `values`: `loss`, `learningRate`, `gradientNorm`, `tokensPerSecond`, `stepSeconds` and what else is measured;
        None: not known.
        """
        self._step = step
        if not self._first:
            self.agent.send("step", step=step, totalSteps=total)
            return
        remaining = None if remaining_seconds is None else round(remaining_seconds)
        measured = {name: value for name in STATUS_METRICS if (value := values.get(name)) is not None}
        texts = {name: metric_text(name, value) for name, value in measured.items()}
        self.agent.send("step", step=step, totalSteps=total, epoch=int(epoch), estimatedRemainingSeconds=remaining, metrics=texts)
        record = {"step": step, "totalSteps": total, "epoch": round(epoch, 4), **values, "remainingSeconds": remaining}
        self._write("train_log", record)
        self._measure("train", step, {**values, "epoch": epoch})
        self._terminal.progress(step, total, step_line(step, total, remaining_seconds, {**values, "epoch": epoch}))
        seconds = self.startup.finish("firstStep")
        if seconds is not None:
            self.event("startUp", line=startup_line(seconds), seconds=seconds)

    def evaluation(self, step: int, loss: float, **fields: Any) -> None:
        """Report the evaluation loss at `step`, with its perplexity; `fields` go into eval_log.jsonl as they are."""
        self.startup.done("evaluation")
        perplexity = math.exp(loss) if loss < 700 else None
        texts = {"evalLoss": metric_text("evalLoss", loss)} | ({} if perplexity is None else {"perplexity": f"{perplexity:.4g}"})
        self.agent.send("evaluate", step=step, metrics=texts)
        self._write("eval_log", {"step": step, "evalLoss": loss, "perplexity": perplexity, **fields})
        self._measure("eval", step, {"loss": loss, "perplexity": perplexity})
        self.say(evaluation_line(step, loss, perplexity))

    def checkpoint(
        self, step: int, path: Path, size_bytes: int, seconds: float, *, stall_seconds: float | None = None, **fields: Any
    ) -> None:
        """Report a durable commit. `size_bytes` of this rank's shard, `seconds` from the snapshot to the commit, `stall_seconds` that
        training waited.
        """
        self.agent.send("checkpoint", step=step, path=str(path), bytes=size_bytes)
        line = checkpoint_line(step, path, size_bytes, seconds, stall_seconds)
        measured = {"bytes": size_bytes, "seconds": round(seconds, 4), "stallSeconds": stall_seconds}
        self.event("checkpoint", line=line, step=step, path=str(path), **measured, **fields)
        self._measure("checkpoint", step, measured)

    def save_failed(self, step: int, problem: str, seconds: float) -> None:
        """Report a save that is no commit, `seconds` after its snapshot."""
        self.agent.send("savefailed", step=step, problem=problem[:2000])
        self.event("saveFailed", line=f"CHECKPOINT step {step} FAILED: {problem}", step=step, problem=problem, seconds=round(seconds, 4))

    def experts(self, step: int, layers: Mapping[str, Sequence[int]], **fields: Any) -> None:
        """Report the tokens that each expert of each layer got in `step`, over all ranks: `layers` maps a layer's name to counts, expert by
        expert.
        """
        self._write("expert_usage", {"step": step, **fields, "layers": {name: list(counts) for name, counts in layers.items()}})
        loads = [max(counts) * len(counts) / total for counts in layers.values() if (total := sum(counts)) > 0]
        self._measure("experts", step, {"highestLoad": max(loads, default=None)})  # of the mean: 1 is balance

    def end(self, result: Mapping[str, str | None]) -> None:
        self.agent.send("end", result=dict(result))

    def _write(self, log: str, record: Mapping[str, Any]) -> None:
        if log in self._logs:
            self._logs[log].write(record)

    def _measure(self, group: str, step: int, values: Mapping[str, float | None]) -> None:
        finite = {f"{group}/{name}": float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if finite:
            point = Point(step, time.time(), finite)
            for sink in self._sinks:
                sink.put(point)
