"""Comparison of an engine's log-probabilities with those of the live model (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BOUNDS = {"FP32": 1e-3, "BF16": 0.05, "FP16": 0.05}
"""Largest difference that rounding explains, by the precision of the run."""
LEAST_COMMON = 0.5
"""Share of a position's tokens that both lists must have: 32 of 64."""
LEAST_EFFECT = 20
"""Multiple of the bound that the adapter itself must change, or else its loss would go unseen."""


@dataclass(frozen=True)
class Verdict:
    """Largest differences of the live model from what an engine gives, and from its base; infinite for lists with little in common."""

    largest: float
    effect: float
    bound: float

    @property
    def equal(self) -> bool:
        return self.largest <= self.bound

    @property
    def proves(self) -> bool:
        """True if an engine that ignores the adapter would be found out."""
        return self.effect >= LEAST_EFFECT * self.bound

    def words(self, engine: str) -> str:
        """Say what was found, in one sentence."""
        figures = f"(largest difference {self.largest:.2g}, bound {self.bound:g})"
        if not self.equal:
            return f"not equal: {engine} gives other log-probabilities than the model that was trained {figures}"
        if self.proves:
            return f"equal: {engine} gives the log-probabilities of the model that was trained {figures}"
        least = f"at least {LEAST_EFFECT * self.bound:g} is needed"
        return f"this proves nothing: {engine} is equal {figures}, but training itself changed only {self.effect:.2g}, and {least}"


def compare(recorded: Mapping[str, Any], read: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compare a recording with the `top` of each of its prompts as an engine gives them. Raises ValueError if one is missing."""
    prompts = recorded["prompts"]
    largest = max(
        difference(*tops) for mine, other in zip(prompts, read, strict=True) for tops in zip(mine["top"], other["top"], strict=True)
    )
    effect = max(difference(*tops) for mine in prompts for tops in zip(mine["top"], mine["base_top"], strict=True))
    return Verdict(largest, effect, BOUNDS[recorded["precision"]])


def difference(mine: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference among the tokens that both lists have; infinity where these are too few, or a value is no number."""
    others = {int(token): value for token, value in theirs}
    differences = [abs(value - others[int(token)]) for token, value in mine if int(token) in others]
    common = len(differences) >= max(1, LEAST_COMMON * len(mine))
    return max(differences) if common and not any(map(math.isnan, differences)) else math.inf
