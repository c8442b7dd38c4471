"""Session of a dev environment (pure): what is asked to run on all nodes, whether they could run it, and how it ended.

    asked → all nodes here → preflight, once an agent is another one → every node has the script → attempt → ended

One run at a time. Its failure is reported to whoever asked and to nobody else: nothing is restarted, no budget is spent, the job goes on.
An environment that nobody uses is warned, then its GPUs are released. A run is use until it has ended.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from lockstep_gang.contract.interactive import RUN_TEXT, Asked, Ended, Find, Found, Idleness, InteractiveReport, Interrupted, InUse
from lockstep_gang.contract.messages import StopMode, Wish
from lockstep_gang.contract.run import Run
from lockstep_gang.contract.times import stamp
from lockstep_gang.lifecycle.failures import first_failure
from lockstep_gang.lifecycle.gang import Gang, Phase, Request, Session, has_failed
from lockstep_gang.lifecycle.preflight import rounds
from lockstep_gang.lifecycle.preflight.rounds import Preflight
from lockstep_gang.lifecycle.stops import with_stuck_nodes
from lockstep_spec.exits import CONFIGURATION, FAILED, INTERRUPTED, SAVED
from lockstep_spec.words import number_of

LOOK_SECONDS = 15.0
"""Time that every node has to say whether it has the script; a volume may hang."""
RELEASING_SECONDS = 30.0
"""Time after the end of the idle time in which nothing is started: the GPUs are being released."""
"""Code of a shell for a program that Ctrl-C ended."""


def with_wish(gang: Gang, run: Run, node: int, message: Wish, now: float) -> Gang:
    """The gang after somebody on `node` asked for something, or the agent there answered."""
    if run.interactive is None:
        return gang
    if isinstance(message, Asked):
        return _with_request(gang, run, node, message, now)
    if isinstance(message, Interrupted):
        return _interrupted(gang, node, message)
    if isinstance(message, InUse):
        return _with(gang, used_at=now)
    return _with_script(gang, node, message)


def _with_request(gang: Gang, run: Run, node: int, asked: Asked, now: float) -> Gang:
    session = gang.session
    if session.request is not None and session.request.asked.id == asked.id:
        return gang
    if session.last is not None and session.last.id == asked.id:
        return _answered(gang, node, session.last)
    why = _why_refused(gang, run, asked, now)
    if why:
        return _answered(gang, node, Ended(asked.id, FAILED, why))
    return _with(gang, request=Request(asked, node, gang.nodes[node].instance, now), used_at=now)


def _why_refused(gang: Gang, run: Run, asked: Asked, now: float) -> str:
    assert run.interactive is not None  # noqa: S101 (the caller asked)
    current = gang.session.request
    if asked.again:
        return "node 0's agent restarted, which ended the run"
    if current is not None:
        return (
            f"refused: {current.asked.text} runs since {stamp(current.since)}, asked for by {current.asked.by}; there is one run at a time,"
            f" and this ends it: lockstep stop {run.job.name} --run"
        )
    if gang.nodes[0].leaving:
        return "refused: the environment is being stopped"
    release = gang.session.used_at + run.interactive.idle_seconds
    if gang.session.idleness is Idleness.OVER and now < release + RELEASING_SECONDS:
        return f"refused: nobody used the environment, and its GPUs are being released; it comes back with: lockstep resume {run.job.name}"
    return ""


def _interrupted(gang: Gang, node: int, message: Interrupted) -> Gang:
    request = gang.session.request
    if request is None or message.id not in ("", request.asked.id):
        return _answered(gang, node, Ended(message.reply, FAILED, "nothing runs")) if message.reply else gang
    gang = _with(gang, request=replace(request, interrupts=request.interrupts + 1, why=request.why or message.why))
    return _answered(gang, node, Ended(message.reply, 0, f"asked {request.asked.text} to stop")) if message.reply else gang


def _with_script(gang: Gang, node: int, answer: Found) -> Gang:
    request = gang.session.request
    if request is None or answer.id != request.asked.id or any(node == other for other, _ in request.scripts):
        return gang
    return _with(gang, request=replace(request, scripts=(*request.scripts, (node, answer))))


def prepare_request(gang: Gang, run: Run, now: float) -> tuple[Gang, bool]:
    """The gang one step nearer to the attempt that was asked for, and whether that may start now."""
    request = gang.session.request
    here = gang.nodes.counts.free == run.nodes
    if request is None or gang.nodes[0].leaving:
        gang = gang if request is None else request_ended(gang, SAVED, "the environment is being stopped", now)
        return replace(gang, preflight=rounds.interrupted(gang.preflight)), False
    asker = gang.nodes[request.node]
    if request.interrupts:
        return request_ended(gang, INTERRUPTED, f"stopped before it started: {request.why}", now), False
    if asker.connected and asker.instance != request.instance:
        return request_ended(gang, FAILED, "the agent that took the request restarted", now), False
    if not here:
        return replace(gang, preflight=rounds.interrupted(gang.preflight)), False
    gang, passed = _checked(gang, run, now)
    return _looked(gang, run, now) if passed and gang.session.request is not None else (gang, False)


def _checked(gang: Gang, run: Run, now: float) -> tuple[Gang, bool]:
    """Make the preflight before the first run, and again once an agent is another one: each run would wait for torch's import."""
    instances = tuple(node.instance for node in gang.nodes)
    if gang.session.checked == instances:
        return gang, True
    gang = replace(gang, preflight=rounds.advance(gang.preflight, run, None, now))
    failure = rounds.preflight_failure(gang.preflight) if gang.preflight.failures else None
    if failure is not None:
        fresh = replace(gang, preflight=Preflight(round=gang.preflight.round, result=gang.preflight.result))
        return request_ended(fresh, CONFIGURATION, failure.message, now), False
    return (_with(gang, checked=instances), True) if gang.preflight.passed else (gang, False)


def _looked(gang: Gang, run: Run, now: float) -> tuple[Gang, bool]:
    request = gang.session.request
    assert request is not None  # noqa: S101 (the caller asked)
    if not request.looked_at:
        return _with(gang, request=replace(request, looked_at=now)), False
    problems = [answer.problem for _, answer in sorted(request.scripts, key=lambda item: item[0]) if answer.problem]
    silent = sorted(set(range(run.nodes)) - {node for node, _ in request.scripts})
    if silent and now < request.looked_at + LOOK_SECONDS:
        return gang, False
    problems += [f"node {silent[0]} did not say within {LOOK_SECONDS:.0f} s whether it has {request.asked.command[0]}"] if silent else []
    if problems:
        more = f"; nor can {number_of(len(problems) - 1, 'more node')} run it" if len(problems) > 1 else ""
        return request_ended(gang, CONFIGURATION, problems[0] + more, now), False
    return gang, True


def question(gang: Gang, node: int) -> Find | None:
    """Question for this node before the attempt."""
    request = gang.session.request
    if gang.phase is not Phase.WAITING or request is None or not request.looked_at or any(node == other for other, _ in request.scripts):
        return None
    return Find(request.asked.id, request.asked.command, request.asked.folder)


def older_scripts(request: Request) -> tuple[int, ...]:
    """Nodes whose script is another one than node 0's."""
    digests = {node: answer.digest for node, answer in request.scripts if answer.digest}
    return tuple(node for node, digest in sorted(digests.items()) if digest != digests.get(0, digest))


def request_started(gang: Gang) -> Gang:
    """The gang as the attempt starts. Whoever doesn't wait for its end hears so, and that is all they wait for."""
    request = gang.session.request
    if request is None:
        return gang
    gang = _with(gang, request=replace(request, started=True))
    text = f"{request.asked.text} runs as attempt {gang.attempt}; its output is in the log of node 0"
    return _answered(gang, request.node, Ended(request.asked.id, 0, text)) if request.asked.detached else gang


def interrupting(gang: Gang) -> StopMode | None:
    """Way to stop the ranks because whoever asked for them wants it; null: nobody does."""
    request = gang.session.request
    if request is None or not request.interrupts:
        return None
    return StopMode.SAVE if request.interrupts == 1 else StopMode.KILL


def request_stopped(gang: Gang, run: Run, now: float) -> tuple[Gang, str]:
    """The gang when no rank of the run is left, and the outcome for the record."""
    request = gang.session.request
    if request is None:
        return gang, "Stopped"
    if gang.stopping in (None, StopMode.KILL, StopMode.DUMP) and (has_failed(gang, run) or not request.interrupts):
        failure = first_failure(gang, run)
        code = failure.exit_code or 128 + getattr(signal, failure.signal or "", 0) if failure.exit_code or failure.signal else FAILED
        return request_ended(gang, code, with_stuck_nodes(f"{request.asked.text} failed: {failure.message}", gang, run), now), "Failed"
    code, why = (INTERRUPTED, request.why) if request.interrupts else (SAVED, gang.stop_reason)
    return request_ended(gang, code, with_stuck_nodes(f"{request.asked.text} was stopped: {why}", gang, run), now), "Stopped"


def request_completed(gang: Gang, now: float) -> Gang:
    """The gang after every rank ended well."""
    request = gang.session.request
    if request is None:
        return gang
    return request_ended(gang, 0, f"{request.asked.text} is done after {now - request.since:.0f} s", now)


def request_ended(gang: Gang, exit_code: int, message: str, now: float) -> Gang:
    """The gang once nothing runs any more; whoever waits for the end hears how it went."""
    request = gang.session.request
    assert request is not None  # noqa: S101 (only what was asked for can end)
    last = Ended(request.asked.id, exit_code, message)
    if not (request.asked.detached and request.started):
        gang = _answered(gang, request.node, last)
    return _with(gang, request=None, last=last, used_at=now)


def _answered(gang: Gang, node: int, answer: Ended) -> Gang:
    return _with(gang, answers=(*gang.session.answers, (node, answer)))


def _with(gang: Gang, **changes: object) -> Gang:
    return replace(gang, session=replace(gang.session, **changes))  # type: ignore[arg-type]


def with_idleness(gang: Gang, run: Run, now: float) -> Gang:
    """The gang with how long nobody has used it; of a job that is no dev environment nothing changes."""
    if run.interactive is None:
        return gang
    session = gang.session
    if session.request is not None or not session.used_at:
        session = replace(session, used_at=now)
    passed, limits = now - session.used_at, run.interactive
    if not limits.idle_seconds or passed < limits.warn_seconds:
        idleness = Idleness.NONE
    else:
        idleness = Idleness.OVER if passed >= limits.idle_seconds else Idleness.WARNED
    return replace(gang, session=replace(session, idleness=idleness))


def session_wake_at(gang: Gang, run: Run) -> float | None:
    """Time at which the session changes though nobody said anything: nodes must have looked for the script, or the idle time goes on; None:
    never.
    """
    request = gang.session.request
    if request is None:
        return _idle_wake_at(gang.session, run)
    waits = gang.phase is Phase.WAITING and request.looked_at and len(request.scripts) < len(gang.nodes)
    return request.looked_at + LOOK_SECONDS if waits else None


def _idle_wake_at(session: Session, run: Run) -> float | None:
    """Time of the warning, then of the release."""
    if run.interactive is None or not run.interactive.idle_seconds or session.idleness is Idleness.OVER:
        return None
    warned = session.idleness is Idleness.WARNED
    return session.used_at + (run.interactive.idle_seconds if warned else run.interactive.warn_seconds)


def idleness_line(session: Session, run: Run) -> str:
    """Line for the log, when the idleness has changed."""
    assert run.interactive is not None  # noqa: S101 (the caller asked)
    if session.idleness is Idleness.NONE:
        return "the environment is in use again"
    since = f"nobody has used the environment since {stamp(session.used_at)}"
    if session.idleness is Idleness.WARNED:
        return (
            f"{since}: its GPUs are released at {stamp(session.used_at + run.interactive.idle_seconds)}, unless somebody starts a run or"
            " uses a shell"
        )
    return f"{since}: its GPUs are released now; it comes back with: lockstep resume {run.job.name} -n {run.job.namespace}"


def interactive_report(gang: Gang, run: Run) -> InteractiveReport | None:
    """Report for the operator. Null: it is no dev environment."""
    if run.interactive is None:
        return None
    session, request = gang.session, gang.session.request
    ready = all(node.connected and not node.leaving for node in gang.nodes)
    if request is not None:
        return InteractiveReport(ready, request.asked.text[:RUN_TEXT], request.asked.by[:RUN_TEXT], stamp(request.since))
    release = stamp(session.used_at + run.interactive.idle_seconds) if session.idleness is not Idleness.NONE else None
    since = stamp(session.used_at) if release is not None else None  # each change of a job's status is a write
    return InteractiveReport(ready, idle_since=since, idleness=session.idleness, release=release)
