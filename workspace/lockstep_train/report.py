"""What the run tells: lines for people, JSONL files for tools, datagrams for the agent. None of them can stop the training."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

DATAGRAM_BYTES = 60_000
TRACEBACK_LINES = 30
PATIENCE_SECONDS = 2.0
SCHEMA = 1


class Agent:
    """The agent's datagram socket; silent when there is none or nobody listens."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if path else None
        self._activity: str | None = None

    def send(self, event: str, **fields: Any) -> None:
        """Progress is dropped at once when the agent's queue is full; what matters later waits for it a little."""
        if self._socket is None or self._path is None:
            return
        self._socket.settimeout(0 if event in {"activity", "step"} else PATIENCE_SECONDS)
        datagram = json.dumps({"rank": self._rank, "event": event, **fields}).encode()
        if len(datagram) <= DATAGRAM_BYTES:
            with contextlib.suppress(OSError):
                self._socket.sendto(datagram, self._path)

    def send_activity(self, activity: str) -> None:
        if activity != self._activity:
            self._activity = activity
            self.send("activity", activity=activity)

    def send_error(self, error: BaseException) -> None:
        lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
        self.send("error", exception=type(error).__name__, message=str(error)[:2000], traceback=[line[:500] for line in lines])


class MetricsLog:
    """A JSONL file of records with a `step`. On resume the records after that step are dropped, so none is there twice."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if _step(line) <= resumed_step]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk costs a record, not the run
            self._file.write(json.dumps({"schema": SCHEMA, "time": round(time.time(), 3), **record}) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The record's step; a torn last line counts as after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Reporter:
    """Everything rank 0 says; other ranks only tell the agent that they live."""

    def __init__(self, socket_path: str | None, rank: int) -> None:
        self.agent = Agent(socket_path, rank)
        self._first = rank == 0
        self._train_log: MetricsLog | None = None
        self._eval_log: MetricsLog | None = None

    def open_logs(self, folder: Path, resumed_step: int) -> None:
        if self._first:
            self._train_log = MetricsLog(folder / "train_log.jsonl", resumed_step)
            self._eval_log = MetricsLog(folder / "eval_log.jsonl", resumed_step)

    def close(self) -> None:
        for log in (self._train_log, self._eval_log):
            if log is not None:
                log.close()

    def say(self, line: str) -> None:
        if self._first:
            print(line, flush=True)

    def activity(self, activity: str) -> None:
        self.agent.send_activity(activity)

    def step(self, step: int, total: int, epoch: int, remaining_seconds: float, values: dict[str, float]) -> None:
        """`values`: loss, learningRate, gradientNorm, tokensPerSecond, stepSeconds."""
        texts = {key: format_metric(key, value) for key, value in values.items()}
        self.agent.send("step", step=step, totalSteps=total, epoch=epoch, estimatedRemainingSeconds=round(remaining_seconds), metrics=texts)
        if self._train_log is not None:
            self._train_log.write({"step": step, "totalSteps": total, "epoch": epoch, **values})
        self.say(
            f"Step {step}/{total} | Loss: {texts['loss']} | LR: {texts['learningRate']} | Grad norm: {texts['gradientNorm']} | "
            f"Tokens/s: {texts['tokensPerSecond']} | ETA: {format_duration(remaining_seconds)}"
        )

    def evaluation(self, step: int, loss: float) -> None:
        self.agent.send("evaluate", step=step, metrics={"evalLoss": f"{loss:.4f}"})
        if self._eval_log is not None:
            self._eval_log.write({"step": step, "evalLoss": loss})
        self.say(f"Eval Loss: {loss:.4f} | Step {step}")

    def checkpoint(self, step: int, path: Path, size_bytes: int, seconds: float) -> None:
        self.agent.send("checkpoint", step=step, path=str(path), bytes=size_bytes)
        self.say(f"CHECKPOINT step {step} | {path} | {size_bytes / 1e6:.1f} MB a rank | {seconds:.2f} s")

    def end(self, result: dict[str, str | None]) -> None:
        self.agent.send("end", result=result)


def format_metric(name: str, value: float) -> str:
    if name == "learningRate":
        return f"{value:.2e}"
    return f"{value:.0f}" if name == "tokensPerSecond" else f"{value:.4f}"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
