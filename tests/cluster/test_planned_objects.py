"""Objects of `lockstep plan`, against a job that is on a cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.plan_cases import CHECKOUT, CONTEXT
from golden.plan_cases import cluster as profile_of
from lockstep.api.files.yamltext import dump_all_yaml, dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from support.in_process import lockstep

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
# Suspended, of a TrainingCluster that doesn't exist: no operator starts it, whichever may be there.
SPEC = {"cluster": "lockstep-test-none", "suspend": True, "script": {"path": "a.py"}, "restart": {"maxRestarts": 2}}


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**spec: Any) -> Path:
        job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": SPEC | spec}
        path = tmp_path / "job.yaml"
        path.write_text(dump_yaml(job), encoding="utf-8")
        return path

    return write


@pytest.fixture
def made(kubectl: Kubectl, namespace: str, job_file: Callable[..., Path]) -> str:
    """The namespace of a job that is there with its objects, as an operator makes them."""
    for crd in sorted((CHECKOUT / "manifests" / "crds").glob("*.yaml")):
        applied = kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
        assert applied.returncode == 0, applied.stderr
    assert kubectl("wait", "--for=condition=Established", "crd/trainingjobs.lockstep.dev").returncode == 0
    path = job_file()
    created = kubectl("create", "-n", namespace, "-f", str(path), "-o", "json")
    assert created.returncode == 0, created.stderr
    uid = json.loads(created.stdout)["metadata"]["uid"]
    job = TrainingJob.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    resolved = resolve(job, profile_of("local"), PlatformDefaults(namespace=namespace, uid=uid))
    objects = kubectl("create", "-f", "-", input=dump_all_yaml(render(resolved, replace(CONTEXT, owner_uid=uid))))
    assert objects.returncode == 0, objects.stderr
    return namespace


def objects(path: Path, namespace: str) -> str:
    return lockstep("plan", "-f", str(path), "--cluster", "local", "-n", namespace).stdout


def test_a_job_that_is_on_the_cluster_as_written_does_not_differ(made: str, job_file: Callable[..., Path]) -> None:
    same = objects(job_file(), made)
    assert "there and as they should be: " in same and "would change" not in same


def test_a_changed_field_is_printed_with_both_values(made: str, job_file: Callable[..., Path]) -> None:
    assert "run.restart.maxRestarts: 2 → 5" in objects(job_file(restart={"maxRestarts": 5}), made)


def test_a_job_that_is_not_there_would_be_made(namespace: str, job_file: Callable[..., Path]) -> None:
    assert "StatefulSet/x" in objects(job_file(), namespace).partition("would be made: ")[2].partition("\n")[0]
