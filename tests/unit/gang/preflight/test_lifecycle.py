"""The rounds of a preflight, by their transitions: answers in, questions and what follows out. No process, no clock."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.agent.preflight import answers as node_answers
from lockstep_gang.contract.fabric import FabricAsked
from lockstep_gang.contract.messages import Exited, FabricSeen, RankExit, Start, Started, Stopped
from lockstep_gang.contract.placewords import IN_PODS
from lockstep_gang.contract.preflight import (
    AllReduce,
    Check,
    Checked,
    DeviceResult,
    Expected,
    ExpectedPath,
    ExpectedRdma,
    GpuFacts,
    HcaFacts,
    Kind,
    Looked,
    Measured,
    Met,
    PathFact,
    RdmaFacts,
    SelfTest,
    SelfTestResult,
    Stage,
)
from lockstep_gang.contract.report import Cause, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.gang import Phase
from lockstep_gang.lifecycle.preflight.rounds import neighbors
from lockstep_spec.choices import Severity
from unit.gang.cases import KEY, make_run
from unit.gang.fabric.cases import read
from unit.gang.story import Story, all_stopped, failed_before, hello

PATIENCE_SECONDS = 120.0

LOOKED = Looked(port=4000, versions={"python": "3", "torch": "2"})
FAST = AllReduce(10**9)


def begun(nodes: int = 2, expected: Expected | None = None, **changes: Any) -> Story:
    """All nodes are here, and have been asked to look."""
    story = Story(make_run(nodes=nodes, preflight=expected or Expected(), **changes))
    for node in range(nodes):
        story.hears(node, hello(node))
    return story


def asked(story: Story) -> dict[int, Check]:
    """The question that each node has now."""
    return {node: state.last_order for node, state in enumerate(story.gang.nodes) if isinstance(state.last_order, Check)}


def answers(story: Story, **parts: Any) -> Story:
    """Every node that is asked answers with these parts."""
    for node, check in asked(story).items():
        if check.round == story.gang.preflight.round:
            story.hears(node, Checked(check.round, **parts))
    return story


def looked_and_met(story: Story, looked: Looked = LOOKED) -> Story:
    now = round(story.now * 1000)
    return answers(answers(story, looked=replace(looked, received_ms=now, sent_ms=now)), met=Met())


def told_stages(story: Story) -> set[Stage]:
    return {order.stage for _, order in story.orders if isinstance(order, Check)}


def test_every_node_looks_then_meets_the_others_then_ranks_start() -> None:
    story = begun()
    assert told_stages(story) == {Stage.LOOK}
    assert story.report.message == "preflight: checking every node"
    answers(story, looked=LOOKED)
    assert [order.peers[0].port for _, order in story.orders if isinstance(order, Check)] == [4000, 4000]
    answers(story, met=Met())
    assert [type(order) for _, order in story.orders] == [Start, Start]
    assert (story.report.attempt, story.records) == (1, ["begin"])
    assert story.report.preflight.ok


def test_what_preflight_doubted_is_the_reason_where_ranks_then_use_sockets() -> None:
    nics = tuple(
        HcaFacts(f"mlx5_{number}", 1, state, "InfiniBand", "400 Gb/sec (4X NDR)") for number, state in enumerate(("ACTIVE", "DOWN"))
    )
    looked = replace(LOOKED, rdma=RdmaFacts(nics, has_ipc_lock=True), gpus=GpuFacts(2))
    gpus: dict[str, Any] = {"ranks_per_node": 2, "gpus_per_node": 2, "fabric": FabricAsked("RDMA")}
    story = looked_and_met(begun(expected=Expected(rdma=ExpectedRdma(count=2)), **gpus), looked)
    (doubt,) = story.report.preflight.findings
    assert (doubt.severity, doubt.check) == (Severity.WARNING, "hcas")
    for node in range(2):
        ranks = tuple(replace(read("2.18-sockets-no-libibverbs", 0), rank=rank) for rank in (2 * node, 2 * node + 1))
        story.hears(node, FabricSeen(story.gang.attempt, ranks))
    assert story.report.fabric.message.endswith(f"; preflight warned: {doubt.message}")


def test_an_error_spends_no_attempt_and_the_preflight_is_made_again() -> None:
    story = begun()
    looked_and_met(story, replace(LOOKED, unresolved={"x-1": "Name or service not known"}))
    assert (story.gang.phase, story.gang.attempt, story.orders) == (Phase.WAITING, 0, [])
    assert story.report.message.startswith("preflight failed and runs again soon: preflight: node 0")
    assert story.wake_at == story.now + 2.0
    story.waits(2.0)
    assert told_stages(story) == {Stage.LOOK}
    assert looked_and_met(story).report.attempt == 1


def test_what_does_not_go_away_fails_the_job_after_two_minutes() -> None:
    story = begun()
    wrong = replace(LOOKED, unresolved={"x-1": "Name or service not known"})
    waited = 0.0
    while story.gang.phase is not Phase.ENDED:
        looked_and_met(story, wrong)
        assert waited <= PATIENCE_SECONDS + 30.0
        if story.wake_at is not None:
            waited += story.wake_at - story.now
            story.waits(story.wake_at - story.now)
    assert waited >= PATIENCE_SECONDS
    assert (story.report.state, story.report.failure.cause, story.report.attempt) == (State.FAILED, Cause.SETUP, 0)


def test_what_waiting_can_t_help_fails_the_job_at_once() -> None:
    story = begun(expected=Expected(paths=(ExpectedPath("spec.script.path", "a.py", Kind.FILE),)))
    looked_and_met(story, replace(LOOKED, paths=(PathFact("a.py"),)))
    assert (story.report.state, story.records) == (State.FAILED, ["end"])
    assert story.report.failure.cause is Cause.CONFIGURATION


def test_a_node_that_does_not_answer_is_named_at_the_deadline() -> None:
    story = begun()
    story.hears(0, Checked(story.gang.preflight.round, looked=LOOKED))
    assert story.wake_at == story.now + 15.0
    story.waits(15.0)
    (finding,) = story.report.preflight.findings
    assert (finding.check, finding.node, finding.message) == ("answer", 1, "node 1 did not answer in 15 s")


def test_a_node_that_can_not_make_threads_for_its_checks_says_so_at_once() -> None:
    story = begun()
    story.hears(0, Checked(story.gang.preflight.round, looked=LOOKED))
    why = "RuntimeError: can't start new thread (pids.max of its cgroup is 64)"
    story.hears(1, Checked(story.gang.preflight.round, failed=why))
    (finding,) = story.report.preflight.findings
    assert (finding.check, finding.node, finding.message) == ("answer", 1, f"node 1 can't make its checks: {why}")
    assert finding.fix == IN_PODS.more_processes


async def test_an_agent_without_threads_answers_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(work: object, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(node_answers, "in_thread", refused)
    sent: list[Checked] = []
    answered = asyncio.Event()
    node = node_answers.NodePreflight(make_run(), KEY, 1, lambda checked: (sent.append(checked), answered.set()))
    node.take(Check(1, Stage.LOOK, token="x"))
    await answered.wait()
    node.end()
    assert sent[0].failed.startswith("RuntimeError: can't start new thread")


def test_an_answer_to_an_earlier_question_changes_nothing() -> None:
    story = begun()
    before = story.gang.preflight
    story.hears(0, Checked(before.round - 1, looked=LOOKED))
    assert story.gang.preflight == before


def test_a_node_that_leaves_voids_what_was_asked() -> None:
    story = begun()
    answers(story, looked=LOOKED)
    first = story.gang.preflight.round
    story.loses(1)
    assert story.gang.preflight.stage is None
    story.hears(1, hello(1, instance="another"))
    assert told_stages(story) == {Stage.LOOK}
    assert story.gang.preflight.round > first


def test_a_question_is_asked_again_on_a_new_connection_of_the_same_agent() -> None:
    story = begun()
    question = asked(story)[1]
    story.hears(1, hello(1))
    assert story.orders == [(1, question)]


def failed(cause: str, code: int = 1, **changes: Any) -> Story:
    """An attempt that had an all-reduce before it failed, and all nodes are ready for the next one."""
    story = looked_and_met(begun(3, Expected(all_reduce=FAST), **changes))
    answers(story, measured=Measured(1000, 3, 10**9, port=1))
    assert story.gang.attempt == 1
    for node in range(3):
        story.hears(node, Started(1))
    line = {"UserCode": "ValueError: no", "Fabric": "ncclSystemError: gone"}[cause]
    story.hears(1, Exited(1, RankExit(1, code, None, ordered=False, last_lines=(line,))))
    return looked_and_met(all_stopped(story).waits(1.0))


@pytest.mark.parametrize(("cause", "stages"), [("UserCode", set()), ("Fabric", {Stage.ALL_REDUCE})])
def test_a_restart_measures_again_only_after_trouble_with_network_or_nodes(cause: str, stages: set[Stage]) -> None:
    story = failed(cause, restart=RestartPolicy(3, 0))
    assert told_stages(story) == stages


def test_one_all_reduce_over_all_nodes_is_enough_when_it_is_fast() -> None:
    story = looked_and_met(begun(4, Expected(all_reduce=FAST)))
    assert {order.group.nodes for _, order in story.orders if isinstance(order, Check) and order.group} == {(0, 1, 2, 3)}
    answers(story, measured=Measured(1_000_000, 4, 10**9, port=5000))
    assert story.report.attempt == 1
    assert story.report.preflight.all_reduce.bytes_per_second == 1_500_000_000


def measured(story: Story, slow: int) -> Story:
    """Every group is measured; one with the slow node has a tenth of the speed that is asked for."""
    for node, check in asked(story).items():
        if check.group is not None and check.round == story.gang.preflight.round:
            seconds = 20 if slow in check.group.nodes else 1
            story.hears(node, Checked(check.round, measured=Measured(seconds * 10**6, len(check.group.nodes), 2 * 10**9, port=5000 + node)))
    return story


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_slow_node_is_found_by_pairs_and_left_out(nodes: int) -> None:
    story = looked_and_met(begun(nodes, Expected(all_reduce=FAST)))
    rounds = 0
    while story.gang.preflight.stage is not None:
        measured(story, slow=1)
        rounds += 1
    (finding,) = story.report.preflight.findings
    assert (finding.node, finding.excludes, rounds <= 4) == (1, True, True)
    assert story.report.attempt == 0


def test_pairs_meet_at_the_port_that_the_first_of_them_said_is_free() -> None:
    story = measured(looked_and_met(begun(4, Expected(all_reduce=FAST))), slow=1)
    assert {order.group.nodes: order.group.master_port for _, order in story.orders if isinstance(order, Check) and order.group} == {
        (0, 1): 5000, (2, 3): 5002,
    }  # fmt: skip


def test_an_all_reduce_that_hangs_ends_at_its_deadline_and_is_told_with_where_it_was() -> None:
    story = looked_and_met(begun(2, Expected(all_reduce=FAST)))
    story.hears(0, Checked(story.gang.preflight.round, measured=Measured(error="not done after 60 s, in: rendezvous")))
    assert story.wake_at == story.now + 70.0
    story.waits(70.0)
    assert "node 1 did not answer in 70 s" in story.report.preflight.findings[0].message


@pytest.mark.parametrize("lost", [
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711",
])  # fmt: skip
def test_a_node_that_has_lost_its_peer_in_an_all_reduce_is_not_named_though_it_is_heard_first(lost: str) -> None:
    story = looked_and_met(begun(2, Expected(all_reduce=FAST)))
    for node, error in ((0, lost), (1, "ZeroDivisionError: division by zero")):
        story.hears(node, Checked(story.gang.preflight.round, measured=Measured(error=error)))
    assert "on node 1: ZeroDivisionError: division by zero" in story.report.preflight.findings[0].message


@pytest.mark.parametrize(
    ("expected", "left_out"), [(Expected(all_reduce=FAST), "all-reduce"), (Expected(self_test=SelfTest()), "self-test")]
)
def test_where_a_node_has_no_torch_it_is_not_measured_and_ranks_start_with_a_warning(expected: Expected, left_out: str) -> None:
    story = looked_and_met(begun(2, expected), replace(LOOKED, versions={"python": "3"}))
    assert story.report.attempt == 1
    assert [f.message for f in story.report.preflight.findings] == [f"node 0 has no torch: the {left_out} was left out"]


TESTED = SelfTestResult((DeviceResult(0, flops=10**12, precision="BF16"),))


def test_devices_are_tested_after_the_nodes_have_met_and_before_the_all_reduce() -> None:
    story = looked_and_met(begun(2, Expected(all_reduce=FAST, self_test=SelfTest("BF16"))))  # on CPUs, which any torch has code for
    assert told_stages(story) == {Stage.SELF_TEST}
    assert story.report.message == "preflight: testing every device"
    assert story.wake_at == story.now + 70.0
    answers(story, tested=TESTED)
    assert told_stages(story) == {Stage.ALL_REDUCE}
    answers(story, measured=Measured(1000, 2, 10**9, port=1))
    assert story.report.attempt == 1
    assert story.report.preflight.checks[-3:] == ("clock", "selfTest", "allReduce")
    assert (story.report.preflight.self_test.devices, story.report.preflight.self_test.slowest) == (2, 10**12)


@pytest.mark.parametrize(("only", "changes", "attempt"), [(False, {}, 1), (True, {}, None), (False, {"rack_grouped": True}, None)])
def test_the_ranks_of_the_attempt_that_follows_may_import_where_it_is_known_who_they_are(
    only: bool, changes: dict[str, Any], attempt: int | None
) -> None:
    story = looked_and_met(begun(2, Expected(self_test=SelfTest(), only=only), **changes))
    assert {order.attempt for _, order in story.orders if isinstance(order, Check)} == {attempt}


def test_a_device_that_computes_wrong_starts_no_rank() -> None:
    story = looked_and_met(begun(2, Expected(self_test=SelfTest()), gpus_per_node=1), replace(LOOKED, gpus=GpuFacts(1)))
    wrong = SelfTestResult((DeviceResult(0, "GPU-1", wrong=3, elements=9, flops=1),))
    for node, check in asked(story).items():
        story.hears(node, Checked(check.round, tested=wrong if node == 1 else TESTED))
    (finding,) = story.report.preflight.findings
    assert (finding.check, finding.node, finding.excludes, story.report.attempt) == ("selfTest", 1, True, 0)
    assert story.report.preflight.checks[-2:] == ("selfTest", "torchBuild")
    assert story.report.message.startswith("preflight failed and runs again soon: preflight: GPU 0 (GPU-1) of node 1")


def test_a_node_that_does_not_end_its_self_test_is_named_at_the_deadline() -> None:
    story = looked_and_met(begun(2, Expected(self_test=SelfTest())))
    story.hears(0, Checked(story.gang.preflight.round, tested=TESTED))
    story.waits(70.0)
    (finding,) = story.report.preflight.findings
    assert (finding.check, finding.node, finding.message) == ("answer", 1, "node 1 did not answer in 70 s")


@pytest.mark.parametrize(
    ("line", "anew"), [("ValueError: no", False), ("RuntimeError: CUDA error: uncorrectable ECC error encountered", True)]
)
def test_a_restart_tests_anew_only_after_trouble_with_devices(line: str, anew: bool) -> None:
    story = answers(looked_and_met(begun(2, Expected(self_test=SelfTest()), restart=RestartPolicy(3, 0))), tested=TESTED)
    assert [order.anew for _, order in story.orders if isinstance(order, Check)] == []
    for node in range(2):
        story.hears(node, Started(1))
    story.hears(1, Exited(1, RankExit(1, 1, None, ordered=False, last_lines=(line,))))
    looked_and_met(all_stopped(story).waits(1.0))
    assert {order.anew for _, order in story.orders if isinstance(order, Check)} == {anew}


def test_preflight_alone_ends_the_job_and_records_nothing() -> None:
    story = looked_and_met(begun(expected=Expected(only=True)))
    assert (story.report.state, story.report.attempt, story.records) == (State.COMPLETE, 0, [])


def test_of_many_nodes_each_meets_a_few_and_is_met_by_as_many() -> None:
    assert neighbors(0, 2) == (1,)
    assert neighbors(1, 4) == (0, 2, 3)
    met = [other for node in range(1024) for other in neighbors(node, 1024)]
    assert {met.count(node) for node in (0, 1, 511, 1023)} == {10}


def test_after_a_failure_it_is_made_within_the_backoff_and_not_at_its_beginning() -> None:
    """So that it adds nothing to the time without training, and tells how nodes are by then."""
    story = failed_before(looked_and_met(begun(restart=RestartPolicy(2, 60))))
    story.hears(0, Started(1), Exited(1, RankExit(0, 1, None, ordered=False)), Stopped(1)).hears(1, Stopped(1))
    assert (story.report.message.startswith("attempt 2 starts soon"), asked(story.waits(54))) == (True, {})
    assert told_stages(story.waits(1)) == {Stage.LOOK}
    assert story.report.message.startswith("attempt 2 starts soon")
    assert looked_and_met(story).orders == []
    assert [type(order) for _, order in story.waits(5).orders] == [Start, Start]


def test_a_restart_that_does_not_wait_begins_with_it() -> None:
    story = looked_and_met(begun(restart=RestartPolicy(1, 60)))
    story.hears(0, Started(1), Exited(1, RankExit(0, 1, None, ordered=False)), Stopped(1)).hears(1, Stopped(1))
    assert (story.report.message.startswith("attempt 2 starts soon"), told_stages(story)) == (True, {Stage.LOOK})
    assert [type(order) for _, order in looked_and_met(story).orders] == [Start, Start]


def test_one_that_fails_within_the_backoff_delays_the_start() -> None:
    story = failed_before(looked_and_met(begun(restart=RestartPolicy(2, 60))))
    story.hears(0, Started(1), Exited(1, RankExit(0, 1, None, ordered=False)), Stopped(1)).hears(1, Stopped(1))
    answers(answers(story.waits(55), looked=LOOKED), met=Met({"1": "refused"}))
    assert story.report.message.startswith("preflight failed and runs again soon")
    assert [type(order) for _, order in story.waits(5).orders] == [Check, Check]


def test_of_thirty_errors_a_report_has_twenty_and_says_how_many_it_leaves_out() -> None:
    report = looked_and_met(begun(30), replace(LOOKED, unresolved={"x-1": "Name or service not known"})).report.preflight
    assert (len(report.findings), report.omitted) == (20, 10)
