"""The state of a gang: every node, every rank of the newest attempt, and where the job stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from lockstep_gang.contract.interactive import Asked, Ended, Found, Idleness
from lockstep_gang.contract.messages import Dumped, Error, Finish, Order, Pace, RankExit, Start, StopMode
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import (
    CheckpointReport,
    FailedSaves,
    Failure,
    Goodput,
    Restart,
    StopReport,
    Straggler,
    TrainerReport,
    Unwritten,
)
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.fabric.state import FabricState
from lockstep_gang.lifecycle.placement import Placement
from lockstep_gang.lifecycle.preflight.rounds import Preflight
from lockstep_gang.lifecycle.progress import Hang, Progress, Wait


class Phase(Enum):
    WAITING = "waiting"  # for nodes, or for the end of a backoff
    ACTIVE = "active"  # ranks run, or are on their way
    STOPPING = "stopping"  # until no rank of the attempt is left
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rank:
    ready: bool = False
    exit: RankExit | None = None
    error: Error | None = None
    sign: int = 0
    """Number of its first sign of trouble, counted over the whole gang; 0: none."""
    progress: Progress = field(default_factory=Progress)
    paces: tuple[Pace, ...] = ()
    """The last ones that it reported."""
    dumped: bool = False
    """True if it is among `Gang.dumps`."""


@dataclass(frozen=True)
class Node:
    connected: bool = False
    instance: str = ""
    closed_at: float | None = None
    """Time at which its connection closed, while it is away."""
    closed_sign: int = 0
    attempt: int = 0
    """The attempt whose processes it has, or has orders to start; 0: none."""
    stuck: bool = False
    """True if a stop's time was over while it still had ranks of the attempt."""
    leaving: bool = False
    last_order: Order | None = None
    """On this connection."""
    boot_id: str = ""
    """Start of its machine, as its agent said; empty: not known."""
    slept_seconds: float = 0.0
    """Time that its machine had slept when its agent connected."""


class RankCounts(NamedTuple):
    """Numbers of ranks of the attempt in each state."""

    heard: int = 0
    missing: int = 0
    """Neither heard nor ended."""
    ready: int = 0
    """Heard, and not ended."""
    done: int = 0
    """Ended with 0."""
    failed: int = 0
    """Ended otherwise, and nobody had ordered it."""


class NodeCounts(NamedTuple):
    """Numbers of nodes in each state."""

    here: int = 0
    present: int = 0
    """Here, and not leaving."""
    free: int = 0
    """Present, without ranks of any attempt."""
    busy: int = 0
    """Here, with ranks of an attempt."""
    leaving: int = 0


def _rank_traits(rank: Rank) -> RankCounts:
    ended = rank.exit is not None
    done = rank.exit is not None and rank.exit.exit_code == 0
    failed = rank.exit is not None and not rank.exit.ordered and not done
    return RankCounts(rank.ready, not rank.ready and not ended, rank.ready and not ended, done, failed)


def _node_traits(node: Node) -> NodeCounts:
    present, busy = node.connected and not node.leaving, node.connected and bool(node.attempt)
    return NodeCounts(node.connected, present, present and not node.attempt, busy, node.leaving)


class Ranks(tuple[Rank, ...]):
    """States of all ranks. Immutable; what every decision asks of all of them is counted along, since a gang may have thousands."""

    counts: RankCounts
    ended: tuple[int, ...]
    """Ranks that have ended, in the order in which that was heard."""

    def __new__(cls, ranks: Iterable[Rank]) -> Ranks:
        self = super().__new__(cls, ranks)
        self.counts = RankCounts(*map(sum, zip(*map(_rank_traits, self)))) if self else RankCounts()  # noqa: B905 (of one length)
        self.ended = tuple(index for index, rank in enumerate(self) if rank.exit is not None)
        return self

    def changed(self, changes: Mapping[int, Rank]) -> Ranks:
        """With some in another state, in time that grows with those alone (but for a copy of pointers)."""
        ranks, counts = list(self), self.counts
        for index, rank in changes.items():
            if rank.ready is not ranks[index].ready or rank.exit is not ranks[index].exit:
                counts = RankCounts(*(c - o + n for c, o, n in zip(counts, _rank_traits(ranks[index]), _rank_traits(rank))))  # noqa: B905
            ranks[index] = rank
        new = tuple.__new__(Ranks, ranks)
        new.counts = counts
        ends = tuple(index for index, rank in changes.items() if rank.exit is not None and self[index].exit is None)
        new.ended = self.ended + ends if ends else self.ended
        return new


class Nodes(tuple[Node, ...]):
    """States of all nodes, counted along likewise."""

    counts: NodeCounts
    away: frozenset[int]
    """Nodes whose connection has closed."""

    def __new__(cls, nodes: Iterable[Node]) -> Nodes:
        self = super().__new__(cls, nodes)
        self.counts = NodeCounts(*map(sum, zip(*map(_node_traits, self)))) if self else NodeCounts()  # noqa: B905 (of one length)
        self.away = frozenset(index for index, node in enumerate(self) if node.closed_at is not None)
        return self

    def changed(self, changes: Mapping[int, Node]) -> Nodes:
        nodes, counts = list(self), self.counts
        for index, node in changes.items():
            counts = NodeCounts(*(c - o + n for c, o, n in zip(counts, _node_traits(nodes[index]), _node_traits(node))))  # noqa: B905
            nodes[index] = node
        new = tuple.__new__(Nodes, nodes)
        new.counts = counts
        gone = {index for index, node in changes.items() if node.closed_at is not None}
        back = {index for index, node in changes.items() if node.closed_at is None}
        new.away = (self.away | gone) - back if gone or not self.away.isdisjoint(back) else self.away
        return new


@dataclass(frozen=True)
class LostNode:
    """A node whose ranks of this attempt are gone."""

    sign: int
    node: int
    by_itself: bool = False
    """True if its agent is there, and has stopped them without an order: it had heard nothing for too long."""


@dataclass(frozen=True)
class Silence:
    """A time in which nothing was heard of a node, in Unix seconds."""

    node: int
    since: float
    arrives: bool
    """True if its machine acknowledges what the coordinator's sends."""
    until: float | None = None
    """Time at which it was heard again; None: not yet."""


@dataclass(frozen=True)
class Budget:
    """Spent part of the restart policy. A new commit fills it again: a job that gets on may go on failing for months."""

    failures: int = 0
    """Failures since the job began."""
    counted: int = 0
    """Failures since the last new commit: these count toward maxRestarts, and the backoff begins and grows with them."""
    committed_step: int = 0
    """The newest commit at the last failure."""


@dataclass(frozen=True)
class Request:
    """A run that somebody wants, from the moment they ask until it has ended."""

    asked: Asked
    node: int
    """Node where they are."""
    instance: str
    """Instance of the agent there: another one has lost them."""
    since: float
    interrupts: int = 0
    why: str = ""
    """Reason of the first interrupt."""
    looked_at: float = 0.0
    """Time at which nodes were asked for the script; 0: not yet."""
    scripts: tuple[tuple[int, Found], ...] = ()
    started: bool = False


@dataclass(frozen=True)
class Session:
    """A dev environment's requests; of any other job it stays as it is here."""

    request: Request | None = None
    last: Ended | None = None
    """End of the newest run: somebody whose connection was away asks again."""
    answers: tuple[tuple[int, Ended], ...] = ()
    """(node, what is to be said there), sent with the next orders."""
    checked: tuple[str, ...] = ()
    """Agents, by instance, that passed the preflight."""
    used_at: float = 0.0
    idleness: Idleness = Idleness.NONE


LOSSES = frozenset(
    {FactType.NODE_LOST, FactType.PREEMPTED, FactType.EVICTED, FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED, FactType.DELETED}
)
OWN_FAULTS = frozenset({FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED})
"""Facts that explain a loss and still count toward the restart budget: the same may come again."""


@dataclass(frozen=True)
class Facts:
    """Facts that the operator knows of the cluster; empty without an operator, and until it has answered."""

    latest: tuple[Fact, ...] = ()
    """Facts in the operator's last reply."""
    heard_at: float = 0.0
    """Time of that reply, Unix time."""
    left: tuple[Restart, ...] = ()
    """Nodes that left in the last attempt, as entries of the history: they become ones when a fact says why, or the next
    attempt starts without such a fact."""
    machines: tuple[Fact, ...] = ()
    """Facts that agents know of their own machines, at most one a node: without an operator nobody else explains a loss."""

    def waiting(self, node: int) -> str | None:
        """Reason why the node's pod doesn't run, for example `x-1 (ImagePulling)`; None when nobody says."""
        of_node = [fact for fact in self.latest if fact.node == node]
        newest = next((fact for fact in of_node if fact.type is FactType.WAITING), of_node[-1] if of_node else None)
        return f"{newest.pod} ({newest.reason})" if newest is not None else None


@dataclass(frozen=True)
class Gang:
    """State of a gang. `nodes` and `ranks` may be given as any tuple: they are counted then."""

    nodes: Nodes
    ranks: Ranks
    phase: Phase = Phase.WAITING
    attempt: int = 0
    """The newest attempt of this job; the next is one more than any that was ever heard of."""
    began_at: float = 0.0
    """Time at which the newest attempt began, Unix time; 0: none has, or nobody knows."""
    known_attempt: int = 0
    budget: Budget = field(default_factory=Budget)
    restarts: int = 0
    """Failures before the newest attempt."""
    history: tuple[Restart, ...] = ()
    """Newest restarts, the last one at the end, at most 10."""
    not_before: float = 0.0
    stopping: StopMode | None = None
    stop_reason: str = ""
    stop_began: float = 0.0
    stopped: StopReport | None = None
    """Report of the newest stop that was asked for."""
    stragglers: tuple[Straggler, ...] = ()
    """Stragglers of the newest attempt, the slowest first."""
    straggled_at: float = 0.0
    """Time at which they were looked for."""
    wait: Wait = field(default_factory=Wait)
    late: tuple[int, ...] = ()
    """Ranks that had not been heard when the start's time was over, for which the attempt is stopped."""
    hang: Hang | None = None
    """Hang for which the attempt is stopped, if it is for one."""
    dumps: tuple[Dumped, ...] = ()
    """States and stacks of its ranks before they were killed."""
    lost: tuple[LostNode, ...] = ()
    """Lost nodes of this attempt, each once."""
    silences: tuple[Silence, ...] = ()
    """Silences of nodes in this attempt: the newest of each."""
    seeks_until: float = 0.0
    """Time until which the attempt is not stopped, though ranks have failed, so that the one that ended first is heard: they failed only
    for want of their peers. 0: none has.
    """
    examined: int = 0
    """Number of the ended ranks that were looked at for it."""
    paused_seconds: float = 0.0
    """The longest time in this attempt in which the coordinator itself did not run."""
    signs: int = 0
    final: bool = False
    """True if the last failure would come again in the same way."""
    failure: Failure | None = None
    ending: Finish | None = None
    """Order that tells every node of the job's final state."""
    unwritten: Unwritten | None = None
    """Reason why an attempt's start or end can't be recorded, so waits."""
    untold: tuple[Failure, tuple[Restart, ...]] | None = None
    """The failure that waits for the record, and the history with it: who hears reports must know it, should this process end before."""
    awaited: str = ""
    """Sentence about the job that has the run's folder, while this one waits for it."""
    unable: tuple[int, str] | None = None
    """(a node that is here and whose ranks can't run at all, why)"""
    trainer: TrainerReport | None = None
    checkpoint: CheckpointReport | None = None
    failed_saves: FailedSaves | None = None
    unproven: Mapping[str, int] = field(default_factory=dict)
    """Milliseconds on the account since the last step or evaluation was reported, by kind: a failure makes them downtime."""
    worked_at: float = 0.0
    """Time at which the newest attempt reported its last step, Unix time; 0: it has reported none."""
    preflight: Preflight = field(default_factory=Preflight)
    result: dict[str, str | None] | None = None
    goodput: Goodput = field(default_factory=Goodput)
    fabric: FabricState = field(default_factory=FabricState)
    placement: Placement = field(default_factory=Placement)
    """Ranks of each node."""
    session: Session = field(default_factory=Session)
    """Requests to a dev environment."""
    facts: Facts = field(default_factory=Facts)
    """The operator's word about the cluster."""
    in_time_until: float = 0.0
    """Time before which no rank's limit passes; it may be later. 0: nobody has looked."""
    unordered: frozenset[int] | None = None
    """Nodes that have changed since orders were last decided; null: any may have."""
    ordered_for: tuple[object, ...] = ()
    """Values that all nodes' orders followed from then."""

    def __post_init__(self) -> None:
        if type(self.nodes) is not Nodes:
            object.__setattr__(self, "nodes", Nodes(self.nodes))
            object.__setattr__(self, "unordered", None)
        if type(self.ranks) is not Ranks:
            object.__setattr__(self, "ranks", Ranks(self.ranks))
            object.__setattr__(self, "in_time_until", 0.0)

    def with_node(self, index: int, node: Node) -> Gang:
        return self.with_nodes({index: node})

    def with_nodes(self, changes: Mapping[int, Node]) -> Gang:
        unordered = self.unordered.union(changes) if self.unordered is not None else None
        return replace(self, nodes=self.nodes.changed(changes), unordered=unordered)

    def with_lost(self, node: int, by_itself: bool = False) -> Gang:
        """The gang without what this node had of the attempt; the first sign of it counts."""
        if any(lost.node == node for lost in self.lost):
            return self
        return replace(self, lost=(*self.lost, LostNode(self.signs + 1, node, by_itself)), signs=self.signs + 1)

    def with_rank(self, index: int, rank: Rank) -> Gang:
        return self.with_ranks({index: rank})

    def with_ranks(self, changes: Mapping[int, Rank]) -> Gang:
        return replace(self, ranks=self.ranks.changed(changes))


def new_gang(run: Run) -> Gang:
    """The gang of a job that never started here, with nobody connected."""
    return Gang(nodes=Nodes((Node(),) * run.nodes), ranks=Ranks((Rank(),) * run.world_size), known_attempt=run.attempts_before)


def told_to_start(node: Node, attempt: int) -> bool:
    """Return True if this attempt's start is the last order that the node got on this connection."""
    return isinstance(node.last_order, Start) and node.last_order.attempt == attempt


def was_stopped(exit_: RankExit) -> bool:
    """Return True if its agent ended the rank before it was done."""
    return exit_.ordered and exit_.exit_code != 0


def failed_ranks(gang: Gang, run: Run) -> Iterator[int]:
    """Ranks whose end nobody ordered and that is not success."""
    for index in sorted(gang.ranks.ended):
        exit_ = gang.ranks[index].exit
        if exit_ is None or exit_.ordered:
            continue
        if exit_.exit_code != 0 or silent_success(gang, run, index):
            yield index


def has_failed(gang: Gang, run: Run) -> bool:
    first = gang.ranks[0].exit
    return gang.ranks.counts.failed > 0 or (first is not None and not first.ordered and silent_success(gang, run, 0))


def has_reported_end(gang: Gang) -> bool:
    """Return True if rank 0 has reported in this attempt that all is done, or the last of all steps."""
    trainer = gang.trainer if gang.worked_at else None  # (the step that an attempt goes on from is none of its own)
    return gang.result is not None or (trainer is not None and bool(trainer.step) and trainer.step == trainer.total_steps)


def silent_success(gang: Gang, run: Run, rank: int) -> bool:
    """Return True for exit code 0 without a report of the end. Lockstep's trainer sends one on rank 0, and only together are they
    believed.
    """
    return run.training is not None and rank == 0 and gang.result is None
