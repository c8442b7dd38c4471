"""The state of a gang: every node, every rank of the newest attempt, and where the job stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from lockstep_gang.contract.goodput import Goodput
from lockstep_gang.contract.messages import Dumped, Error, Order, Pace, RankExit, Start, StopMode
from lockstep_gang.contract.report import CheckpointReport, Failure, Restart, State, Straggler, TrainerReport
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.stop import StopReport
from lockstep_gang.lifecycle.fabric import FabricState
from lockstep_gang.lifecycle.facts import Facts
from lockstep_gang.lifecycle.placement import Placement
from lockstep_gang.lifecycle.preflight_state import Preflight
from lockstep_gang.lifecycle.progress import Hang, Progress, Wait
from lockstep_gang.lifecycle.session_state import Session


class Phase(Enum):
    WAITING = "waiting"  # for nodes, or for the end of a backoff
    ACTIVE = "active"  # ranks run, or are on their way
    STOPPING = "stopping"  # until no rank of the attempt is left
    ENDED = "ended"


@dataclass(frozen=True)
class Rank:
    ready: bool = False
    exit: RankExit | None = None
    error: Error | None = None
    sign: int = 0
    """When its first sign of trouble came, counted over the whole gang; 0: none."""
    progress: Progress = field(default_factory=Progress)
    paces: tuple[Pace, ...] = ()
    """The last ones it told."""


@dataclass(frozen=True)
class Node:
    connected: bool = False
    instance: str = ""
    closed_at: float | None = None
    """When its connection closed, while it is away."""
    closed_sign: int = 0
    attempt: int = 0
    """The attempt whose processes it has, or has been told to start; 0: none."""
    stuck: bool = False
    """A stop's time was over, and it had ranks of the attempt yet."""
    leaving: bool = False
    told: Order | None = None
    """The last order on this connection."""


@dataclass(frozen=True)
class LostNode:
    """A node whose ranks of this attempt are gone."""

    sign: int
    node: int
    by_itself: bool = False
    """Its agent is there, and has stopped them without an order: it had heard nothing for too long."""


@dataclass(frozen=True)
class Ending:
    """How the job ended."""

    state: State
    message: str


@dataclass(frozen=True)
class Budget:
    """What of the restart policy is spent. A new commit fills it again: a job that gets on may go on failing for months."""

    failures: int = 0
    """All, since the job began."""
    counted: int = 0
    """Since the last new commit: these count toward maxRestarts, and the backoff grows with them."""
    committed_step: int = 0
    """The newest commit at the last failure."""


@dataclass(frozen=True)
class Gang:
    nodes: tuple[Node, ...]
    ranks: tuple[Rank, ...]
    phase: Phase = Phase.WAITING
    attempt: int = 0
    """The newest attempt of this job; the next is one more than any that was ever heard of."""
    known_attempt: int = 0
    budget: Budget = field(default_factory=Budget)
    restarts: int = 0
    """Failures before the newest attempt."""
    history: tuple[Restart, ...] = ()
    """The newest at the end, at most 10."""
    not_before: float = 0.0
    stopping: StopMode | None = None
    stop_reason: str = ""
    stop_began: float = 0.0
    stopped: StopReport | None = None
    """What came of the newest stop that was asked for."""
    stragglers: tuple[Straggler, ...] = ()
    """Of the newest attempt, the slowest first."""
    wait: Wait = field(default_factory=Wait)
    late: tuple[int, ...] = ()
    """Ranks that had not been heard when the start's time was over, for which the attempt is stopped."""
    hang: Hang | None = None
    """Why the attempt is stopped, when it is for this."""
    dumps: tuple[Dumped, ...] = ()
    """What was seen of its ranks before they were killed."""
    lost: tuple[LostNode, ...] = ()
    """In this attempt, each once."""
    signs: int = 0
    final: bool = False
    """The last failure would come again in the same way."""
    failure: Failure | None = None
    ending: Ending | None = None
    trouble: str | None = None
    """Why an attempt cannot be recorded, so not started."""
    trainer: TrainerReport | None = None
    checkpoint: CheckpointReport | None = None
    preflight: Preflight = field(default_factory=Preflight)
    result: dict[str, str | None] | None = None
    goodput: Goodput = field(default_factory=Goodput)
    fabric: FabricState = field(default_factory=FabricState)
    placement: Placement = field(default_factory=Placement)
    """Which node has which ranks."""
    session: Session = field(default_factory=Session)
    """Of a dev environment: what people ask of it."""
    facts: Facts = field(default_factory=Facts)
    """What the operator says of the cluster."""

    def with_node(self, index: int, node: Node) -> Gang:
        return replace(self, nodes=(*self.nodes[:index], node, *self.nodes[index + 1 :]))

    def with_lost(self, node: int, by_itself: bool = False) -> Gang:
        """The gang without what this node had of the attempt; the first sign of it counts."""
        if any(lost.node == node for lost in self.lost):
            return self
        return replace(self, lost=(*self.lost, LostNode(self.signs + 1, node, by_itself)), signs=self.signs + 1)

    def with_rank(self, index: int, rank: Rank) -> Gang:
        return replace(self, ranks=(*self.ranks[:index], rank, *self.ranks[index + 1 :]))


def new_gang(run: Run) -> Gang:
    """Nobody is connected, nothing was ever started."""
    return Gang(nodes=(Node(),) * run.nodes, ranks=(Rank(),) * run.world_size)


def told_to_start(node: Node, attempt: int) -> bool:
    """Whether this attempt's start is the last thing it was told, on this connection."""
    return isinstance(node.told, Start) and node.told.attempt == attempt


def was_stopped(exit_: RankExit) -> bool:
    """Its agent ended the rank before it was done."""
    return exit_.ordered and exit_.exit_code != 0


def failed_ranks(gang: Gang, run: Run) -> Iterator[int]:
    """Ranks whose end nobody asked for and that is not success."""
    for index, rank in enumerate(gang.ranks):
        if rank.exit is None or rank.exit.ordered:
            continue
        if rank.exit.exit_code != 0 or silent_success(gang, run, index):
            yield index


def has_failed(gang: Gang, run: Run) -> bool:
    return next(failed_ranks(gang, run), None) is not None


def silent_success(gang: Gang, run: Run, rank: int) -> bool:
    """Exit code 0 of Lockstep's trainer is believed only together with its report of the end, which rank 0 sends."""
    return run.training is not None and rank == 0 and gang.result is None
