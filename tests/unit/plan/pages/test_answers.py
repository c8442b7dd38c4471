"""Answers of nodes, hosts and ranks, whose owner decides what they say: of each part so much is read, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.plan.pages.answers import read_node, read_steps
from lockstep.plan.pages.hosts import read_host
from lockstep.plan.pages.stacks import read_ranks

FEW, MANY = range(100), range(30_000)


RANK = {"node": 0, "attempt": 1}


@pytest.mark.parametrize(
    ("read", "most"),
    [
        (lambda: len(read_node({"gigabits": {f"eth{number}": [1, 1] for number in FEW}})["gigabits"]), 64),
        (lambda: len(read_node({"gpus": [{"index": number} for number in FEW]})["gpus"]), 64),
        (lambda: len(read_node({"rankLoads": [{"rank": number} for number in MANY]})["rankLoads"]), 4096),
        (lambda: len(read_node({"ranks": list(MANY)})["ranks"]), 4096),
        (lambda: len(read_node({"gpuProblem": "x" * 5000})["gpuProblem"]), 200),
        (lambda: len(read_steps({"steps": {str(number): {"loss": 1.0} for number in MANY}})), 20_000),
        (lambda: len(read_host({"disks": [{"path": "/", "freeBytes": 1, "limitBytes": 2}] * 100})["disks"]), 8),
        (lambda: len(read_host({"jobs": [{"name": "x"}] * 100})["jobs"]), 64),
        (lambda: len(read_host({"gpus": [{"index": 0, "processes": [{"pid": 1}] * 100}]})["gpus"][0]["processes"]), 64),
        (lambda: len(read_ranks({"ranks": [{**RANK, "rank": number} for number in MANY]})), 4096),
        (lambda: len(read_ranks({"ranks": [{**RANK, "rank": 0, "problem": "x" * 5000}]})[0].problem), 500),
        (lambda: len(read_ranks({"ranks": [{**RANK, "rank": 0,
            "lines": ["Thread 0x1 (most recent call first):", *["x"] * 30_000]}]})[0].threads[0].frames), 19_999),
    ],
)  # fmt: skip
def test_of_what_a_machine_says_so_much_is_read(read: Any, most: int) -> None:
    assert read() == most
