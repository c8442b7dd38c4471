"""Hosts of a cluster file, and what they say of themselves before a start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.hosts.facts import Folder, HostFacts, HostGpu, JobOnHost, Route
from lockstep.plan.hosts.place import Seat, seats

FILE = """
cluster: {name: lab, platform: hosts}
defaults: {python: ~/env/bin/python}
hosts:
  - {name: lab0, address: 10.0.0.1}
  - {name: lab1, workspace: /data/ws, env: [{name: HF_HOME, value: /data/hf}]}
  - {name: lab2, gpus: [1], micro_batch: 2}
ports: 29400-29447
"""
JOB = """
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec: {nodes: 2, script: {path: rank.py}, env: [{name: A, value: "1"}]}
"""
CLUSTER = parse_cluster_file(FILE, "lab.yaml")


def gpu(index: int, **changes: Any) -> HostGpu:
    return replace(HostGpu(index, f"GPU-{index}", "H100", 80 << 30), **changes)


def facts(name: str, address: str, *gpus: HostGpu, **changes: Any) -> HostFacts:
    home = f"/home/{name}"
    plain = HostFacts(
        name=name, user="ada", home=home, now=0.0, python=(3, 11), workspace=Folder(f"{home}/lockstep/workspace", 1),
            datasets=Folder("/d", 1),
        routes={peer: Route(address, "eth0") for peer in ("10.0.0.1", "10.0.0.2") if peer != address}, gpus=gpus, has_units=True,
            lingers=True,
        state=f"{home}/.local/state/lockstep/jobs", jobs={"x": JobOnHost(highest_attempt=int(address[-1]))},
    )  # fmt: skip
    return replace(plain, **changes)


def placed(*hosts: HostFacts, job: str = JOB, file: ClusterFile = CLUSTER) -> list[Seat]:
    assert file.hosts is not None
    return seats(parse_job_file(job, "job.yaml"), file.profile, file.hosts, "lab", {one.name: one for one in hosts}, "uid-1")
