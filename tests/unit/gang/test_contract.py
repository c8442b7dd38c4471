"""The contract: JSON that readers and writers of different age share, the proof of the key, signatures with a counter."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.platforms.operator.authenticate import Refusal
from lockstep.platforms.operator.report_server import ReportServer
from lockstep_gang.contract.messages import (
    Error,
    Exited,
    Finish,
    Hello,
    RankExit,
    RankState,
    Start,
    Step,
    Stop,
    StopMode,
    agent_message,
    message_to_json,
    order,
    rank_report_from_json,
    rank_report_to_json,
)
from lockstep_gang.contract.proof import is_report_signature, parse_key, report_signature
from lockstep_gang.contract.reply import Fact, FactType, Reply, parse_reply, reply_json
from lockstep_gang.contract.report import (
    CheckpointReport,
    Failure,
    Metric,
    NodeReport,
    RankCount,
    Report,
    State,
    TrainerReport,
    parse_report,
    report_body,
    report_bytes_max,
)
from lockstep_gang.contract.run import ReportTarget, parse_run, run_text
from lockstep_spec.codec import ContractError, to_json
from lockstep_spec.handshake import Handshake, Opener, ProofError, Sealer, require_proof
from unit.gang.cases import KEY, make_run

REPORT = Report(
    job=make_run().job,
    pod="x-0",
    sequence=17,
    attempt=1,
    restarts=0,
    state=State.RUNNING,
    message="attempt 1 is running",
    nodes=(NodeReport(0, True, 1),),
    ranks=RankCount(2, 1),
    trainer=TrainerReport("Step", 3, 10, 5, (Metric("loss", "2.1"),)),
    checkpoint=CheckpointReport(3, "/workspace/runs/x/checkpoints/step-3.a1", "2026-01-01T00:00:00Z"),
    failure=Failure("rank 1 …", 1, 1, 1, None, "ValueError", ("boom",)),
    result={"adapter": "/workspace/runs/x/adapter"},
    log=("[rank 0] hello",),
)


def run_value(**changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = to_json(
        make_run(report=ReportTarget("https://o/v1/report", "pem", "/token"), training={"data": {"path": "/d"}})
    )
    return value | changes


def test_a_run_comes_back_as_it_was_written() -> None:
    run = make_run(report=ReportTarget("https://o/v1/report", "pem", "/token"), training={"any": ["thing", 1]}, environment={"A": "ü\n"})
    assert parse_run(run_text(run)) == run


def test_the_same_run_has_the_same_bytes() -> None:
    assert run_text(make_run()) == run_text(parse_run(run_text(make_run())))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": "two"}, 'run.json.nodes is "two", but must be a whole number ≥ 1'),
        ({"nodes": True}, "run.json.nodes is true, but must be a whole number ≥ 1"),
        ({"nodeMicroBatches": [4]}, "run.json: nodeMicroBatches is [4], but must be empty, or a list of 2, one for every node"),
        ({"nodes": 3}, "run.json: addresses is 2, but must be a list of 3, one for every node"),
        ({"ranksPerNode": 0}, "run.json.ranksPerNode is 0, but must be a whole number ≥ 1"),
        ({"masterPort": 70000}, "run.json.masterPort is 70000, but must be a port, 1 to 65535"),
        ({"command": []}, "run.json: command is empty, but must be the argument list of a rank"),
        ({"addresses": ["a", 1]}, "run.json.addresses[1] is 1, but must be text"),
        ({"whenDone": 1}, "run.json.whenDone is 1, but must be one of Wait, Exit"),
        ({"report": {"url": "https://o", "caPem": "pem"}}, "run.json.report.tokenFile is missing"),
        ({"format": "lockstep-run/9"}, "run.json: format is lockstep-run/9, but must be lockstep-run/1"),
    ],
)
def test_a_wrong_run_is_refused_with_a_sentence_that_says_where(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ContractError) as caught:
        parse_run(json.dumps(run_value(**change)))
    assert str(caught.value).startswith(sentence)


def test_a_report_comes_back_as_it_was_sent() -> None:
    assert parse_report(report_body(REPORT)) == REPORT


def of_a_newer_version(value: Any) -> Any:
    """The same with a key more in every object."""
    if isinstance(value, list):
        return [of_a_newer_version(item) for item in value]
    return {**{key: of_a_newer_version(item) for key, item in value.items()}, "fromTheFuture": [1]} if isinstance(value, dict) else value


def test_what_a_newer_version_wrote_is_read_without_the_keys_that_are_not_known() -> None:
    assert parse_report(json.dumps(of_a_newer_version({**to_json(REPORT), "result": None})).encode()) == replace(REPORT, result=None)
    run = make_run(report=ReportTarget("https://o/v1/report", "pem", "/token"))
    assert parse_run(json.dumps({**to_json(run), "report": of_a_newer_version(to_json(run.report)), "fromTheFuture": 1})) == run
    step = {"event": "step", "rank": 0, "step": 3, "fromTheFuture": 1}
    assert rank_report_from_json(step) == Step(0, 3)


@pytest.mark.parametrize("change", [{"attempt": "1"}, {"state": 1}, {"ranks": {"desired": 2}}, {"format": "lockstep-report/9"}])
def test_a_report_whose_known_keys_are_malformed_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=rf"report\.{next(iter(change))}"):
        parse_report(json.dumps(of_a_newer_version(to_json(REPORT) | {"result": None} | change)).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b"{}"])
def test_a_body_that_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError):
        parse_report(body)


def test_a_report_signature_fits_its_key_and_its_body_only() -> None:
    signature = report_signature(KEY, b"body")
    assert is_report_signature(KEY, b"body", signature)
    assert not is_report_signature(KEY, b"body!", signature)
    assert not is_report_signature(b"1" * 32, b"body", signature)
    assert not is_report_signature(KEY, b"body", "ü")


LINE = "\U0001f600" * 1000
"""4 bytes a character."""


@pytest.mark.parametrize(
    "large",
    [
        {"log": (LINE,) * 100},
        {"failure": Failure("m" * 1000, last_lines=(LINE,) * 20), "log": (LINE,) * 100},
        {"message": "m" * 10**6},
        {"trainer": TrainerReport(metrics=tuple(Metric(f"m{number}", "1") for number in range(10_000)))},
        {"result": {f"r{number}": "1" for number in range(20_000)}, "log": ("x",)},
    ],
    ids=["log", "last lines", "message", "metrics", "result"],
)
def test_a_report_is_cut_to_what_the_operator_takes(large: dict[str, Any]) -> None:
    """What says how the job is stays whole."""
    report = replace(REPORT, **large)
    limit = report_bytes_max(len(report.nodes))
    assert len(json.dumps(to_json(report), ensure_ascii=False).encode()) > limit
    body = report_body(report)
    assert len(body) <= limit
    read = parse_report(body)
    assert (read.job, read.state, read.sequence, read.nodes, read.ranks) == (
        report.job,
        report.state,
        report.sequence,
        report.nodes,
        report.ranks,
    )


def test_the_newest_last_lines_stay() -> None:
    lines = tuple(f"{number} {'x' * 900}" for number in range(300))
    log = parse_report(report_body(replace(REPORT, log=lines))).log
    assert 50 < len(log) < 150
    assert log == lines[-len(log) :]


def test_the_largest_gang_fits() -> None:
    nodes = tuple(NodeReport(number, False, 64) for number in range(1024))
    last_lines = ("x" * 1000,) * 20
    report = replace(
        REPORT, nodes=nodes, order=tuple(range(1024)), failure=Failure("m" * 1000, last_lines=last_lines), log=("x" * 500,) * 100
    )
    assert parse_report(report_body(report)) == report


def test_a_reply_of_a_newer_operator_is_read_as_far_as_it_is_known() -> None:
    assert parse_reply(b'{"orders": [{"type": "Fly"}], "facts": [1], "racks": ["a"], "more": {}}') == Reply(racks=("a",))


def test_facts_come_back_as_they_were_told_and_unknown_ones_are_left_out() -> None:
    fact = Fact(FactType.NODE_LOST, 1, "x-1", "NotReady", "node b is NotReady", "uid-1", "b", "2026-01-01T00:00:00Z")
    sent = reply_json(Reply((fact,)))
    sent["facts"] += [{"type": "Levitated", "node": 0}, {"type": "Evicted", "node": "0"}, {**sent["facts"][0], "more": {}}]
    assert parse_reply(json.dumps(sent).encode()) == Reply((fact, fact))


def test_of_each_text_of_a_reply_256_characters_are_read() -> None:
    long, texts = "x" * 257, ("pod", "reason", "message", "podUid", "nodeName")
    sent = {"facts": [{"type": "Evicted", "node": 0, **dict.fromkeys(texts, long)}], "racks": [long]}
    reply = parse_reply(json.dumps(sent).encode())
    (fact,) = reply.facts
    assert {fact.pod, fact.reason, fact.message, fact.pod_uid, fact.node_name, *reply.racks} == {"x" * 256}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"facts": 1}', b'{"racks": 1}'])
def test_what_is_no_reply_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError):
        parse_reply(body)


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "abc", 2, 2, (RankState(1, True, RankExit(1, None, "SIGKILL", False, Error(1, "E", "m", ("t",)), ("last",))),)),
        Exited(1, RankExit(0, 3, None, True)),
    ],
)
def test_a_message_of_an_agent_comes_back_as_it_was_sent(message: Hello | Exited) -> None:
    assert agent_message(json.loads(json.dumps(message_to_json(message)))) == message


@pytest.mark.parametrize("given", [Start(1, 0, "10.0.0.1", 29500), Stop(1, StopMode.SAVE, "why"), Finish(State.FAILED, "why")])
def test_an_order_comes_back_as_it_was_given(given: Start | Stop | Finish) -> None:
    assert order(json.loads(json.dumps(message_to_json(given)))) == given


def test_an_agent_cannot_give_orders() -> None:
    with pytest.raises(ContractError):
        agent_message(message_to_json(Start(1, 0, "a", 1)))


def test_a_rank_report_says_by_its_event_what_it_is() -> None:
    step = rank_report_from_json({"rank": 0, "event": "step", "step": 12, "totalSteps": 120, "metrics": {"loss": "2.2"}})
    assert step == Step(0, 12, 120, metrics={"loss": "2.2"})
    assert rank_report_to_json(step)["event"] == "step"


@pytest.mark.parametrize(
    "value", [{}, [], {"rank": 0, "event": "dance"}, {"rank": 0, "event": "step", "step": 1.5}, {"rank": "0", "event": "end"}]
)
def test_a_malformed_rank_report_is_refused(value: object) -> None:
    with pytest.raises(ContractError):
        rank_report_from_json(value)


@pytest.mark.parametrize("counts", [{"totalSteps": -1}, {"step": -1}, {"step": 2**63}, {"estimatedRemainingSeconds": -5}], ids=str)
def test_a_count_that_is_none_is_refused_by_name(counts: dict[str, int]) -> None:
    (name,) = counts
    with pytest.raises(ContractError, match=rf"^rank report step\.{name} is -?\d+, but must be a whole number from 0"):
        rank_report_from_json({"rank": 0, "event": "step", "step": 1, **counts})


@pytest.mark.parametrize("text", ["", "5a" * 31, "zz" * 32, "5a" * 33])
def test_a_key_that_is_not_64_digits_is_refused(text: str) -> None:
    with pytest.raises(ContractError, match="64 hexadecimal digits"):
        parse_key(text)


def test_the_key_is_read_with_its_line_end() -> None:
    assert parse_key("5a" * 32 + "\n") == KEY


def sealed(*messages: dict[str, Any]) -> list[bytes]:
    sealer = Sealer(KEY)
    return [sealer.seal(message) for message in messages]


def test_signed_messages_are_taken_in_order() -> None:
    opener = Opener(KEY)
    assert [opener.open(line) for line in sealed({"a": 1}, {"b": "ü"})] == [{"a": 1}, {"b": "ü"}]


def test_a_replayed_message_is_refused() -> None:
    opener, (line,) = Opener(KEY), sealed({"a": 1})
    opener.open(line)
    with pytest.raises(ProofError, match="repeated, lost or out of order"):
        opener.open(line)


def test_a_message_that_came_too_early_is_refused() -> None:
    with pytest.raises(ProofError, match="repeated, lost or out of order"):
        Opener(KEY).open(sealed({"a": 1}, {"b": 2})[1])


def test_a_message_under_another_key_is_refused() -> None:
    with pytest.raises(ProofError, match="does not fit this job's key"):
        Opener(b"1" * 32).open(sealed({"a": 1})[0])


@pytest.mark.parametrize(
    "change", [{"message": {"a": 2}}, {"signature": "00"}, {"signature": None}, {"counter": True}, {"message": "text"}]
)
def test_a_tampered_message_is_refused(change: dict[str, Any]) -> None:
    line = json.dumps(json.loads(sealed({"a": 1})[0]) | change).encode()
    with pytest.raises(ProofError):
        Opener(KEY).open(line)


@pytest.mark.parametrize("line", [b"", b"[1]\n", b"nonsense\n", b"[" * 100_000])
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ContractError):
        Opener(KEY).open(line)


def test_a_connection_s_messages_mean_nothing_in_another_one_or_in_the_other_direction() -> None:
    here, there = Handshake(KEY, "uid", 1, "n1", "n2"), Handshake(KEY, "uid", 1, "n1", "n3")
    line = Sealer(here.to_coordinator()).seal({"a": 1})
    for key in (there.to_coordinator(), here.to_agent()):
        with pytest.raises(ProofError):
            Opener(key).open(line)


@pytest.mark.parametrize(
    "other", [Handshake(b"1" * 32, "uid", 1, "a", "b"), Handshake(KEY, "other", 1, "a", "b"), Handshake(KEY, "uid", 0, "a", "b")]
)
def test_a_proof_holds_for_one_key_one_job_and_one_node(other: Handshake) -> None:
    require_proof(other.agent_proof(), other.agent_proof())
    with pytest.raises(ProofError):
        require_proof(Handshake(KEY, "uid", 1, "a", "b").agent_proof(), other.agent_proof())


def test_nothing_is_read_of_a_report_that_names_no_job() -> None:
    request: Any = SimpleNamespace(headers={}, content=None)
    nothing: Any = None
    with pytest.raises(Refusal, match="is missing"):
        asyncio.run(ReportServer(b"", nothing, nothing, nothing)._read(request))
