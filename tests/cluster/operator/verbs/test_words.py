"""Words and exit codes of every verb about jobs in pods: those of the table that hosts and this machine answer by, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clusters.cluster_jobs import Jobs, until
from support.verb_words import JOBS, PODS, STOPPED, UNDISTURBED, Where, differences

SPEC = """\
  cluster: local
  podTemplate: {volumes: [{name: scripts, mountPath: /scripts, configMap: {name: scripts}}]}
"""


def test_verbs_about_jobs_in_pods_say_what_they_say_elsewhere(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))  # what another test's deploy remembers would count here
    for name, script in JOBS.items():
        jobs.start(name, script, restart={"maxRestarts": int(name == "runs")})
    jobs.until_running("runs")
    jobs.until_condition("done", "Complete", "True", "Complete")
    jobs.until_condition("broke", "Failed", "True", "RanksFailed")
    until("the pods of what has ended are gone", lambda: not jobs.pods("done") and not jobs.pods("broke"))
    where = Where(
        PODS, ("-n", jobs.namespace), f"in namespace {jobs.namespace}", noun="TrainingJob", elsewhere="; -n names another namespace",
        scripts="/scripts/", spec=SPEC,
    )  # fmt: skip
    assert differences(where, UNDISTURBED, tmp_path) == []
    assert differences(where, STOPPED, tmp_path) == []
