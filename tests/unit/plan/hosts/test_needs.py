"""What keeps a job from starting on a host, with what helps."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.hosts.facts import Folder
from lockstep.plan.hosts.needs import refusals
from support.hosts_told import CLUSTER, JOB, facts

TRAINING = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec: {nodes: 1, training: {model: {name: /workspace/m}, data: {path: /datasets/d.jsonl}}}
"""
OTHER = "state another one, or leave it out, and lockstep hosts setup 'my lab' makes an environment"
LARGE = 1 << 40


def told(*changes: dict[str, Any], job: str = JOB, stated: str | None = "~/env/bin/python") -> list[str]:
    """What is told of hosts with these facts."""
    assert CLUSTER.hosts is not None
    hosts = [host.model_copy(update={"python": stated}) for host in CLUSTER.hosts.hosts[: len(changes)]]
    plain = {"workspace": Folder("/w", LARGE), "temporary": Folder("/t", LARGE)}
    answers = {host.name: facts(host.name, "10.0.0.1", **{**plain, **change}) for host, change in zip(hosts, changes, strict=True)}
    return refusals(parse_job_file(job, "job.yaml"), hosts, answers, "'my lab'", "--cluster 'my lab'", lambda path: "PATH")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ""),
        ({"system": "Darwin"}, "it runs Darwin, and agents need Linux: leave it out of the file"),
        ({"python": (3, 9)},
            "its Python 3.9 is too old: 3.10 or newer is needed: lockstep hosts setup 'my lab' brings one, or state hosts[].python"),
        ({"stated_problem": "no such file"}, f"its hosts[].python ~/env/bin/python can't be run: no such file: {OTHER}"),
        ({"stated_python": (3, 9)}, f"its hosts[].python ~/env/bin/python is Python 3.9, and 3.10 or newer is needed: {OTHER}"),
        ({"workspace": Folder("/w", LARGE, problem="/w is on a read-only file system")},
            "its workspace /w: /w is on a read-only file system: state another hosts[].workspace, or let ada write there"),
        ({"workspace": Folder("/w", 16 << 20)}, ""),
        ({"workspace": Folder("/w", 4000)}, "its workspace /w has 4.0 kB free: free some, or state a hosts[].workspace on another disk"),
        ({"temporary": Folder("/t", 1 << 20)}, ""),
        ({"temporary": Folder("/t", 4000)}, "its folder of temporary files /t has 4.0 kB free: remove what is not needed there"),
        ({"temporary": Folder("/t", LARGE, problem="/t can't be written by ada")},
            "its folder of temporary files /t: /t can't be written by ada: let ada write there (as root: chmod 1777 /t)"),
    ],
)  # fmt: skip
def test_a_host_that_no_job_can_start_on_is_told_with_what_helps(change: dict[str, Any], expected: str) -> None:
    assert told(change) == ([f"host lab0: {expected}; lockstep doctor 'my lab' says what else is wrong"] if expected else [])


@pytest.mark.parametrize(("version", "job", "needed"), [((3, 10), JOB, ""), ((3, 10), TRAINING, "3.11"), ((3, 11), TRAINING, "")])
def test_a_stated_python_must_be_new_enough_for_the_job(version: tuple[int, int], job: str, needed: str) -> None:
    assert [f"is Python 3.10, and {needed} or newer is needed" in line for line in told({"stated_python": version}, job=job)] == [
        True for _ in needed[:1]
    ]


def test_hosts_that_lack_the_same_share_a_sentence() -> None:
    (line,) = told({}, {}, stated=None)
    words = "hosts lab0, lab1: it has no Python environment for ranks: lockstep hosts setup 'my lab' makes it, or state hosts[].python"
    assert line.startswith(words)
