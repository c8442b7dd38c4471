"""Agents that nobody hears: what keeps them from it reaches the job's status by their last words."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.objects import Object
from lockstep.plan.observed import Observed
from lockstep.plan.pages.why import Where, why
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.reconcile import reconcile
from lockstep.plan.times import timestamp
from lockstep.plan.waiting.containers import CUT_OFF_HINTS
from lockstep_gang.agent.link import CutOff, Handlers, Link
from lockstep_gang.contract.report import NodeReport, State
from lockstep_gang.contract.run import JobIdentity, ReportTarget
from lockstep_gang.contract.trouble import Trouble, TroubleKind
from lockstep_gang.coordinator import network
from lockstep_gang.coordinator.network import resolved, trouble_of
from lockstep_gang.coordinator.reporter import Reporter
from lockstep_gang.lifecycle.gang import new_gang
from lockstep_gang.lifecycle.summary import summarize
from lockstep_spec.exits import UNREACHABLE
from unit.gang.cases import KEY, make_run
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, after, condition, pod, report, running

DNS = "the cluster's DNS doesn't answer: lockstep-operator.lockstep-system.svc, the name of the operator, can't be resolved"
ERRORS = [
    (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), TroubleKind.DNS),
    (socket.gaierror(socket.EAI_FAIL, "Non-recoverable failure in name resolution"), TroubleKind.DNS),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), TroubleKind.NAME),
    (TimeoutError(), TroubleKind.NETWORK),
    (OSError(errno.EHOSTUNREACH, "No route to host"), TroubleKind.NETWORK),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), TroubleKind.NETWORK),
    (ssl.SSLCertVerificationError(1, "certificate verify failed"), TroubleKind.REFUSED),
    (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
    (EOFError(), None),
]


@pytest.mark.parametrize(("error", "kind"), ERRORS, ids=repr)
def test_what_an_error_means_for_whoever_looks_after_the_cluster(error: Exception, kind: TroubleKind | None) -> None:
    trouble = trouble_of(error, "the-host", 8443, "the operator")
    assert (trouble.kind if trouble else None) is kind
    assert trouble is None or "the-host" in trouble.text


async def test_a_name_server_that_never_answers_is_dns_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.01)
    with pytest.raises(socket.gaierror) as raised:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lambda *args, **options: asyncio.sleep(60))
        await resolved("the-host", 1)
    trouble = trouble_of(raised.value, "the-host", 1, "node 0")
    assert trouble is not None and trouble.kind is TroubleKind.DNS


async def unresolvable(host: str, port: int) -> None:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


async def until_known(work: Any, look: Any) -> Trouble:
    task = asyncio.ensure_future(work)
    try:
        async with asyncio.timeout(20):
            while look() is None:  # noqa: ASYNC110 (it has no event)
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
    return look()


async def test_an_agent_and_a_coordinator_know_that_names_can_t_be_resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lockstep_gang.agent.link.resolved", unresolvable)
    monkeypatch.setattr("lockstep_gang.coordinator.reporter.resolved", unresolvable)
    run = make_run(report=ReportTarget("https://lockstep-operator.lockstep-system.svc:8443/v1/report", str(tmp_path / "token"), ""))
    nothing: Any = lambda *args: None  # noqa: E731
    link = Link(run, KEY, 1, Handlers(nothing, nothing, nothing, nothing))
    assert run.report is not None
    reporter = Reporter(run.report, KEY, nothing, nothing)
    reporter.transition(summarize(new_gang(run), run))
    of_agent, of_coordinator = (
        await until_known(link.run(), lambda: link.trouble),
        await until_known(reporter.run(), lambda: reporter.trouble),
    )
    assert (of_agent.kind, of_coordinator.kind) == (TroubleKind.DNS, TroubleKind.DNS)
    assert "node 0" in of_agent.text and "lockstep-operator.lockstep-system.svc, the name of the operator" in of_coordinator.text


def test_the_last_words_are_left_once_a_pod_for_each_kind_of_trouble(tmp_path: Path) -> None:
    last_words = tmp_path / "termination-log"
    trouble = Trouble(TroubleKind.DNS, "no answer\nfrom a name server")
    nowhere = CutOff(lambda: trouble, last_words, tmp_path)

    async def ends(cut_off: CutOff) -> bool:
        try:
            await asyncio.wait_for(cut_off.wait(0.0), 1.5)
        except TimeoutError:
            return False
        return True

    assert not asyncio.run(ends(nowhere)), "outside of pods nobody reads them"
    last_words.touch()
    assert asyncio.run(ends(CutOff(lambda: trouble, last_words, tmp_path)))
    assert last_words.read_text().startswith("DNSUnavailable: no answer") and "\n" not in last_words.read_text()
    assert not asyncio.run(ends(CutOff(lambda: trouble, last_words, tmp_path))), "the kubelet waits longer each time"
    other = Trouble(TroubleKind.NETWORK, "no way")
    assert asyncio.run(ends(CutOff(lambda: other, last_words, tmp_path)))


def ended(node: int, words: str, code: int = UNREACHABLE, **state: Any) -> Object:
    """A pod whose container was started again after it left these words."""
    last = {"terminated": {"exitCode": code, "reason": "Error", "message": words}}
    status = {"name": "trainer", "state": {"running": {}}, "lastState": last, "restartCount": 1, **state}
    return pod(node, status={"phase": "Running", "containerStatuses": [status]})


def unheard(words: str = f"DNSUnavailable: {DNS}") -> Observed:
    return replace(running(), pods=(ended(0, words), ended(1, words)))


def test_what_agents_left_is_the_job_s_state_its_event_and_in_why() -> None:
    plan = reconcile(unheard(), None, CONTEXT, NOW)
    status, reason, message = condition(plan, "Progressing")
    assert (status, reason) == ("False", "DNSUnavailable")
    assert message.startswith(f"2 of 2 pods run: pods x-0, x-1: {DNS}") and "k8s-app=kube-dns" in message
    assert [(note.type, note.reason) for note in plan.events if note.reason in CUT_OFF_HINTS] == [("Warning", "DNSUnavailable")]
    answer = why(after(unheard(), plan), (), NOW + 1)
    assert answer.state is Where.WAITING and DNS in answer.summary and not answer.is_well


def test_it_is_over_once_they_are_heard() -> None:
    said = report(State.WAITING, 0)
    plan = reconcile(unheard(), said, CONTEXT, NOW)
    assert condition(plan, "RanksReady")[1] == "WaitingForRanks"
    alone = replace(said, report=replace(said.report, nodes=(NodeReport(0, True, 0), NodeReport(1, False, 0))))
    away = replace(running(), pods=(pod(0), ended(1, "NetworkBlocked: node 0 at x-0:29400 can't be reached (no answer)")))
    plan = reconcile(away, alone, CONTEXT, NOW)
    assert condition(plan, "RanksReady")[:2] == ("False", "NetworkBlocked")
    assert "pod x-1: node 0 at x-0:29400 can't be reached" in condition(plan, "RanksReady")[2]
    assert "DNS" not in why(after(unheard(), reconcile(unheard(), said, CONTEXT, NOW)), (), NOW + 1).summary


@pytest.mark.parametrize(("seconds_later", "reason"), [(-20, "AllRanksReady"), (20, "DNSUnavailable")])
def test_an_operator_that_has_just_started_takes_words_for_over_that_are_older_than_the_ranks(seconds_later: int, reason: str) -> None:
    seen = unheard()
    seen = after(seen, reconcile(seen, report(), CONTEXT, NOW))
    for cut_off in seen.pods:
        cut_off["status"]["containerStatuses"][0]["lastState"]["terminated"]["finishedAt"] = timestamp(NOW + seconds_later)
    plan = reconcile(seen, None, CONTEXT, NOW + 30)
    assert condition(after(seen, plan), "RanksReady")[1] == reason
    assert (plan.status is None and plan.events == ()) == (seconds_later < 0)


@pytest.mark.parametrize("words", ["DNSUnavailable: x", "Other: x", ""])
def test_only_an_agent_s_own_end_is_taken_for_its_last_words(words: str) -> None:
    seen = replace(running(), pods=(ended(0, words, code=1), pod(1)))
    assert condition(reconcile(seen, None, CONTEXT, NOW), "RanksReady")[1] == "WaitingForReport"


def test_every_kind_of_trouble_is_a_reason_with_a_hint_where_to_look() -> None:
    assert {kind.value for kind in TroubleKind} == set(CUT_OFF_HINTS) <= {reason.value for reason in Reason}
    assert make_run().job == JobIdentity("x", "ns", "uid-1")


def test_the_end_of_a_container_s_log_says_why_it_failed() -> None:
    log = "\n".join(
        ["noise"] * 40 + ["Traceback (most recent call last):", "  File x", "ModuleNotFoundError: No module named 'lockstep_gang'"]
    )
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    seen = replace(running(), pods=(pod(0), ended(1, log, code=1, **waiting)))
    _, reason, message = condition(reconcile(seen, None, CONTEXT, NOW), "RanksReady")
    assert reason == "ContainerFailed" and "noise" not in message
    assert "pod x-1: container trainer exited with code 1: Traceback (most recent call last):; File x; ModuleNotFoundError" in message


@pytest.mark.parametrize(("in_pod", "named", "is_written"), [(True, False, True), (True, True, False), (False, False, False)])
def test_a_shell_in_a_pod_whose_user_has_no_name_has_a_prompt(
    in_pod: bool, named: bool, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep_gang.agent import main

    monkeypatch.setattr(main, "user_name", lambda: "ada" if named else str(os.getuid()))
    last_words = tmp_path / "termination-log"
    if in_pod:
        last_words.touch()
    main.name_the_prompt(tmp_path, last_words)
    assert (tmp_path / ".bashrc").exists() == is_written
    if is_written:
        shown = subprocess.run(
            ["bash", "--rcfile", str(tmp_path / ".bashrc"), "-i", "-c", 'echo "${PS1@P}"'], capture_output=True, text=True, check=False
        )
        assert shown.stdout.startswith("lockstep@") and "I have no name" not in shown.stdout
        (tmp_path / ".bashrc").write_text("mine")
        main.name_the_prompt(tmp_path, last_words)
        assert (tmp_path / ".bashrc").read_text() == "mine"


def test_last_words_have_a_thousand_characters(tmp_path: Path) -> None:
    (tmp_path / "last").touch()
    assert CutOff(lambda: None, tmp_path / "last", tmp_path)._leave(Trouble(TroubleKind.DNS, "x" * 5000))
    assert len((tmp_path / "last").read_text()) == 1000
