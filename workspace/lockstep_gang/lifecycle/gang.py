"""The state of a gang: every node, every rank of the newest attempt, and where the job stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from lockstep_gang.contract.goodput import Goodput
from lockstep_gang.contract.interactive import Asked, Ended, Found, Idleness
from lockstep_gang.contract.messages import Dumped, Error, Order, Pace, RankExit, Start, StopMode
from lockstep_gang.contract.reply import Fact, FactType
from lockstep_gang.contract.report import CheckpointReport, FailedSaves, Failure, Restart, State, Straggler, TrainerReport
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.stop import StopReport
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
    """When its first sign of trouble came, counted over the whole gang; 0: none."""
    progress: Progress = field(default_factory=Progress)
    paces: tuple[Pace, ...] = ()
    """The last ones it told."""
    dumped: bool = False
    """It is among `Gang.dumps`."""


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


class RankCounts(NamedTuple):
    """How many ranks of the attempt are so."""

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
    """How many nodes are so."""

    here: int = 0
    present: int = 0
    """Here, and not told to go."""
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
    """A rank's state each. Immutable; what every decision asks of all of them is counted along, since a gang may have thousands."""

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
    """Likewise of the nodes."""

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
    """Its agent is there, and has stopped them without an order: it had heard nothing for too long."""


@dataclass(frozen=True)
class Silence:
    """Nothing was heard of a node, times in Unix seconds."""

    node: int
    since: float
    arrives: bool
    """Its machine acknowledges what the coordinator's sends."""
    until: float | None = None
    """When it was heard again; None: not yet."""


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
    """Since the last new commit: these count toward maxRestarts, and the backoff begins and grows with them."""
    committed_step: int = 0
    """The newest commit at the last failure."""


@dataclass(frozen=True)
class Request:
    """What somebody wants to run, from the moment they ask until it has ended."""

    asked: Asked
    node: int
    """Where they are."""
    instance: str
    """Of the agent there: another one has lost them."""
    since: float
    interrupts: int = 0
    why: str = ""
    """Of the first interrupt."""
    looked_at: float = 0.0
    """When nodes were asked for the script; 0: not yet."""
    found: tuple[tuple[int, Found], ...] = ()
    started: bool = False


@dataclass(frozen=True)
class Session:
    """Of a job that is no dev environment it stays as it is here."""

    request: Request | None = None
    last: Ended | None = None
    """Of the newest run: somebody whose connection was away asks again."""
    answers: tuple[tuple[int, Ended], ...] = ()
    """(node, what is to be said there), sent with the next orders."""
    checked: tuple[str, ...] = ()
    """The agents, by instance, that passed the preflight."""
    used_at: float = 0.0
    idleness: Idleness = Idleness.NONE


LOSSES = frozenset(
    {FactType.NODE_LOST, FactType.PREEMPTED, FactType.EVICTED, FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED, FactType.DELETED}
)
OWN_FAULTS = frozenset({FactType.OUT_OF_MEMORY, FactType.CONTAINER_ENDED})
"""The cluster explains them, and they count toward the restart budget: the same may come again."""


@dataclass(frozen=True)
class Facts:
    """Empty without an operator, and until it has answered."""

    told: tuple[Fact, ...] = ()
    """As in the operator's last reply."""
    heard_at: float = 0.0
    """When it came, Unix time."""
    left: tuple[Restart, ...] = ()
    """Nodes that were told to go in the last attempt, as entries of the history: they become ones when a fact says who told them, or the next
    attempt starts without such a fact."""

    def waiting(self, node: int) -> str | None:
        """Why the node's pod doesn't run, for example `x-1 (ImagePulling)`; None when nobody says."""
        of_node = [fact for fact in self.told if fact.node == node]
        found = next((fact for fact in of_node if fact.type is FactType.WAITING), of_node[-1] if of_node else None)
        return f"{found.pod} ({found.reason})" if found is not None else None


@dataclass(frozen=True)
class Gang:
    """`nodes` and `ranks` may be given as any tuple: they are counted then."""

    nodes: Nodes
    ranks: Ranks
    phase: Phase = Phase.WAITING
    attempt: int = 0
    """The newest attempt of this job; the next is one more than any that was ever heard of."""
    began_at: float = 0.0
    """When the newest attempt began, Unix time; 0: none has, or nobody knows."""
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
    straggled_at: float = 0.0
    """When they were looked for."""
    wait: Wait = field(default_factory=Wait)
    late: tuple[int, ...] = ()
    """Ranks that had not been heard when the start's time was over, for which the attempt is stopped."""
    hang: Hang | None = None
    """Why the attempt is stopped, when it is for this."""
    dumps: tuple[Dumped, ...] = ()
    """What was seen of its ranks before they were killed."""
    lost: tuple[LostNode, ...] = ()
    """In this attempt, each once."""
    silences: tuple[Silence, ...] = ()
    """Of nodes, in this attempt: the newest of each."""
    seeks_until: float = 0.0
    """Ranks have failed, and only for want of their peers: until then the attempt is not stopped, so that the one that ended first is heard. 0: none has."""
    examined: int = 0
    """So many of the ranks that have ended were looked at for it."""
    paused_seconds: float = 0.0
    """The longest time in this attempt in which the coordinator itself did not run."""
    signs: int = 0
    final: bool = False
    """The last failure would come again in the same way."""
    failure: Failure | None = None
    ending: Ending | None = None
    trouble: str | None = None
    """Why an attempt cannot be recorded, so not started."""
    trainer: TrainerReport | None = None
    checkpoint: CheckpointReport | None = None
    failed_saves: FailedSaves | None = None
    unproven: Mapping[str, int] = field(default_factory=dict)
    """Milliseconds on the account since the last step or evaluation was told, by kind: a failure makes them downtime."""
    worked_at: float = 0.0
    """When the newest attempt told of its last step, Unix time; 0: it has told of none."""
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
    in_time_until: float = 0.0
    """No rank's limit passes before; it may be later. 0: nobody has looked."""
    unordered: frozenset[int] | None = None
    """Nodes that have changed since orders were last decided; null: any may have."""
    ordered_for: tuple[object, ...] = ()
    """What all nodes' orders followed from then."""

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
    """Nobody is connected, nothing was ever started."""
    return Gang(nodes=Nodes((Node(),) * run.nodes), ranks=Ranks((Rank(),) * run.world_size))


def told_to_start(node: Node, attempt: int) -> bool:
    """Whether this attempt's start is the last thing it was told, on this connection."""
    return isinstance(node.told, Start) and node.told.attempt == attempt


def was_stopped(exit_: RankExit) -> bool:
    """Its agent ended the rank before it was done."""
    return exit_.ordered and exit_.exit_code != 0


def failed_ranks(gang: Gang, run: Run) -> Iterator[int]:
    """Ranks whose end nobody asked for and that is not success."""
    for index in sorted(gang.ranks.ended):
        exit_ = gang.ranks[index].exit
        if exit_ is None or exit_.ordered:
            continue
        if exit_.exit_code != 0 or silent_success(gang, run, index):
            yield index


def has_failed(gang: Gang, run: Run) -> bool:
    first = gang.ranks[0].exit
    return gang.ranks.counts.failed > 0 or (first is not None and not first.ordered and silent_success(gang, run, 0))


def silent_success(gang: Gang, run: Run, rank: int) -> bool:
    """Exit code 0 of Lockstep's trainer is believed only together with its report of the end, which rank 0 sends."""
    return run.training is not None and rank == 0 and gang.result is None
