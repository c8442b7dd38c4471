"""The command that starts a run again is the one that was typed, for each place without an API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.api.job import TrainingJob
from lockstep.api.objects import typed_command, typed_file
from lockstep.cli.main import app
from lockstep.platforms.places.orders import Order

JOB = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: mine}
spec: {nodes: 1, gpusPerNode: 0, ranksPerNode: 1, script: {path: train.py}}
"""


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("run -f job.yaml --local", "lockstep run -f job.yaml --local"),
        ("run --cluster ws/ -f job.yaml --nodes 2", "lockstep run -f job.yaml --cluster ./ws --set nodes=2"),
        (
            'run -f job.yaml --local --set nodes=2 --set env=[{"name":"T","value":"s"}]',
            "lockstep run -f job.yaml --local --set nodes=2 --set env=...",
        ),
        ("run --local --nproc-per-node 2 -- train.py -f conf.yaml", "lockstep run --local --nproc-per-node 2 -- train.py -f conf.yaml"),
        (
            "run --local --nproc-per-node 2 --set gpusPerNode=0 -- train.py",
            "lockstep run --local --nproc-per-node 2 --set gpusPerNode=0 -- train.py",
        ),
        ("retry -f job.yaml --cluster ./ws", "lockstep run -f job.yaml --cluster ./ws"),
        ("run -f job.yaml --hosts lab0,lab1", "lockstep run -f job.yaml --hosts lab0,lab1"),
        ("run -f job.yaml --hosts lab0,lab1 --detach --without lab1", "lockstep run -f job.yaml --hosts lab0,lab1 --without lab1"),
        (
            "run --hosts lab0 --nproc-per-node 1 --set gpusPerNode=0 --set ranksPerNode=1 -- train.py --epochs 3",
            "lockstep run --hosts lab0 --nproc-per-node 1 --set gpusPerNode=0 --set ranksPerNode=1 -- train.py --epochs 3",
        ),
        ("launch --at 127.0.0.1:29600 -f job.yaml --nodes 2", "lockstep launch --at 127.0.0.1:29600 -f job.yaml --nodes 2"),
    ],
)
def test_the_command_that_was_typed_goes_with_the_job(words: str, again: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("ws").mkdir()
    jobs: list[TrainingJob] = []

    def take(*arguments: Any) -> int:
        jobs.append(next(getattr(one, "job", one) for one in arguments if isinstance(one, (TrainingJob, Order))))
        return 0

    monkeypatch.setattr("lockstep.platforms.local.run.run_local", take)
    monkeypatch.setattr("lockstep.platforms.local.records.failed_run", lambda *_: None)
    monkeypatch.setattr("lockstep.platforms.hosts.backend.run_on_hosts", take)
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, (done.output, done.exception)
    assert typed_command(jobs[0].to_dict(), "") == again
    assert typed_file(jobs[0].to_dict()) == ("job.yaml" if "-f job" in again else "FILE")
    if "--nproc-per-node 2" in again:
        assert jobs[0].spec.ranks_per_node == 2
