"""Which events `lockstep describe` shows: those of this job, not of an earlier one that had its name."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from lockstep.cli.main import main
from support.api_stub import ApiStub, served


def test_events_are_asked_for_by_the_job_s_uid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs/x"
    stub = ApiStub({path: {"kind": "TrainingJob", "metadata": {"name": "x", "namespace": "team", "uid": "this-one"}, "spec": {}}})
    with served(stub, tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setattr("sys.argv", ["lockstep", "describe", "x", "-n", "team"])
        with contextlib.suppress(SystemExit):
            main()
    asked = [query["fieldSelector"] for _, found, query in stub.asked if found.endswith("/events")]
    assert asked == ["involvedObject.uid=this-one"]
