"""Reports to the operator: the coordinator's, the whole state of a job in one body, so that losing one costs only time; and an agent's last
words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lockstep_gang.contract.fabric import FabricReport
from lockstep_gang.contract.interactive import InteractiveReport
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.run import JobIdentity
from lockstep_spec.choices import Choice
from lockstep_spec.codec import ContractError, readable_from_json, refuse, to_json
from lockstep_spec.words import cleaned

REPORT_FORMAT = "lockstep-report/1"
REPORT_BYTES_MAX = 1024 * 1024
"""Largest report that is parsed, whatever it was read from."""
JOB_HEADER = "X-Lockstep-Job"
"""`NAMESPACE/NAME/UID` of the job, so that a report's signature is checked, and its size bounded, before anything parses it."""
SIGNATURE_HEADER = "X-Lockstep-Signature"
_CLAIM = re.compile(r"([a-z0-9.-]{1,253})/([a-z0-9.-]{1,253})/([A-Za-z0-9-]{1,64})")
STATE_BYTES_MAX = 128 * 1024
"""Largest body of a report, but for what each node adds: last lines, failures, findings, metrics. Last lines are left out where it would be
more.
"""
NODE_BYTES_MAX = 64
"""`{"node": 1023, "connected": false, "readyRanks": 64}, ` and its number in `order`."""
_TEXT_CHARACTERS = (4096, 1000, 200)
"""Lengths to which all texts of a report that is too large even then are cut, one after the other."""


class State(Choice):
    WAITING = "Waiting"  # for nodes
    STARTING = "Starting"  # ranks are started, not all have been heard
    RUNNING = "Running"
    BACKING_OFF = "BackingOff"  # between a failure and the next attempt
    COMPLETE = "Complete"
    FAILED = "Failed"


ENDS = frozenset({State.COMPLETE, State.FAILED})
"""States after which nothing of the job runs again. No state that another version knows is one."""


@dataclass(frozen=True)
class NodeReport:
    node: int
    connected: bool
    ready_ranks: int


@dataclass(frozen=True)
class RankCount:
    """Ready: its process runs and, in Lockstep's trainer, has been heard."""

    desired: int
    ready: int


@dataclass(frozen=True)
class Metric:
    name: str
    value: str


@dataclass(frozen=True)
class TrainerReport:
    """The last words of rank 0."""

    activity: str | None = None
    step: int | None = None
    total_steps: int | None = None
    estimated_remaining_seconds: int | None = None
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class CheckpointReport:
    step: int
    path: str
    time: str
    """Time when the coordinator heard of the commit, RFC 3339."""


@dataclass(frozen=True)
class FailedSaves:
    """Saves that have failed since the newest commit."""

    step: int
    """Step of the last of them."""
    problem: str
    """Rank, path, and the system's words."""
    since: str
    """Time when the first of them failed, RFC 3339."""
    count: int


@dataclass(frozen=True)
class Unwritten:
    """The job's record that node 0 can't write. Nothing starts or ends before it is written."""

    problem: str
    """Sentence about what can't be written where, and why."""
    since: str
    """Time when the first try failed, RFC 3339."""


class Cause(Choice):
    """The kind of a failure: whether starting again may help, and who must act."""

    USER_CODE = "UserCode"
    CONFIGURATION = "Configuration"  # what was asked for can't be done
    OUT_OF_MEMORY = "OutOfMemory"
    FABRIC = "Fabric"  # ranks lost each other without a cause of their own
    STORAGE = "Storage"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    HANG = "Hang"
    NON_FINITE = "NonFinite"
    SETUP = "Setup"  # a package, file or driver is missing
    KILLED = "Killed"  # by a signal that nobody of the job sent
    HARDWARE = "Hardware"  # a GPU of the node failed
    INTERNAL = "Internal"  # of Lockstep itself
    STOPPED = "Stopped"  # no failure: somebody asked for it. Only what is done again since then has it


@dataclass(frozen=True)
class Failure:
    """The first failure of an attempt: the rank that caused it, not those that lost their peer."""

    message: str
    rank: int | None = None
    node: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    exception: str | None = None
    last_lines: tuple[str, ...] = ()
    """At most 20, at most 1,000 characters each."""
    cause: Cause | None = None
    step: int | None = None
    """The last optimizer step that was reported before."""
    activity: str | None = None
    """Activity that a rank that hung was in."""
    stacks: str | None = None
    """File with the Python stacks of all threads of a rank that hung."""


@dataclass(frozen=True)
class Restart:
    """One failed attempt and what it cost."""

    attempt: int
    failed: str
    """Time of the failure, RFC 3339."""
    failure: Failure
    lost_steps: int
    """Steps to be done again: those since the newest commit, or, once the next attempt has told it, since the commit that it goes on from.
    """
    downtime_seconds: int | None = None
    """Seconds from `down_since` to the first step of the next attempt; null: not there yet."""
    counts: bool = True
    """Toward restart.maxRestarts: not when the cluster took a node away."""
    explained_by: str | None = None
    """The uid of the pod whose loss the operator explained."""
    down_since: str | None = None
    """The failed attempt's last step, RFC 3339. Where it came to none: as of the attempt before it, else the last word of the node that was
    lost, else the failure. Null: as `failed`.
    """


UNREPORTED = "attempt {} ended without a report"
"""Beginning of a failure's message whose coordinator ended before it wrote one down."""
HISTORY = 10
"""Restarts remembered."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has taken longer than the others over a window of steps, as they wait for it."""

    rank: int
    node: int
    slowdown: str
    """Its own time a step over that of the others, for example 1.42."""
    steps: int
    """Steps of the window."""


class Save(Choice):
    """Fate of the work until the stop."""

    SAVED = "Saved"
    NOT_SAVED = "NotSaved"
    NOTHING_TO_SAVE = "NothingToSave"  # no step was done since the newest commit
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class StopReport:
    """The end of the newest stop that was asked for: by the operator, a drained node or a deleted pod."""

    attempt: int
    time: str
    """Time from which no rank ran any more, RFC 3339."""
    save: Save
    message: str
    step: int | None = None
    """The newest commit."""
    lost_steps: int | None = None
    """Steps done since; null: not known."""


class Spent(Choice):
    """Every moment is of exactly one kind, so that the kinds add up to the time that has passed."""

    QUEUED = "queued"  # waiting for nodes, with no failure to blame
    PREFLIGHT = "preflight"  # checks before an attempt
    LOAD = "load"  # from the start of the ranks to their first step
    UNKNOWN = "unknown"  # ranks of a script run that has told no step: with its first one this turns out to have been LOAD
    TRAIN = "train"  # steps that were never done before
    EVALUATE = "evaluate"
    SAVE = "save"  # steps wait for a save, or the results are written
    LOST = "lost"  # steps that a failure undid, done again
    DOWN = "down"  # from the last step before a failure to the next step
    STOPPED = "stopped"  # from a stop that was asked for to the next start


@dataclass(frozen=True)
class Loss:
    """Cost of the failures of one cause: time down and time of steps done again, and the same times the job's GPUs."""

    milliseconds: int = 0
    gpu_milliseconds: int = 0


@dataclass(frozen=True)
class Goodput:
    """Uses of a job's time, in the volume's records and in every report: milliseconds by kind; together they are `until` - `began`."""

    began: int = 0
    """Start of the job's first coordinator, milliseconds since 1970; 0: nothing is accounted yet."""
    until: int = 0
    """Accounted up to here."""
    spent: dict[str, int] = field(default_factory=dict)
    """Milliseconds by the values of `Spent`."""
    causes: dict[str, Loss] = field(default_factory=dict)
    """Losses by the values of `Cause`."""
    furthest_step: int = 0
    """The largest step ever reported: smaller ones are done again."""


@dataclass(frozen=True)
class Report:
    job: JobIdentity
    pod: str
    sequence: int
    """Larger than every earlier one of the same job; starts at the clock's nanoseconds, so a new process is always newer."""
    attempt: int
    restarts: int
    state: State
    message: str
    nodes: tuple[NodeReport, ...]
    ranks: RankCount
    trainer: TrainerReport | None = None
    checkpoint: CheckpointReport | None = None
    failure: Failure | None = None
    restarts_counted: int = 0
    """Restarts since the last new commit that count toward restart.maxRestarts."""
    history: tuple[Restart, ...] = ()
    """The newest at the end, at most 10, without their last lines."""
    stop: StopReport | None = None
    """The newest stop that was asked for; it stays when a later attempt runs."""
    stragglers: tuple[Straggler, ...] = ()
    """The slowest first, at most 8."""
    result: dict[str, str | None] | None = None
    goodput: Goodput | None = None
    """Uses of the job's time."""
    log: tuple[str, ...] = ()
    """The last lines of node 0's output, at most 100, with changes of `state` only."""
    retry: int = 0
    """restart.retry of the run that reports: what it says of the end is of that retry."""
    fabric: FabricReport | None = None
    preflight: PreflightReport | None = None
    order: tuple[int, ...] = ()
    """Nodes in the order of the newest attempt's ranks; empty: by their numbers."""
    interactive: InteractiveReport | None = None
    """State of a dev environment."""
    unheard: str = ""
    """Nodes that are not heard though their connections are there, and why, in a sentence."""
    failed_saves: FailedSaves | None = None
    """Null: the newest save was committed, or there was none."""
    unwritten: Unwritten | None = None
    """Null: nothing waits for the record. While something does, `failure` and `history` have the failure that isn't in it yet."""
    format: str = REPORT_FORMAT


def parse_report(body: bytes, left_out: Callable[[str, str], None] = lambda *_: None) -> Report:
    """A report's body, its texts as lines that can be printed: they go into statuses and events.

    `left_out` gets the key and the error of each optional part that can't be read. Raises ContractError where that is the job or its state.
    """
    if len(body) > REPORT_BYTES_MAX:
        raise ContractError(f"report has {len(body)} bytes, must have at most {REPORT_BYTES_MAX}")
    value = _value(body)
    stated = value.get("format", REPORT_FORMAT) if isinstance(value, dict) else REPORT_FORMAT
    if stated != REPORT_FORMAT:
        raise refuse("report.format", stated, REPORT_FORMAT)
    report, errors = readable_from_json(Report, value, "report")
    for key, error in errors.items():
        left_out(key, error)
    return report


def _value(body: bytes) -> Any:
    try:
        return cleaned(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise ContractError(f"report is not JSON: {error}") from None


def report_file_text(report: Report, written: str) -> str:
    """Text of the file `gang/report.json` in a run's folder, of the same bounded size as a report to an operator."""
    return f'{{"written": {json.dumps(written)}, "report": {report_body(report).decode("utf-8")}}}\n'


def report_bytes_max(nodes: int) -> int:
    """Largest body of a report with JOB_HEADER, of a gang of so many nodes."""
    return STATE_BYTES_MAX + NODE_BYTES_MAX * nodes


def report_body(report: Report) -> bytes:
    """At most `report_bytes_max` of its nodes: the oldest last lines are left out, then long texts cut, so that no job is too talkative to
    be heard.
    """
    limit = report_bytes_max(len(report.nodes))
    body = _body(to_json(report))
    while len(body) > limit and report.log:
        report = replace(report, log=report.log[len(report.log) // 2 + 1 :])
        body = _body(to_json(report))
    for characters in _TEXT_CHARACTERS:
        if len(body) > limit:
            body = _body(_cut(to_json(report), characters))
    if len(body) > limit:  # thousands of metrics or results, of which the operator shows a few
        trainer = None if report.trainer is None else replace(report.trainer, metrics=())
        body = _body(_cut(to_json(replace(report, trainer=trainer, result=None)), _TEXT_CHARACTERS[-1]))
    return body


def smallest(report: Report) -> Report:
    """Return what every version reads, for an operator that refuses the whole: whose report it is, how far the job is, how it ended.

    Causes are left out: an operator that doesn't know one may refuse it.
    """
    most, failure = _TEXT_CHARACTERS[-1], report.failure
    required = {f.name: getattr(report, f.name) for f in fields(report) if f.default is f.default_factory}
    least = None if failure is None else Failure(failure.message[:most], failure.rank, failure.node)
    return Report(**required | {"message": report.message[:most]}, checkpoint=report.checkpoint, failure=least, retry=report.retry)


def _body(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def _cut(value: Any, characters: int) -> Any:
    """Every text in `value` (plain JSON) but keys, cut to so many characters."""
    if isinstance(value, str):
        return value[:characters]
    if isinstance(value, list):
        return [_cut(item, characters) for item in value]
    return {key: _cut(item, characters) for key, item in value.items()} if isinstance(value, dict) else value


def job_header(job: JobIdentity) -> str:
    """Value of JOB_HEADER."""
    return f"{job.namespace}/{job.name}/{job.uid}"


def claimed_job(header: str) -> JobIdentity | None:
    """The job of which a report says it is in JOB_HEADER; None when it doesn't say it as coordinators do."""
    match = _CLAIM.fullmatch(header)
    return None if match is None else JobIdentity(name=match[2], namespace=match[1], uid=match[3])
