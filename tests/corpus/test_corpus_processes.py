"""Every fault of a rank or agent is done to a job of two nodes on this machine; `lockstep why` must name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from corpus.of_processes import RANK_FAULTS, RANKS, TORCH, RankFault
from corpus.verdicts import Answer, Score, answer, judge
from support.in_process import lockstep


def played(fault: RankFault, folder: Path) -> tuple[Answer, str]:
    """What is said of it, and the run's output; what node 0's agent writes itself is in what pytest captures."""
    script = folder / "script.py"
    script.write_text((TORCH if "torch" in fault.script else "") + RANKS + fault.script)
    spec = {"nodes": 2, "ranksPerNode": 1, "script": {"path": str(script)}, "restart": {"maxRestarts": 0}, **fault.fields}
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "faulty"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    here = ("--local", "--workspace", str(folder))
    ran = lockstep("run", "-f", str(folder / "job.yaml"), *here)
    said = lockstep("why", "faulty", *here, "-o", "json")
    assert said.returncode in (0, 1), said.stderr + ran.stdout + ran.stderr
    return answer(json.loads(said.stdout)), f"{ran.stdout}\n{ran.stderr}\n{said.stdout}"


@pytest.mark.parametrize("fault", RANK_FAULTS, ids=lambda fault: fault.id)
def test_a_fault_of_a_rank_or_agent_is_named(fault: RankFault, tmp_path: Path, scored: Callable[[RankFault, Score, str], None]) -> None:
    given, output = played(fault, tmp_path)
    score, difference = judge(fault.expected, given)
    scored(fault, score, difference)
    assert score is Score.RIGHT, f"{fault.what}: {difference}\n{given}\n{output}"
