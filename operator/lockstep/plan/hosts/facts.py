"""Answers of hosts about themselves, checked: whoever owns a host decides what its Python prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.plan.hosts.record import JobRecord, read_record
from lockstep_gang.contract.report import ENDS
from lockstep_spec.words import cleaned, decimal_size


@dataclass(frozen=True)
class Folder:
    """A folder of a host."""

    path: str
    free: int
    """Free bytes of its file system."""
    exists: bool = False
    kind: str = ""
    """File system, as the kernel names it."""
    problem: str = ""
    """Reason why nothing can be written there; '' if it can."""


@dataclass(frozen=True)
class Route:
    """The way from a host to another one."""

    address: str
    """Its own address on it."""
    interface: str


@dataclass(frozen=True)
class HostGpu:
    """A GPU, and who has it."""

    index: int
    uuid: str
    name: str
    memory: int
    """Bytes."""
    users: tuple[str, ...] = ()
    """`user (pid N)` of each process that computes on it."""
    claim: str = ""
    """The job that has claimed it, and whose that is; '' if none has."""
    driver: str = ""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, such as (8, 9); None where the driver doesn't say it."""
    ecc_errors: int = 0
    """Errors of its memory since the driver was loaded that ECC could not correct."""
    bus: str = ""
    """PCI address, as nvidia-smi writes it."""
    shared: bool = False
    """True if its memory is the host's own, as in a DGX Spark."""
    divided: bool = False
    """True in MIG mode: a process gets one slice of it."""


@dataclass(frozen=True)
class JobOnHost:
    """A job's state on one host."""

    record: JobRecord | None = None
    """Record of its newest start; None: it was never started here, or was deleted."""
    unit: str = ""
    """systemd's word for its unit, such as active; '' where there is none."""
    result: str = ""
    """systemd's word for how the agent ended, such as exit-code."""
    exit_code: int | None = None
    supervised: bool = False
    """True if a session of its own keeps the agent, and that session is there."""
    stopped: bool = False
    """True if somebody asked it to stop."""
    retry: int = 0
    """Number of times that `lockstep retry` has started it again."""
    ended: Mapping[str, Any] = field(default_factory=dict)
    """The coordinator's record of the end."""
    highest_attempt: int = 0
    newest_step: int | None = None
    newest_time: float | None = None
    """Time of the newest commit on its volume, seconds since 1970 by its own clock."""
    report: Mapping[str, Any] | None = None
    """The coordinator's newest report; None: its volume has none."""
    report_seconds: float = 0.0
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


@dataclass(frozen=True)
class HostFacts:
    """Answer of one host."""

    name: str
    user: str
    home: str
    now: float
    """Its clock, seconds since 1970."""
    boot: str
    python: tuple[int, int]
    workspace: Folder
    datasets: Folder
    temporary: Folder | None = None
    """Folder of temporary files, in which an agent has one of its own."""
    routes: Mapping[str, Route] = field(default_factory=dict)
    """Ways, by the other host's address."""
    links: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gpus: tuple[HostGpu, ...] = ()
    gpu_problem: str = ""
    """Reason why there may be more GPUs than these, or users of them that are not known; '' if all is known."""
    taken_ports: frozenset[int] = frozenset()
    has_units: bool = False
    lingers: bool = False
    kills_processes: bool = False
    controllers: frozenset[str] = frozenset()
    """Controllers of control groups that the user's units may use, such as cpu and memory."""
    missing: tuple[tuple[str, str, str], ...] = ()
    """(field, path, kind) of inputs that are not there."""
    jobs: Mapping[str, JobOnHost] = field(default_factory=dict)
    """Jobs by name: every one that was asked for or has files here."""
    state: str = ""
    """Folder with one folder for each of Lockstep's jobs."""
    environment_python: str = ""
    """Python of the environment that `hosts setup` made last; '' if it made none."""
    stated_python: tuple[int, int] | None = None
    """Version of the Python that the cluster file states; None: it states none, it didn't say, or nobody asked."""
    stated_problem: str = ""
    """Reason why that Python can't be run; '' if it can, or nobody asked."""
    promised_ports: frozenset[int] = frozenset()
    """Ports of jobs that have been started here and have not ended, whether somebody listens now or not."""
    own_name: str = ""
    """Address that the host's own name has there."""
    memory: int = 0
    """Bytes of its memory; 0: not known."""
    memlock: int = -1
    """Bytes that a process may lock; -1: as many as it likes."""
    system: str = "Linux"


def unread_words(host: str, name: str, job: JobOnHost) -> str:
    """Sentence about a job whose files on a host can't be read."""
    return f"host {host}: the files of job {name} there can't be read: {job.problem}"


OLDEST_PYTHON = (3, 10)
"""Oldest Python that agents and programs of Lockstep run on."""
PYTHON_MIN = (3, 11)
"""Oldest Python that the trainer runs on."""

LEAST_TEMPORARY = 1 << 20
"""Free bytes for temporary files below which no agent starts."""
LEAST_RECORDS = 16 << 20
"""Free bytes of a workspace below which a job's records and logs have no room."""


def unfit_words(facts: HostFacts) -> str:
    """Reason why no agent could run on this host or keep its records there, and what to do; '' if one can."""
    folder = facts.workspace
    if facts.python < OLDEST_PYTHON:
        version = ".".join(map(str, facts.python))
        return f"its Python {version} is too old: 3.10 or newer is needed; lockstep hosts setup brings one, or state hosts[].python"
    if folder.problem:
        return f"its workspace {folder.path}: {folder.problem}: state another hosts[].workspace, or let {facts.user} write there"
    if folder.free < LEAST_RECORDS:
        return f"its workspace {folder.path} has {decimal_size(folder.free)} free: free some, or state a hosts[].workspace on another disk"
    problem, remedy = temporary_words(facts)
    return f"{problem}: {remedy}" if problem else ""


def temporary_words(facts: HostFacts) -> tuple[str, str]:
    """Reason why an agent could write no temporary files on this host, and what to do; '' and '' if it can."""
    folder = facts.temporary
    if folder is None or (not folder.problem and folder.free >= LEAST_TEMPORARY):
        return "", ""
    if folder.problem:
        return (
            f"its folder of temporary files {folder.path}: {folder.problem}",
            f"let {facts.user} write there (as root: chmod 1777 {folder.path})",
        )
    return f"its folder of temporary files {folder.path} has {decimal_size(folder.free)} free", "remove what is not needed there"


class BadAnswer(ValueError):
    """An answer that no look gives."""


@contextmanager
def checked(name: str, answer: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the answer of a host's program, without control characters. Raises BadAnswer for one that the block can't read."""
    try:
        yield cleaned(dict(answer))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise BadAnswer(f"host {name}: its Python gives no valid answer ({type(error).__name__}: {error})") from None


def read_host(name: str, answer: Mapping[str, Any]) -> HostFacts:
    """Read the answer of `look`. Raises BadAnswer for what is none."""
    with checked(name, answer) as known:
        return _read(name, known)


def _read(name: str, answer: dict[str, Any]) -> HostFacts:
    stated = answer.get("statedPython", {})
    keeping = answer["keeping"]
    memory = int(answer.get("memory", {}).get("MemTotal", 0))
    gpus, gpu_problem = _gpus(answer["gpus"], memory)
    return HostFacts(
        name=name,
        user=str(answer["user"]),
        home=str(answer["home"]),
        now=float(answer["now"]),
        boot=str(answer["boot"]),
        python=_version(answer["python"]),
        workspace=_folder(answer["workspace"]),
        datasets=_folder(answer["datasets"]),
        temporary=_folder(answer["temporary"]),
        routes={str(peer): Route(str(way["address"]), str(way["interface"])) for peer, way in answer["routes"].items() if "address" in way},
        links={str(link): dict(values) for link, values in answer["links"].items()},
        gpus=gpus,
        gpu_problem=str(answer.get("gpuProblem", "")) or gpu_problem,
        taken_ports=frozenset(int(port) for port in answer["takenPorts"]),
        has_units=bool(keeping["units"]),
        lingers=bool(keeping["linger"]),
        kills_processes=bool(keeping["killsProcesses"]),
        controllers=frozenset(map(str, keeping["controllers"])),
        missing=tuple((str(field), str(path), str(kind)) for field, path, kind in answer["missing"]),
        jobs={str(job): _job_or_problem(there) for job, there in answer["jobs"].items()},
        state=str(answer["state"]),
        environment_python=str(answer["environmentPython"]),
        stated_python=_version(stated["version"]) if "version" in stated else None,
        stated_problem=str(stated.get("problem", "")),
        promised_ports=frozenset(int(port) for port in answer["promisedPorts"]),
        own_name=str(answer.get("ownName", "")),
        memory=memory,
        memlock=int(answer.get("memlock", -1)),
        system=str(answer.get("system", "Linux")),
    )


def _version(text: object) -> tuple[int, int]:
    major, minor = str(text).split(".")[:2]
    return int(major), int(minor)


def _job_or_problem(answer: dict[str, Any]) -> JobOnHost:
    """Read a job, or why it can't be: one that another version of Lockstep wrote, or whose files are damaged, hides no other."""
    if answer.get("problem"):
        return JobOnHost(unit=_unit(answer["unit"]), problem=str(answer["problem"]))
    try:
        return _job(answer)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return JobOnHost(
            unit=_unit(answer["unit"]), problem=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        )


def _unit(unit: dict[str, Any]) -> str:
    return str(unit.get("ActiveState", "")) if unit.get("LoadState") == "loaded" else ""


def _job(answer: dict[str, Any]) -> JobOnHost:
    unit = answer["unit"]
    report = answer.get("report") or {}
    loaded = unit.get("LoadState") == "loaded"
    code = str(unit.get("ExecMainStatus", ""))
    return JobOnHost(
        record=read_record(answer["record"]) if answer.get("record") else None,
        unit=_unit(unit),
        result=str(unit.get("Result", "")) if loaded else "",
        exit_code=int(code) if loaded and code.isdecimal() else None,
        supervised=bool(answer["supervised"]),
        stopped=bool(answer["stopped"]),
        retry=int(answer["retry"]),
        ended=dict(answer.get("ended") or {}),
        highest_attempt=int(answer["highestAttempt"]),
        newest_step=None if answer.get("newestStep") is None else int(answer["newestStep"]),
        newest_time=None if answer.get("newestTime") is None else float(answer["newestTime"]),
        report=report.get("report") if isinstance(report.get("report"), dict) else None,
        report_seconds=float(report.get("seconds", 0.0)),
        log=tuple(map(str, answer.get("log", []))),
    )


def _folder(answer: dict[str, Any]) -> Folder:
    return Folder(
        str(answer["path"]),
        int(answer.get("free", 0)),
        bool(answer.get("exists")),
        str(answer.get("kind", "")),
        str(answer.get("problem", "")),
    )


DIVIDED = "divided (MIG)"
NO_MEMORY = ("[N/A]", "[Not Supported]")
"""Words of nvidia-smi for the memory of a GPU that has none of its own. Any other word tells of a fault or of lacking rights."""


def _gpus(answers: list[dict[str, Any]], host_memory: int = 0) -> tuple[tuple[HostGpu, ...], str]:
    """GPUs that the driver describes, and what it says of one that it doesn't, such as one that needs a reset."""
    gpus, problems = [], []
    for answer in answers:
        try:
            gpus.append(_gpu(answer, host_memory))
        except (ValueError, OverflowError):
            told = f"index {answer['index']}, memory.total {answer['memory.total']}"
            problems.append(f"nvidia-smi doesn't describe GPU {answer['uuid']}: {told}")
    return tuple(gpus), "; ".join(problems)


def _gpu(answer: dict[str, Any], host_memory: int) -> HostGpu:
    claim = answer.get("claim") or {}
    users = tuple(f"{process['user'] or 'somebody'} (pid {process['pid']})" for process in answer.get("processes", []))
    claimed = f"{claim['says']} ({claim['user']}, pid {claim['pid']})" if claim else ""
    capability = re.fullmatch(r"(\d{1,2})\.(\d)", str(answer.get("compute_cap", "")))
    ecc = str(answer.get("ecc.errors.uncorrected.volatile.total", ""))
    shared = answer["memory.total"] in NO_MEMORY
    return HostGpu(
        int(answer["index"]),
        str(answer["uuid"]),
        str(answer["name"]),
        host_memory if shared else int(float(answer["memory.total"])) << 20,
        users,
        claimed,
        str(answer.get("driver_version", "")),
        None if capability is None else (int(capability[1]), int(capability[2])),
        int(ecc) if ecc.isdecimal() else 0,
        str(answer.get("pci.bus_id", "")),
        shared,
        answer.get("mig.mode.current") == "Enabled",
    )
