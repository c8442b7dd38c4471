"""Answers of all nodes, which the checks of a preflight judge, and the making of a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep_gang.contract.preflight import Finding, Looked, Met
from lockstep_gang.contract.run import Run
from lockstep_spec.choices import Severity

LookedAt = tuple[int, Looked, float, float]
"""(node, what it found, when it was asked, when its answer came)"""


@dataclass(frozen=True)
class NodeAnswers:
    """Answers of all nodes to the first two rounds."""

    run: Run
    looked: Mapping[int, Looked]
    met: Mapping[int, Met]
    skews: Mapping[int, float]

    def name(self, node: int) -> str:
        """The node as messages name it."""
        return self.run.node_name(node)


def error(check: str, node: int | None, message: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, message, fix, node)


def warning(check: str, node: int | None, message: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, message, fix, node)


def odd(values: Mapping[int, str]) -> Iterator[tuple[int, str, str]]:
    """(node, its value, the value of most others) of every node that differs; of two sides as strong, node 0's is right."""
    if len(set(values.values())) < 2:
        return
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], value == values.get(0)))
    yield from ((node, value, common) for node, value in values.items() if value != common)
