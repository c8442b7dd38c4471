"""The demo's model and texts on the volumes of a namespace, for tests that train on real pods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.api.job import TrainingJob
from lockstep.cli.clusters.quickstart import demo_folder, send_demo
from lockstep.cli.shared.target import load
from lockstep.kube.client import connect
from lockstep.kube.exec import Place
from lockstep.plan.render.resolve import PlatformDefaults, resolve
from lockstep.platforms.files.files import ensure_claims, files_pod, running_pod
from support.clusters.cluster_jobs import Jobs


@contextmanager
def demo_files(jobs: Jobs, spec: dict[str, Any]) -> Iterator[Place]:
    """A pod that has them, on the claims that a job of `spec` mounts, until the end of the block."""
    person = connect()
    job = TrainingJob.model_validate({"metadata": {"name": "files"}, "spec": spec})
    resolved = resolve(job, load("local").profile, PlatformDefaults(namespace=jobs.namespace))
    ensure_claims(person, resolved)
    with running_pod(person, jobs.namespace, files_pod("files", resolved)) as pod:
        send_demo(person, pod, demo_folder())
        yield pod
