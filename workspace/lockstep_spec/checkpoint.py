"""Bytes that a run leaves on its volumes."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_spec.memory import STATE_BYTES, trained_elements
from lockstep_spec.settings import Settings
from lockstep_spec.shape import ModelShape


@dataclass(frozen=True)
class Saves:
    """Saves of all ranks together. Manifests and the shards' headers, some kilobytes each, are not counted."""

    count: int
    """Commits over the whole run, the last step's included."""
    bytes_each: int
    most_bytes: int
    """Bytes on all volumes together at the worst moment: of the commits that are kept, the best one by evaluation, and the one being written."""


def commit_bytes(shape: ModelShape, settings: Settings, *, full: bool, adapter: bool = False, copies: int = 1) -> int:
    """One commit's shards; `full`: masters and moments, else the trained weights alone. `adapter`: a PEFT folder is written beside it."""
    trained = trained_elements(shape, settings)
    weights = trained * settings.element_bytes
    return copies * (trained * STATE_BYTES if full else weights) + (weights if adapter else 0)


def saves(steps: int, every: int, keep: int, bytes_each: int, *, evaluates: bool) -> Saves:
    """A commit at every `every`th step, and one at the end."""
    count = -(-steps // every)
    return Saves(count, bytes_each, bytes_each * min(count, keep + 1 + (1 if evaluates else 0)))
