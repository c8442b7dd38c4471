"""Where the preflight before the next attempt stands (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gang.contract.preflight import Bandwidth, Checked, Looked, Met, PreflightReport, Stage
from lockstep_gang.lifecycle.preflight.pairs import Measurement


@dataclass(frozen=True)
class Preflight:
    """What was asked, what nodes answered, and what came of the last one."""

    stage: Stage | None = None
    """What all nodes are being asked; null: nothing."""
    round: int = 0
    token: int = 0
    """Of this preflight: the number of its first round."""
    began_at: float = 0.0
    asked_at: float = 0.0
    answers: tuple[tuple[int, Checked, float], ...] = ()
    """(node, its answer, when it came) of this round."""
    looked: tuple[tuple[int, Looked, float, float], ...] = ()
    """(node, what it found, when it was asked, when it answered)."""
    met: tuple[tuple[int, Met], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    ports: tuple[tuple[int, int], ...] = ()
    """(node, a port that is free there)."""
    whole: Measurement | None = None
    bandwidth: Bandwidth | None = None
    pairs: tuple[Measurement, ...] = ()
    pair_rounds: int = 0
    passed: bool = False
    """The next attempt may start."""
    result: PreflightReport | None = None
    """Of the last one that ended."""
    failures: int = 0
    """Since the last one that passed."""
    first_failed_at: float = 0.0
    retry_at: float = 0.0
    over: bool = False
    """It failed, and making it again can't help any more."""
