"""All nodes' answers to a preflight, and findings about them (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep_gang.contract.placewords import PlaceWords, words_of
from lockstep_gang.contract.preflight import Expected, ExpectedRdma, Finding, Looked, Met
from lockstep_gang.contract.run import Run
from lockstep_spec.choices import Severity
from lockstep_spec.words import listed

LookedAt = tuple[int, Looked, float, float]
"""(node, what it found, when it was asked, when its answer came)"""


@dataclass(frozen=True)
class NodeAnswers:
    """Answers of all nodes to the first two rounds."""

    run: Run
    looked: Mapping[int, Looked]
    met: Mapping[int, Met]
    skews: Mapping[int, float]

    @property
    def words(self) -> PlaceWords:
        return words_of(self.run)

    @property
    def expected(self) -> Expected:
        return expected_of(self.run)

    @property
    def rdma(self) -> ExpectedRdma:
        """NICs by the cluster's file."""
        return self.expected.rdma or ExpectedRdma()

    def name(self, node: int) -> str:
        """The node as messages name it."""
        return self.run.node_name(node)


def expected_of(run: Run) -> Expected:
    """Tell what a preflight of this run expects: nothing if it has none."""
    return run.preflight or Expected()


def error(check: str, node: int | None, message: str, fix: str) -> Finding:
    return Finding(check, Severity.ERROR, message, fix, node)


def warning(check: str, node: int | None, message: str, fix: str) -> Finding:
    return Finding(check, Severity.WARNING, message, fix, node)


def without_torch(run: Run, looked: Sequence[LookedAt], check: str, what: str) -> list[Finding]:
    """Warning that a node has no torch, which the check is made with. A script's image need not have it."""
    lacking = [node for node, facts, *_ in looked if "torch" not in facts.versions]
    fix = f"{words_of(run).torch}, or set spec.preflight to Basic"
    return [warning(check, node, f"node {node} has no torch: {what} was left out", fix) for node in lacking[:1]]


def odd(values: Mapping[int, str]) -> Iterator[tuple[int, str, str]]:
    """(node, its value, the value of most others) of every node that differs; of two sides as strong, node 0's is right."""
    if len(set(values.values())) < 2:
        return
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], value == values.get(0)))
    yield from ((node, value, common) for node, value in values.items() if value != common)


Told = tuple[int, str, str, str]
"""(node, what is wrong there, message with <> for that and {} for the node, what helps)"""


def findings_of(
    nodes: NodeAnswers, check: str, severity: Severity, problems: Sequence[Told], *, excluding: bool = False
) -> Iterator[Finding]:
    """Make one finding of what is alike: of several things of a node, and of several nodes unless these are excluded (`excluding`, and
    others are well).
    """
    things: dict[tuple[int, str, str], list[str]] = {}
    for node, thing, message, fix in problems:
        things.setdefault((node, message, fix), []).append(thing)
    excludes = excluding and len({node for node, *_ in problems}) < nodes.run.nodes
    alike: dict[tuple[str, str, int | None], list[int]] = {}
    for (node, message, fix), names in things.items():
        alike.setdefault((message.replace("<>", listed(names)), fix, node if excludes else None), []).append(node)
    for (message, fix, _), members in alike.items():
        text = message.replace("{}", listed([nodes.name(node) for node in members]))
        yield Finding(check, severity, text, fix, members[0] if len(members) == 1 else None, excludes)
