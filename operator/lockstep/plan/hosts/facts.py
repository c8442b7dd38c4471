"""Answers of hosts about themselves, checked: whoever owns a host decides what its Python prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NamedTuple, TypeVar

from lockstep.plan.hosts.record import JobRecord, read_record
from lockstep_gang.contract.report import ENDS
from lockstep_spec.codec import FINITE, at_least, from_json
from lockstep_spec.words import cleaned, listed

T = TypeVar("T")
Count = Annotated[int, at_least(0)]
Number = Annotated[float, FINITE]


class Version(NamedTuple):
    """Two numbers of a version: of a Python, or of CUDA's compute capability."""

    major: int
    minor: int


@dataclass(frozen=True)
class Folder:
    """A folder of a host."""

    path: str
    free: Count
    """Free bytes of its file system."""
    problem: str = ""
    """Reason why nothing can be written there; '' if it can."""


@dataclass(frozen=True)
class Route:
    """The way from a host to another one."""

    address: str
    """Its own address on it."""
    interface: str


@dataclass(frozen=True)
class Link:
    """A network interface of a host."""

    up: bool = True
    wireless: bool = False


@dataclass(frozen=True)
class HostGpu:
    """A GPU, and who has it."""

    index: Count
    uuid: str
    name: str
    memory: Count
    """Bytes."""
    users: tuple[str, ...] = ()
    """`user (pid N)` of each process that computes on it."""
    claim: str = ""
    """The job that has claimed it, and whose that is; '' if none has."""
    driver: str = ""
    capability: Version | None = None
    """CUDA's compute capability, such as (8, 9); None where the driver doesn't say it."""
    ecc_errors: int = 0
    """Errors of its memory since the driver was loaded that ECC could not correct."""
    bus: str = ""
    """PCI address, as nvidia-smi writes it."""
    shared: bool = False
    """True if its memory is the host's own, as in a DGX Spark."""
    divided: bool = False
    """True in MIG mode: a process gets one slice of it."""

    @property
    def taken(self) -> str:
        """Say which job or users have the GPU, in words that follow its name; '' if it is free."""
        return f"is claimed by {self.claim}" if self.claim else f"is used by {listed(self.users)}" if self.users else ""


@dataclass(frozen=True)
class JobOnHost:
    """A job's state on one host."""

    record: JobRecord | None = None
    """Record of its newest start; None: it was never started here, or was deleted."""
    unit: str = ""
    """systemd's word for its unit, such as active; '' where there is none."""
    exit_code: int | None = None
    supervised: bool = False
    """True if a session of its own keeps the agent, and that session is there."""
    stopped: bool = False
    """True if somebody asked it to stop."""
    retry: int = 0
    """Number of times that `lockstep retry` has started it again."""
    ended: dict[str, Any] = field(default_factory=dict)
    """The coordinator's record of the end."""
    highest_attempt: int = 0
    newest_step: int | None = None
    newest_time: Number | None = None
    """Time of the newest commit on its volume, seconds since 1970 by its own clock."""
    report: dict[str, Any] | None = None
    """The coordinator's newest report; None: its volume has none."""
    report_seconds: Number = 0.0
    """Age of that report by the host's own clock."""
    log: tuple[str, ...] = ()
    """Last lines of its agent's log."""
    problem: str = ""
    """Reason why its files there can't be read; then nothing but its unit is known. '' if they can."""

    @property
    def runs(self) -> bool:
        """True if its agent runs, or is about to."""
        return self.supervised or self.unit in ("active", "activating", "reloading", "deactivating")

    def records_end(self, uid: str, retry: int) -> bool:
        """True if the coordinator has recorded here that this start ended, after this retry or a later one."""
        retried, is_end = self.ended.get("retry", 0), str(self.ended.get("state")) in ENDS
        return is_end and self.ended.get("jobUid") == uid and isinstance(retried, int) and retried >= retry


class Input(NamedTuple):
    """An input of a job: its field, and the kind that should be at the path."""

    field: str
    path: str
    kind: str


@dataclass(frozen=True)
class HostFacts:
    """Answer of one host."""

    name: str
    user: str
    home: str
    now: Number
    """Its clock, seconds since 1970."""
    python: Version
    workspace: Folder
    datasets: Folder
    temporary: Folder | None = None
    """Folder of temporary files, in which an agent has one of its own."""
    routes: Mapping[str, Route] = field(default_factory=dict)
    """Ways, by the other host's address."""
    links: Mapping[str, Link] = field(default_factory=dict)
    gpus: tuple[HostGpu, ...] = ()
    gpu_problem: str = ""
    """Reason why there may be more GPUs than these, or users of them that are not known; '' if all is known."""
    taken_ports: tuple[int, ...] = ()
    has_units: bool = False
    lingers: bool = False
    kills_processes: bool = False
    controllers: tuple[str, ...] = ()
    """Controllers of control groups that the user's units may use, such as cpu and memory."""
    missing: tuple[Input, ...] = ()
    """Inputs that are not there."""
    jobs: Mapping[str, JobOnHost] = field(default_factory=dict)
    """Jobs by name: every one that was asked for or has files here."""
    state: str = ""
    """Folder with one folder for each of Lockstep's jobs."""
    environment_python: str = ""
    """Python of the environment that `hosts setup` made last; '' if it made none."""
    stated_python: Version | None = None
    """Version of the Python that the cluster file states; None: it states none, it didn't say, or nobody asked."""
    stated_problem: str = ""
    """Reason why that Python can't be run; '' if it can, or nobody asked."""
    promised_ports: tuple[int, ...] = ()
    """Ports of jobs that have been started here and have not ended, whether somebody listens now or not."""
    own_name: str = ""
    """Address that the host's own name has there."""
    memory: Count = 0
    """Bytes of its memory; 0: not known."""
    memlock: int = -1
    """Bytes that a process may lock; -1: as many as it likes."""
    system: str = "Linux"


def unread_words(host: str, name: str, job: JobOnHost) -> str:
    """Sentence about a job whose files on a host can't be read."""
    return f"host {host}: the files of job {name} there can't be read: {job.problem}"


def session_words(facts: HostFacts) -> tuple[str, str]:
    """Reason why no unit can keep an agent there, so that a session must, which ends with a reboot, and root's step; '' and '' where one
    can.
    """
    if facts.has_units and facts.lingers:
        return "", ""
    why = f"{facts.user} has no linger there" if facts.has_units else f"there is no systemd for the units of {facts.user}"
    step = f"{'' if facts.has_units else 'install dbus-user-session and libpam-systemd, then '}loginctl enable-linger {facts.user}"
    if facts.kills_processes:
        why = f"it ends all that {facts.user} runs at the end of the login (KillUserProcesses=yes of its logind), and {why}"
        step = step if facts.has_units else "set KillUserProcesses=no in /etc/systemd/logind.conf"
    return why, step


class BadAnswer(ValueError):
    """An answer that no look gives."""


def read_answer(kind: type[T], name: str, answer: Mapping[str, Any]) -> T:
    """Read the answer of a host's program, without control characters. Raises BadAnswer for one that is none of this kind."""
    with checked(name, answer) as known:
        return from_json(kind, known, "it")


@contextmanager
def checked(name: str, answer: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the answer of a host's program, without control characters. Raises BadAnswer for one that the block can't read."""
    try:
        yield cleaned(dict(answer))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise BadAnswer(f"host {name}: its Python gives no valid answer ({type(error).__name__}: {error})") from None


@dataclass(frozen=True)
class _Jobs:
    jobs: dict[str, dict[str, Any]]


def read_host(name: str, answer: Mapping[str, Any]) -> HostFacts:
    """Read the answer of `look`. Raises BadAnswer for what is none."""
    with checked(name, answer) as known:
        jobs = from_json(_Jobs, known, "it").jobs
        facts = from_json(HostFacts, {**known, "name": name, "jobs": {}}, "it")
        return replace(facts, jobs={job: _job(there) for job, there in jobs.items()})


def _job(answer: dict[str, Any]) -> JobOnHost:
    """Read a job, or why it can't be: one that another version of Lockstep wrote, or whose files are damaged, hides no other."""
    record = answer.get("record")
    try:
        job = from_json(JobOnHost, {**answer, "record": None}, "it")
        return replace(job, record=read_record(record)) if record and not job.problem else job
    except (ValueError, TypeError) as error:
        return JobOnHost(unit=str(answer.get("unit", "")), problem=str(error))


DIVIDED = "divided (MIG)"
