"""The self-test and the short all-reduce of a preflight, with real torch processes that the agents start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, AllReduce, Expected, PreflightReport, SelfTest
from lockstep_gang.contract.run import run_text
from lockstep_spec.codec import from_json
from unit.gang.cases import Gang, gang

SLOW = """
import importlib, time
imported = importlib.import_module
def slowed(name, package=None):
    module = imported(name, package)
    if name == "torch.distributed":
        all_reduce = module.all_reduce
        module.all_reduce = lambda *given, **named: (time.sleep(0.5), all_reduce(*given, **named))[1]
    return module
importlib.import_module = slowed
"""
"""sitecustomize of a node whose every all-reduce takes half a second longer."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path, python_options=()) as made:
        yield made


def result(agents: Gang) -> PreflightReport:
    line = next(line for line in agents.log().splitlines() if PREFLIGHT_RESULT in line)
    return from_json(PreflightReport, json.loads(line.partition(PREFLIGHT_RESULT)[2]), "result")


WRONG = """
import importlib
imported = importlib.import_module
def broken(name, package=None):
    module = imported(name, package)
    if name == "torch":
        product = module.Tensor.__matmul__
        def off_by_one(left, right):
            result = product(left, right)
            if left.dtype == module.bfloat16:
                result[7, 9] += 1
            return result
        module.Tensor.__matmul__ = off_by_one
    return module
importlib.import_module = broken
"""
"""sitecustomize of a node that computes one number of a product wrong."""


def test_a_node_that_computes_wrong_by_one_is_named_before_any_rank_runs(agents: Gang) -> None:
    run = agents.write("print('a rank runs')", nodes=2, preflight=Expected(self_test=SelfTest("BF16"), only=True))
    (agents.folder / "broken").mkdir()
    (agents.folder / "broken/sitecustomize.py").write_text(WRONG)
    there = replace(run, environment={**run.environment, "PYTHONPATH": str(agents.folder / "broken")})
    (agents.folder / "broken.json").write_text(run_text(there))
    agents.start(0)
    agents.start(1, run_path=agents.folder / "broken.json")
    assert agents.codes(120) == [1, 1]
    (finding,) = [finding for finding in result(agents).findings if finding.check == "selfTest"]
    assert (finding.node, finding.excludes) == (1, True)
    assert "the CPU of node 1 computes wrong: 2 of 131072 numbers of a product in BF16" in finding.message


def test_nodes_that_compute_right_start_their_ranks_and_tell_their_speed(agents: Gang) -> None:
    agents.write("print('a rank runs')", nodes=2, preflight=Expected(self_test=SelfTest("FP32")))
    agents.start(0, 1)
    assert agents.codes(120) == [0, 0]
    assert "; 2 CPUs compute right, " in agents.log()
    assert agents.log().index("compute right") < agents.log().index("[rank 0] a rank runs")


def start(agents: Gang, nodes: int, minimum: int | None, slow: int | None = None) -> None:
    run = agents.write("", nodes=nodes, preflight=Expected(all_reduce=AllReduce(minimum), only=True))
    (agents.folder / "slow").mkdir()
    (agents.folder / "slow/sitecustomize.py").write_text(SLOW)
    there = replace(run, environment={**run.environment, "PYTHONPATH": str(agents.folder / "slow")})
    (agents.folder / "slow.json").write_text(run_text(there))
    for node in range(nodes):
        agents.start(node, run_path=agents.folder / "slow.json" if node == slow else None)


def test_a_fast_all_reduce_passes_and_gives_its_figure(agents: Gang) -> None:
    start(agents, 2, minimum=10**6)
    assert agents.codes(120) == [0, 0]
    measured = result(agents).all_reduce
    assert measured is not None
    assert (measured.ranks, measured.bytes) == (2, 8 * 1024**2)
    assert measured.bytes_per_second > 10**6
    assert "all-reduce of 8 MiB over 2 ranks" in agents.log()


def test_the_one_slow_node_of_three_is_named(agents: Gang) -> None:
    start(agents, 3, minimum=25 * 10**6, slow=1)
    assert agents.codes(240) == [1, 1, 1]
    errors = [finding for finding in result(agents).findings if finding.check == "allReduce"]
    assert [(finding.node, finding.excludes) for finding in errors] == [(1, True)]


def test_a_collective_that_fails_is_told_with_where(agents: Gang) -> None:
    run = agents.write("", nodes=2, preflight=Expected(all_reduce=AllReduce(10**6), only=True))
    (agents.folder / "broken").mkdir()
    (agents.folder / "broken/sitecustomize.py").write_text(SLOW.replace("time.sleep(0.5)", "1 / 0"))
    there = replace(run, environment={**run.environment, "PYTHONPATH": str(agents.folder / "broken")})
    (agents.folder / "broken.json").write_text(run_text(there))
    agents.start(0)
    agents.start(1, run_path=agents.folder / "broken.json")
    assert agents.codes(120) == [1, 1]
    (finding,) = [finding for finding in result(agents).findings if finding.check == "allReduce"]
    assert "on node 1: ZeroDivisionError: division by zero" in finding.message
