"""The short all-reduce of a preflight, with real torch processes over gloo that the agents start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, AllReduce, Expected, PreflightReport
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
