"""How a release's files are tried: kubectl that must succeed, what a user applies after an installation, and the mirror's script."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lockstep.devcluster.images import BASE

if TYPE_CHECKING:
    from support.clusters.cluster_jobs import Jobs

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
REGISTRY = "registry.example.com/lockstep"
"""The one that a release names before it is mirrored."""
CLUSTER = {
    "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster",
    "metadata": {"name": "mine", "annotations": {"lockstep.dev/is-default-cluster": "true"}}, "spec": {"platform": "Kubernetes"},
}  # fmt: skip


def done(kubectl: Kubectl, *arguments: str, input: str | None = None) -> str:
    result = kubectl(*arguments, input=input)
    assert result.returncode == 0, f"kubectl {' '.join(arguments)}\n{result.stdout}{result.stderr}"
    return result.stdout


def until_operates(kubectl: Kubectl) -> None:
    """Wait until the operator is ready, and describe the cluster to it."""
    done(kubectl, "rollout", "status", "deployment/lockstep-operator", "-n", "lockstep-system", "--timeout=180s")
    done(kubectl, "apply", "-f", "-", input=yaml.safe_dump(CLUSTER))


def run_to_its_end(jobs: Jobs) -> None:
    jobs.start("done", "ok.py", image=BASE)
    jobs.until_condition("done", "Complete", "True", "Complete")


def mirror(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", str(folder / "mirror.sh"), *arguments], capture_output=True, text=True, check=False)
