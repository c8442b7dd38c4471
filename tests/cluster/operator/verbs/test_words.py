"""Words and exit codes of every verb about jobs in pods: those of the table that hosts and this machine answer by, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clusters.cluster_jobs import Jobs, prepare, until
from support.places.verb_words import ALONE, PODS, Where, live

SPEC = """\
  cluster: local
  podTemplate: {volumes: [{name: scripts, mountPath: /scripts, configMap: {name: scripts}}]}
"""


def test_jobs_in_pods_live_as_jobs_do_elsewhere(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))  # what another test's deploy remembers would count here
    where = Where(
        PODS, ("-n", jobs.namespace), f"in namespace {jobs.namespace}", noun="TrainingJob", elsewhere="; -n names another namespace",
        scripts="/scripts/", spec=SPEC,
    )  # fmt: skip
    live(where, tmp_path, lambda: until("the pods of what has ended are gone", lambda: not jobs.pods("done") and not jobs.pods("broke")))
    until("the pods of each preflight go", lambda: not jobs.pods("checked-preflight") and not jobs.pods("lacks-preflight"))


def test_runs_without_an_operator_answer_as_jobs_do(other: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))
    jobs = prepare(other.api, other.namespace)
    where = Where(
        ALONE, ("-n", jobs.namespace), f"in namespace {jobs.namespace}", noun="TrainingJob", elsewhere="; -n names another namespace",
        scripts="/scripts/", spec=SPEC, starts=("--in-namespace", "--cluster", "local"),
    )  # fmt: skip
    live(where, tmp_path, lambda: until("the pods of what has ended are gone", lambda: not jobs.pods("done") and not jobs.pods("broke")))
