"""Lines that people grep for. Their beginnings are an interface: `Step `, `Eval Loss: `, `CHECKPOINT `."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Values = Mapping[str, float | None]


def step_line(step: int, total: int, remaining_seconds: float | None, values: Values) -> str:
    """Line of a step: `Step 12/1502 | Loss: 2.2310 | LR: 1.33e-07 | …`. What is not known is left out."""
    shown = [
        ("Loss", values.get("loss"), number),
        ("LR", values.get("learningRate"), rate),
        ("Grad norm", values.get("gradientNorm"), number),
        ("Tokens/s", values.get("tokensPerSecond"), whole),
        ("MFU", values.get("mfu"), percent),
        ("Memory", values.get("peakMemoryBytes"), size),
        ("Epoch", values.get("epoch"), epochs),
        ("ETA", remaining_seconds, clock),
    ]
    return " | ".join([f"Step {step}/{total}", *(f"{name}: {form(value)}" for name, value, form in shown if value is not None)])


def evaluation_line(step: int, loss: float, perplexity: float | None) -> str:
    rest = f" | Perplexity: {perplexity:.2f}" if perplexity is not None else ""
    return f"Eval Loss: {loss:.4f}{rest} | Step {step}"


def checkpoint_line(step: int, path: Path, size_bytes: int, seconds: float, stall_seconds: float | None) -> str:
    waited = f" | training waited {stall_seconds:.3f} s" if stall_seconds is not None else ""
    return f"CHECKPOINT step {step} | {path} | {size_bytes / 1e6:.1f} MB a rank | {seconds:.2f} s{waited}"


def number(value: float) -> str:
    return f"{value:.4f}"


def rate(value: float) -> str:
    return f"{value:.2e}"


def whole(value: float) -> str:
    return f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def size(value: float) -> str:
    return f"{value / 1e9:.1f} GB"


def epochs(value: float) -> str:
    return f"{value:.2f}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds as a clock shows them, as the agent does in its lines: `1:02:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def metric_text(name: str, value: float) -> str:
    """Text of a value as the job's status shows it."""
    forms = {
        "learningRate": rate,
        "tokensPerSecond": whole,
        "mfu": number,
        "hfu": number,
        "epoch": epochs,
        "saveFailures": whole,
        "savesSkipped": whole,
    }
    if name.endswith(("Bytes", "Count", "Steps", "Tokens", "Rank")):
        return whole(value)
    return forms.get(name, number)(value)
