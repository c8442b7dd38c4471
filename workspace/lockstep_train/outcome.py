"""Outcome of a finished run: an adapter's folder, or a whole model's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lockstep_spec.choices import Method
from lockstep_train.base import limits
from lockstep_train.checkpoint.zero import zero_access
from lockstep_train.export import write_adapter
from lockstep_train.export_model import write_model
from lockstep_train.model.dtypes import DTYPES
from lockstep_train.run import Run


def export_outcome(run: Run) -> dict[str, str | None]:
    """Write the outcome on every volume and say where. A collective: masters are gathered, which is fine at the end."""
    run.reporter.activity("Export")
    full = run.config.training.method is Method.FULL
    run.watch.begin(f"Export of the {'model' if full else 'adapter'}", limits.EXPORT_SECONDS)
    folder = run.config.run_dir / ("model" if full else "adapter")
    if full:
        _export_model(run, folder)
    else:
        _export_adapter(run, folder)
    run.reporter.say(f"{'Model' if full else 'Adapter'}: {folder}")
    return {"adapter": None if full else str(folder), "model": str(folder) if full else None}


def _writes(run: Run) -> bool:
    """Return True on one rank for each volume."""
    return run.ranks.first if run.shared else run.ranks.first_of_node


def _export_adapter(run: Run, folder: Path) -> None:
    """Export the adapter: whoever writes holds all of it, in the run's precision; the other ranks one parameter at a time."""
    precision = run.config.training.precision
    masters = zero_access.gather_masters(run.engine)
    if _writes(run):
        weights = {name: value.to(DTYPES[precision]).cpu() for name, value in masters}
        write_adapter(folder, weights, run.adapter, precision.value, run.describe.template.identity.base_files)
    else:
        _take_part(masters)


def _export_model(run: Run, folder: Path) -> None:
    """Export the model one parameter at a time: only one rank of a node needs the memory of a layer and of a file."""
    masters = zero_access.gather_masters(run.engine)
    if _writes(run):
        write_model(folder, Path(run.config.training.model.name), masters, run.config.training.precision.value)
    else:
        _take_part(masters)


def _take_part(masters: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Take part in the gathering, and keep nothing."""
    for _ in masters:
        pass
