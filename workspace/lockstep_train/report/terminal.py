"""Standard output: plain lines into a pipe or a file; on a terminal a bar for the steps, with the other lines above it.

The beginnings of lines that people grep for are an interface: `Step `, `Eval Loss: `, `CHECKPOINT `.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

BAR_CELLS = 20
_CLEAR = "\r\x1b[K"


class Terminal:
    """Writer of whole lines, for any thread. A stream that fails or is closed costs its lines, never the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._has_bar = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._bar = ""
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        with self._lock:
            self._write(f"{_CLEAR}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def progress(self, done: int, total: int, text: str) -> None:
        """Show progress: a line into a pipe; on a terminal the bar's new state."""
        if not self._has_bar:
            self.line(text)
            return
        with self._lock:
            self._bar = bar(done, total, text, shutil.get_terminal_size().columns - 1)
            self._write(f"{_CLEAR}{self._bar}")

    def close(self) -> None:
        """Leave the bar where it is; what is printed next starts a line of its own."""
        with self._lock:
            if self._bar:
                self._bar = ""
                self._write("\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def bar(done: int, total: int, text: str, columns: int) -> str:
    """Bar of at most `columns` characters, so that the terminal doesn't wrap what the next state must overwrite."""
    cells = BAR_CELLS * done // max(1, total)
    return f"[{'#' * cells}{'.' * (BAR_CELLS - cells)}] {100 * done // max(1, total):3d} % | {text}"[: max(0, columns)]


def print_error(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


Values = Mapping[str, float | None]
WHOLE = ("Bytes", "Count", "Steps", "Tokens", "Rank", "tokensPerSecond", "saveFailures", "savesSkipped")
"""Ends of the names of metrics that are shown without decimals."""


def step_line(step: int, total: int, remaining_seconds: float | None, values: Values) -> str:
    """Line of a step: `Step 12/1502 | Loss: 2.2310 | LR: 1.33e-07 | …`. What is not known is left out."""
    shown: list[tuple[str, float | None, Callable[[float], str]]] = [
        ("Loss", values.get("loss"), "{:.4f}".format),
        ("LR", values.get("learningRate"), "{:.2e}".format),
        ("Grad norm", values.get("gradientNorm"), "{:.4f}".format),
        ("Tokens/s", values.get("tokensPerSecond"), "{:.0f}".format),
        ("MFU", values.get("mfu"), lambda share: f"{100 * share:.1f} %"),
        ("Memory", values.get("peakMemoryBytes"), lambda size: f"{size / 1e9:.1f} GB"),
        ("Epoch", values.get("epoch"), "{:.2f}".format),
        ("ETA", remaining_seconds, clock),
    ]
    return " | ".join([f"Step {step}/{total}", *(f"{name}: {form(value)}" for name, value, form in shown if value is not None)])


def evaluation_line(step: int, loss: float, perplexity: float | None) -> str:
    rest = f" | Perplexity: {perplexity:.2f}" if perplexity is not None else ""
    return f"Eval Loss: {loss:.4f}{rest} | Step {step}"


def checkpoint_line(step: int, path: Path, size_bytes: int, seconds: float, stall_seconds: float | None) -> str:
    waited = f" | training waited {stall_seconds:.3f} s" if stall_seconds is not None else ""
    return f"CHECKPOINT step {step} | {path} | {size_bytes / 1e6:.1f} MB a rank | {seconds:.2f} s{waited}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds as a clock shows them, as the agent does in its lines: `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def metric_text(name: str, value: float) -> str:
    """Text of a value as the job's status shows it."""
    if name.endswith(WHOLE):
        return f"{value:.0f}"
    return format(value, {"learningRate": ".2e", "epoch": ".2f"}.get(name, ".4f"))
