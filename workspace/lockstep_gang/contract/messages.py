"""Messages of agents and their coordinator to each other, and of a rank to its agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from lockstep_gang.contract.fabric import RankFabric
from lockstep_gang.contract.interactive import Asked, Ended, Find, Found, Interrupted, InUse, Printed, Show
from lockstep_gang.contract.preflight import Check, Checked
from lockstep_gang.contract.report import State
from lockstep_spec.choices import Choice
from lockstep_spec.codec import ContractError, Must, from_json, to_json
from lockstep_spec.words import cleaned

COUNT_MAX = 2**63 - 1


class NewerKind(ContractError):
    """A message of a kind that only another version knows: readers pass over it."""


Count = Annotated[int, Must("a whole number from 0 to 2^63 - 1; leave out what isn't known", lambda number: 0 <= number <= COUNT_MAX)]


@dataclass(frozen=True)
class Activity:
    """The trainer is at: Init, Load, Step, Evaluate, Save, Export."""

    rank: int
    activity: str
    step: Count | None = None
    """The step that a start goes on from, done before it: it is shown, and counts as no progress."""
    total_steps: Count | None = None
    path: str | None = None
    """The commit of that step, which may be older than the newest: a damaged one is passed over."""


@dataclass(frozen=True, slots=True)
class Step:
    rank: int
    step: Count
    total_steps: Count | None = None
    epoch: Count | None = None
    estimated_remaining_seconds: Count | None = None
    metrics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Beat:
    """Place of a rank, told by a thread beside its work: when it has moved, and every few seconds while it hasn't."""

    rank: int
    activity: str
    """Activity that must end within the limit: `Step 12`."""
    place: str = ""
    """Place within it: `forward of micro-batch 1 of 2`."""
    position: Count = 0
    """Places it has come to since it started; all ranks come to the same ones, in the same order."""
    limit_seconds: Count | None = None
    """Limit of this activity; null: none."""


@dataclass(frozen=True, slots=True)
class Pace:
    """A rank's own time a step, without what it waited for others, over the steps since it last told."""

    rank: int
    step: Count
    """The last of them."""
    steps: Count
    microseconds: Count
    """Mean of one step."""


@dataclass(frozen=True)
class Evaluate:
    rank: int
    step: Count
    metrics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """Sent after the durable commit."""

    rank: int
    step: Count
    path: str
    bytes: Count | None = None


@dataclass(frozen=True)
class SaveFailed:
    """A save that is no commit. Rank 0 says so; training goes on."""

    rank: int
    step: Count
    problem: str = ""
    """Rank, path, and the system's words."""


@dataclass(frozen=True)
class Error:
    """Exception that a rank failed with; its exit follows."""

    rank: int
    exception: str
    message: str = ""
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class End:
    """Rank 0 has done everything that was asked."""

    rank: int
    result: dict[str, str | None] = field(default_factory=dict)


RankReport = Activity | Step | Beat | Pace | Evaluate | Checkpoint | SaveFailed | Error | End
_EVENTS: dict[str, type[RankReport]] = {
    kind.__name__.lower(): kind for kind in (Activity, Step, Beat, Pace, Evaluate, Checkpoint, SaveFailed, Error, End)
}
RANK_REPORT_BYTES_MAX = 60_000


def rank_report_from_json(value: object, where: str = "rank report") -> RankReport:
    """One datagram of a rank, parsed, its texts as lines that can be printed: `event` says which. Raises ContractError, NewerKind."""
    report: RankReport = _tagged(_EVENTS, "event", cleaned(value), where)
    return report


def known_reports(values: Iterable[dict[str, Any]]) -> list[RankReport]:
    """Reports of ranks that an agent passes on, without those of a kind that only another version knows. Raises ContractError."""
    return [rank_report_from_json(value) for value in values if not _is_newer(value)]


def _is_newer(value: dict[str, Any]) -> bool:
    return isinstance(value.get("event"), str) and value["event"] not in _EVENTS


def rank_report_to_json(report: RankReport) -> dict[str, Any]:
    return {"event": type(report).__name__.lower(), **to_json(report)}


@dataclass(frozen=True)
class OutOfMemory:
    """The kernel has killed a process of the rank's container for want of memory."""

    limit_bytes: int | None = None
    """Limit of the container; null: it has none, so the machine's memory was used up."""
    rank_bytes: int | None = None
    """Most memory that the rank had, without its children."""


@dataclass(frozen=True)
class RankExit:
    """End of a rank: an exit code or the name of a signal."""

    rank: int
    exit_code: int | None
    signal: str | None
    ordered: bool
    """The agent had orders to stop it, so its end says nothing about a fault."""
    error: Error | None = None
    last_lines: tuple[str, ...] = ()
    fresh_from: int = 0
    """The first of them that may say why it ended: what is older was written long before, or the rank went on after it."""
    out_of_memory: OutOfMemory | None = None
    left: tuple[str, ...] = ()
    """Programs that it left running when it exited with 0; they were ended."""
    process_limit: str = ""
    """Words for the limit of processes there, of a rank that failed; empty: none is known."""
    no_room: str = ""
    """Words for the file system that had no room, of a rank that failed, and what helps; empty: none is known."""
    elsewhere: str = ""
    """Words for where a file or package is that the rank didn't find, and the fields that lead there; empty: it isn't near."""

    @property
    def how(self) -> str:
        """Words for it: `exited with 1`, or `was ended by SIGKILL`."""
        return f"was ended by {self.signal}" if self.signal is not None else f"exited with {self.exit_code}"

    @property
    def fresh_lines(self) -> tuple[str, ...]:
        return self.last_lines[self.fresh_from :]


@dataclass(frozen=True)
class RankState:
    rank: int
    ready: bool
    exit: RankExit | None = None
    step: int | None = None
    """The last that it has told of, which a coordinator that is new doesn't know."""
    step_age_seconds: int | None = None
    """Age of that word."""
    progress: tuple[dict[str, Any], ...] = ()
    """The newest of each kind of what it has told of its progress, as in `Progressed`: some of it was lost with the connection."""


@dataclass(frozen=True)
class Hello:
    """Opens every connection: what this agent knows and runs, so that nothing said while it was away is lost."""

    node: int
    instance: str
    """Another one means that the agent's process is another one, and its ranks are gone."""
    known_attempt: int
    attempt: int
    """The attempt whose ranks it has, 0 for none."""
    ranks: tuple[RankState, ...] = ()
    leaving: bool = False
    """True as by `Leaving`, which may have been sent while nobody heard it."""
    boot_id: str = ""
    """Start of its machine: another one means that the machine was off in between. Empty: not known."""
    slept_seconds: float = 0.0
    """Time that its machine has slept since that start."""
    unable: str = ""
    """Reason why its ranks can't run at all: their Python doesn't have Lockstep's trainer."""
    build: str = ""
    """`build_id` of the agent; empty: not known."""


@dataclass(frozen=True)
class Started:
    """All ranks of this node run."""

    attempt: int


@dataclass(frozen=True)
class Reported:
    """A rank's own words, as in `RankReport`."""

    attempt: int
    report: dict[str, Any]


@dataclass(frozen=True)
class Progressed:
    """The newest of what ranks of this node say all the time (Step, Beat, Pace), in one message."""

    attempt: int
    reports: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Dumped:
    """Observations of a rank before it was killed."""

    attempt: int
    rank: int
    state: str = ""
    """State of its process by the kernel's letter: R, S, D (waits for a device), T (stopped); empty: not known."""
    kernel_function: str = ""
    """Function of the kernel in which it waits."""
    at: str = ""
    """Place in Python of its main thread: `forward (model.py:33)`."""
    waits_for_others: bool = False
    """Its main thread is inside a collective operation."""
    stacks: str | None = None
    """The file with the stacks of all its threads, or with why there are none."""


@dataclass(frozen=True)
class Exited:
    attempt: int
    exit: RankExit


@dataclass(frozen=True)
class Stopped:
    """Nothing of the attempt runs on this node any more."""

    attempt: int


@dataclass(frozen=True)
class FabricSeen:
    """Facts of NCCL's log on ranks of this node, each time all that is known of them."""

    attempt: int
    ranks: tuple[RankFabric, ...]


@dataclass(frozen=True)
class Leaving:
    """The agent received SIGTERM: its ranks save and stop, and it won't start others."""


@dataclass(frozen=True)
class Pong:
    pass


class StopMode(Choice):
    KILL = "Kill"  # SIGKILL to the rank's process group, at once
    SAVE = "Save"  # SIGTERM to the rank, which means save and stop
    DUMP = "Dump"  # write down where every rank is, for a few seconds at most, then as KILL


@dataclass(frozen=True)
class Start:
    """Start all ranks of this node. Never sent before the attempt is durable on node 0's volume."""

    attempt: int
    restarts: int
    master_address: str
    master_port: int
    group_rank: int | None = None
    """This node's place in the order of ranks; null: its number."""
    first_rank: int | None = None
    """The first of this node's ranks; null: the one that it has when ranks follow the nodes' numbers."""
    run: Asked | None = None
    """The run that was asked for in a dev environment; null: the run's own command."""


@dataclass(frozen=True)
class Stop:
    attempt: int
    mode: StopMode
    message: str


@dataclass(frozen=True)
class Finish:
    """The job has ended; its end is durable."""

    state: State
    message: str


@dataclass(frozen=True)
class Ping:
    pass


Wish = Asked | Interrupted | Found | InUse
"""Messages about what people want, which only agents of a dev environment send."""
AgentMessage = Hello | Checked | Started | Reported | Progressed | Dumped | FabricSeen | Exited | Stopped | Leaving | Pong | Wish | Printed
Order = Check | Start | Stop | Finish | Ping | Find | Show | Ended
_AGENT_MESSAGES: dict[str, type[AgentMessage]] = {
    k.__name__: k
    for k in (
        *(Hello, Checked, Started, Reported, Progressed, Dumped, FabricSeen, Exited, Stopped, Leaving, Pong),
        *(Asked, Interrupted, Found, InUse, Printed),
    )
}
_ORDERS: dict[str, type[Order]] = {k.__name__: k for k in (Check, Start, Stop, Finish, Ping, Find, Show, Ended)}


def message_to_json(message: AgentMessage | Order) -> dict[str, Any]:
    return {"type": type(message).__name__, **to_json(message)}


def agent_message(value: object) -> AgentMessage:
    """Raises ContractError, NewerKind."""
    message: AgentMessage = _tagged(_AGENT_MESSAGES, "type", value, "message of an agent")
    return message


def order(value: object) -> Order:
    """Raises ContractError, NewerKind."""
    message: Order = _tagged(_ORDERS, "type", value, "order")
    return message


def passed_over(message: AgentMessage) -> Iterator[str]:
    """Kinds of the reports of ranks in it that `known_reports` leaves out."""
    values = (message.report,) if isinstance(message, Reported) else message.reports if isinstance(message, Progressed) else ()
    return (f"rank report {value['event']}" for value in values if _is_newer(value))


def _tagged(kinds: dict[str, type[Any]], tag: str, value: object, where: str) -> Any:
    name = value.get(tag) if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise ContractError(f"{where} must be an object whose {tag} is one of {', '.join(kinds)}")
    if name not in kinds:
        raise NewerKind(f"{where} {name[:60]}")
    return from_json(kinds[name], value, f"{where} {name}")  # which has no field of the tag's name
