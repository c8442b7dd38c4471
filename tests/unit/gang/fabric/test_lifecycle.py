"""The fabric in the life of a gang: told once, refused where the policy says so, and named in failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep_gang.contract.fabric import FabricAsked, FabricReason, RankFabric, Verified
from lockstep_gang.contract.messages import Error, FabricSeen, Step, Stop, StopMode
from lockstep_gang.contract.report import Cause, Failure, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.coordinator.log_lines import log_lines
from lockstep_gang.lifecycle.fabric.state import hang_explained_by_nccl
from lockstep_gang.lifecycle.gang import Phase
from lockstep_spec.choices import DegradedPolicy
from unit.gang.fabric.cases import read
from unit.gang.story import Story, all_stopped, started

SETTLE_SECONDS = 10.0
STEPS_SECONDS = 15.0

RDMA = FabricAsked("RDMA")
FAIL = FabricAsked("RDMA", degraded_policy=DegradedPolicy.FAIL)
SENTENCE = "asked for RDMA, ranks 2–3 on node 1 use sockets (enp1s0): libibverbs could not be opened"


def gpu_story(asked: FabricAsked = RDMA, **changes: Any) -> Story:
    return started(nodes=2, ranks_per_node=2, gpus_per_node=2, fabric=asked, restart=RestartPolicy(3, 0), **changes)


def logs(story: Story, node: int, name: str, **changes: Any) -> Story:
    """Node `node` says that all its ranks' logs are this file of tests/fabric_logs."""
    per_node = story.run.ranks_per_node
    ranks = tuple(replace(read(name, rank), **changes) for rank in range(node * per_node, (node + 1) * per_node))
    return story.hears(node, FabricSeen(story.gang.attempt, ranks))


def told(story: Story) -> Any:
    return story.report.fabric


def test_the_fabric_is_verified_when_every_node_has_been_heard() -> None:
    story = logs(gpu_story(), 0, "2.18-ib-peermem")
    assert (told(story).verified, told(story).reason) == (Verified.UNKNOWN, FabricReason.WAITING)
    logs(story, 1, "2.18-ib-peermem")
    assert (told(story).verified, told(story).ranks_heard) == (Verified.TRUE, 4)


def test_a_bad_fabric_is_told_once_all_ranks_have_been_heard_so_that_its_sentence_names_all() -> None:
    story = logs(gpu_story(), 1, "2.18-sockets-no-libibverbs")
    assert told(story).reason is FabricReason.WAITING
    logs(story, 0, "2.18-ib-peermem")
    assert (told(story).verified, told(story).message) == (Verified.FALSE, SENTENCE)


def test_a_bad_fabric_is_told_after_a_while_even_if_other_ranks_stay_silent() -> None:
    story = logs(gpu_story(), 1, "2.18-sockets-no-libibverbs")
    assert story.wake_at == story.now + SETTLE_SECONDS
    story.waits(SETTLE_SECONDS)
    assert (told(story).verified, told(story).message) == (Verified.FALSE, SENTENCE)
    assert story.wake_at is None


def test_a_large_gang_is_judged_at_times_and_misses_nothing() -> None:
    story = started(nodes=2, ranks_per_node=64, gpus_per_node=64, fabric=RDMA)
    story.waits(1)
    logs(story, 0, "2.18-ib-peermem")
    logs(story, 1, "2.18-sockets-no-libibverbs")
    assert told(story).reason is FabricReason.WAITING
    assert story.wake_at == story.now + 0.064
    story.waits(0.064)
    assert told(story).message == "asked for RDMA, ranks 64–127 on node 1 use sockets (enp1s0): libibverbs could not be opened"
    assert story.wake_at is None


def test_warn_goes_on() -> None:
    story = logs(logs(gpu_story(), 1, "2.18-sockets-no-libibverbs"), 0, "2.18-ib-peermem")
    assert story.gang.phase is Phase.ACTIVE


def test_fail_ends_the_job_with_the_sentence_and_without_a_restart() -> None:
    story = logs(logs(gpu_story(FAIL), 1, "2.18-sockets-no-libibverbs"), 0, "2.18-ib-peermem")
    assert story.orders == [(node, Stop(1, StopMode.KILL, SENTENCE)) for node in (0, 1)]
    all_stopped(story)
    assert (story.report.state, story.report.message) == (State.FAILED, SENTENCE)
    failure = story.report.failure
    assert (failure.cause, failure.node, failure.message) == (Cause.FABRIC, 1, SENTENCE)
    assert story.records == ["begin", "end", "Failed"]


def test_fail_names_the_fabric_and_not_the_rank_that_ended_by_it() -> None:
    story = logs(logs(gpu_story(FAIL), 1, "2.18-sockets-no-libibverbs"), 0, "2.18-ib-peermem")
    story.exits(2, 1)
    all_stopped(story)
    assert story.report.message == SENTENCE


def test_fail_leaves_a_good_and_an_unknown_fabric_alone() -> None:
    for name in ("2.18-ib-peermem", "2.21-plugin-ucx"):
        story = logs(logs(gpu_story(FAIL), 0, name), 1, name)
        assert story.gang.phase is Phase.ACTIVE


def test_the_next_attempt_is_judged_anew() -> None:
    story = logs(logs(gpu_story(), 1, "2.18-sockets-no-libibverbs"), 0, "2.18-ib-peermem")
    all_stopped(story.exits(0, 1))
    story.waits(1)
    assert story.gang.attempt == 2
    assert told(story).reason is FabricReason.WAITING


def test_what_an_earlier_attempt_logged_counts_for_nothing() -> None:
    story = started(attempt=2, nodes=2, ranks_per_node=1, gpus_per_node=1, fabric=RDMA)
    story.hears(0, FabricSeen(1, (read("2.18-sockets-no-libibverbs", 0),)))
    assert story.gang.fabric.ranks == (None, None)


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    story = gpu_story().hears(0, FabricSeen(1, (read("2.18-ib-peermem", 3), RankFabric(99, networks=("IB",)))))
    assert story.gang.fabric.ranks == (None, None, None, None)


def test_ranks_that_train_without_a_word_of_nccl_are_named_after_a_while() -> None:
    story = logs(gpu_story(), 0, "2.18-ib-peermem").reports(0, Step(0, 1))
    story.waits(STEPS_SECONDS - 1).reports(0, Step(0, 2))
    assert told(story).reason is FabricReason.WAITING
    story.waits(1).reports(0, Step(0, 3))
    assert told(story).reason is FabricReason.NO_LOG
    assert told(story).message.startswith("ranks 2–3 train")


def test_gloo_is_told_with_its_interface_only() -> None:
    story = started(fabric=FabricAsked("TCP"))
    assert told(story) is None
    story.hears(0, FabricSeen(1, (RankFabric(0, networks=("gloo",), interface="eth0"),)))
    assert (told(story).reason, told(story).message) == (FabricReason.GLOO, "CPU ranks over gloo (over eth0): nothing to verify")


def test_the_log_says_it_once() -> None:
    story = logs(gpu_story(), 0, "2.18-ib-peermem")
    before = story.gang
    logs(story, 1, "2.18-ib-peermem")
    lines = list(log_lines(before, story.gang, story.run))
    assert lines == ["fabric: RDMA over mlx5_0, mlx5_1 (IB), GPUDirect by nvidia-peermem, verified on 4 of 4 ranks"]
    assert list(log_lines(story.gang, story.gang, story.run)) == []


def test_the_log_warns_of_a_bad_fabric() -> None:
    story = logs(gpu_story(), 0, "2.18-ib-peermem")
    before = story.gang
    logs(story, 1, "2.18-sockets-no-libibverbs")
    assert list(log_lines(before, story.gang, story.run)) == [f"warning, fabric: {SENTENCE}"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("fault-2.18-completion-error-12", "Got completion from peer 10.0.0.12<52042> with error 12"),
        ("fault-2.29-completion-status-12", "status=IBV_WC_RETRY_EXC_ERR(12)"),
        ("fault-2.27-bootstrap-unreachable", "connect to 10.0.0.12<41234> returned Connection refused"),
    ],
)
def test_a_failure_has_nccls_words_and_its_peer(fault: str, words: str) -> None:
    story = logs(gpu_story(), 1, "2.18-ib-peermem", address="10.0.0.12")
    story.hears(0, FabricSeen(1, (read(fault, 1),)))
    story.exits(1, 1, error=Error(1, "DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:3384, unhandled system error"))
    all_stopped(story)
    failure = story.gang.failure
    assert failure.cause is Cause.FABRIC
    assert words in failure.message
    assert failure.message.startswith("rank 1 on node 0 exited with 1: DistBackendError")
    assert failure.message.endswith("(the peer is node 1)")


def test_a_peer_is_known_by_its_pods_name_too() -> None:
    addresses = ("x-0.x-headless.ns.svc.cluster.local", "x-1.x-headless.ns.svc.cluster.local")
    story = gpu_story(addresses=addresses).hears(0, FabricSeen(1, (read("fault-2.19-peer-closed", 0),)))
    all_stopped(story.exits(0, None, signal="SIGABRT"))
    failure = story.gang.failure
    assert failure.message.endswith("(the peer is node 1)")


def test_the_node_with_the_fault_is_named_before_those_that_lost_it() -> None:
    """The culprit's own exception speaks of a lost peer as well, and comes last."""
    story = gpu_story()
    story.hears(0, FabricSeen(1, (read("fault-2.19-peer-closed", 0), read("fault-2.18-completion-error-12", 1))))
    story.hears(1, FabricSeen(1, (read("fault-2.21-memlock", 3),)))
    for rank in (0, 1, 3):
        story.exits(rank, 1, error=Error(rank, "DistBackendError", "unhandled system error, connection closed"))
    all_stopped(story)
    failure = story.gang.failure
    assert (failure.rank, failure.node) == (3, 1)
    assert "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory" in failure.message


@pytest.mark.parametrize(
    ("exception", "message", "cause"),
    [("OutOfMemoryError", "CUDA out of memory", Cause.OUT_OF_MEMORY), ("ValueError", "the data is not there", Cause.USER_CODE)],
)
def test_a_rank_with_a_cause_of_its_own_keeps_it(exception: str, message: str, cause: Cause) -> None:
    story = gpu_story().hears(0, FabricSeen(1, (read("fault-2.18-completion-error-12", 0),)))
    all_stopped(story.exits(0, 1, error=Error(0, exception, message)))
    failure = story.gang.failure
    assert failure.cause is cause
    assert "NCCL says" not in failure.message


def test_a_hang_is_explained_by_the_hung_ranks_nccl_and_else_told_what_another_one_says() -> None:
    story = gpu_story().hears(0, FabricSeen(1, (read("fault-2.18-completion-error-12", 1), read("fault-2.19-peer-closed", 0))))
    own, others, none = (Failure("a rank hangs", rank=rank, cause=Cause.HANG) for rank in (1, 2, 2))
    words = "NET/IB : Got completion from peer 10.0.0.12<52042> with error 12, opcode 1, len 32768, vendor err 129 (Recv)"
    fabric = story.gang.fabric
    assert hang_explained_by_nccl(own, fabric, story.run) == replace(own, message=f"a rank hangs; NCCL says: {words}", cause=Cause.FABRIC)
    assert hang_explained_by_nccl(others, fabric, story.run) == replace(others, message=f"a rank hangs; NCCL says on rank 1: {words}")
    assert hang_explained_by_nccl(none, gpu_story().gang.fabric, story.run) is none


def test_a_run_of_an_older_version_has_no_verdict_and_runs() -> None:
    story = started(nodes=2, gpus_per_node=1)
    story.hears(0, FabricSeen(1, (read("2.18-sockets-no-libibverbs", 0),)))
    assert told(story) is None
    assert story.gang.phase is Phase.ACTIVE
