"""Every fault of a rank or agent is done to a job of two nodes on this machine; `lockstep why` must name it.

Of other people's scripts, `make test` leaves those out that wait for a limit, load a large library, or end all ranks alike: two minutes in
all. Of the craft it has six, of the week and the month none. `make test-corpus` has them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from _pytest.mark import ParameterSet

from corpus.of_a_month import MONTH_FAULTS
from corpus.of_processes import RANK_FAULTS, RANKS, TORCH, RankFault
from corpus.of_scripts import SCRIPT_FAULTS
from corpus.of_the_craft import CRAFT_FAULTS, IN_MAKE_TEST
from corpus.of_the_field import FIELD_FAULTS
from corpus.of_the_week import WEEK_FAULTS
from corpus.verdicts import Answer, Score, answer, judge
from support.in_process import lockstep

LARGE = re.compile("torch|datasets|deepspeed|wandb")


def played(fault: RankFault, folder: Path) -> tuple[Answer, str]:
    """What is said of it, and the run's output; what node 0's agent writes itself is in what pytest captures."""
    script = folder / "script.py"
    own = fault.script if isinstance(fault.script, bytes) else fault.script.encode()
    script.write_bytes(own if fault.whole else ((TORCH if b"torch" in own else "") + RANKS).encode() + own)
    for name, text in fault.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    fields = json.loads(json.dumps(fault.fields).replace("{folder}", str(folder)))
    spec = {"nodes": 2, "ranksPerNode": 1, "script": {"path": str(script)}, "restart": {"maxRestarts": 0}, **fields}
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "faulty"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    here = ("--cluster", str(folder))
    ran = lockstep("run", "-f", str(folder / "job.yaml"), *here)
    said = lockstep("why", "faulty", *here, "-o", "json")
    assert said.returncode in (0, 1), said.stderr + ran.stdout + ran.stderr
    return answer(json.loads(said.stdout)), f"{ran.stdout}\n{ran.stderr}\n{said.stdout}"


def _case(fault: RankFault) -> ParameterSet:
    own = fault.script if isinstance(fault.script, str) else ""
    long = "hangTimeouts" in fault.fields or LARGE.search(own) or fault.expected.everybody
    long = fault.id not in IN_MAKE_TEST if fault in CRAFT_FAULTS else long
    long = long or fault in (*WEEK_FAULTS, *MONTH_FAULTS)
    return pytest.param(fault, id=fault.id, marks=pytest.mark.corpus if long else ())


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(fault, id=fault.id) for fault in RANK_FAULTS),
        *map(_case, (*SCRIPT_FAULTS, *FIELD_FAULTS, *CRAFT_FAULTS, *WEEK_FAULTS, *MONTH_FAULTS)),
    ],
)
def test_a_fault_of_a_rank_or_agent_is_named(fault: RankFault, tmp_path: Path, scored: Callable[[RankFault, Score, str], None]) -> None:
    given, output = played(fault, tmp_path)
    score, difference = judge(fault.expected, given)
    scored(fault, score, difference)
    assert score is Score.RIGHT, f"{fault.what}: {difference}\n{given}\n{output}"
