"""Prometheus scrapes a real operator: the alert on a job that failed, and every query of the dashboard on one that runs. Pods and
coordinator are played.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from faults.prometheus import Prometheus, running_prometheus
from lockstep.platforms.clusters.install import kustomized
from lockstep_gang.contract.fabric import FabricReason, FabricReport, Verified
from lockstep_gang.contract.preflight import PreflightReport
from lockstep_gang.contract.report import CheckpointReport, Goodput, Metric, State, TrainerReport
from lockstep_machine.network import free_ports
from support.checkout import ROOT
from support.clusters.control_plane import Plane, default_objects
from support.clusters.operator_faults import SYSTEM, Rig, is_failed, rig_in, running
from support.clusters.played_job import JOB

OBJECTS = {item["kind"]: item for item in kustomized(ROOT / "manifests" / "monitoring")}
DASHBOARD = json.loads(OBJECTS["ConfigMap"]["data"]["lockstep.json"])
THEN = "2026-01-01T00:00:00Z"
MEASURED = {"loss": "2.2500", "tokensPerSecond": "41250", "mfu": "0.2790", "peakMemoryBytes": "97000000000", "saveSeconds": "1.5"}
SHOWN = {
    "Step, and the run's last": [7, 70], "Loss": [2.25], "Tokens per second": [41250], "MFU": [0.279], "GPU memory": [97e9],
        "Progress": [10],
    "Time left": [600], "Time of a save": [1.5], "Fabric, stragglers, preflight": [1, 0, 1],
}  # fmt: skip
"""Values of panels whose job is the one that reports so."""


@dataclass(frozen=True)
class Watched:
    """An operator and its Prometheus, which looked for the first time when a job in namespace `failed` had failed already."""

    rig: Rig
    prometheus: Prometheus
    failed: str


@pytest.fixture(scope="module")
def watched(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port = tmp_path_factory.mktemp("watched"), free_ports(1)[0]
    reader = [OBJECTS[kind] for kind in ("ClusterRole", "ServiceAccount", "ClusterRoleBinding")]
    with rig_in(folder, plane, lambda: [*default_objects(), *reader], LOCKSTEP_METRICS_PORT=str(port)) as rig, rig.job() as job:
        running(job)
        job.state = State.FAILED
        job.until("the job has failed", lambda: is_failed(job))
        with running_prometheus(folder, free_ports(1)[0], settings(rig, folder, port)) as prometheus:
            yield Watched(rig, prometheus, job.jobs.namespace)


def settings(rig: Rig, folder: Path, port: int) -> dict[str, Any]:
    """Prometheus' configuration as the ServiceMonitor asks for it, but that it looks each second, and at the process of the test."""
    [endpoint] = OBJECTS["ServiceMonitor"]["spec"]["endpoints"]
    (folder / "ca.crt").write_text(rig.ca_pem)
    (folder / "rules.yaml").write_text(json.dumps(OBJECTS["PrometheusRule"]["spec"]))
    account = OBJECTS["ServiceAccount"]["metadata"]["name"]
    token = client.CoreV1Api(rig.api.client).create_namespaced_service_account_token(account, SYSTEM, {"spec": {}}).status.token
    scrape = {
        "job_name": "lockstep-operator", "scheme": endpoint["scheme"], "authorization": {"credentials": token},
        "tls_config": {"ca_file": str(folder / "ca.crt"), "server_name": endpoint["tlsConfig"]["serverName"]},
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }  # fmt: skip
    every_second = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    return {"global": every_second, "rule_files": [str(folder / "rules.yaml")], "scrape_configs": [scrape]}


def test_a_failure_before_the_first_scrape_raises_the_alert(watched: Watched) -> None:
    alerts = watched.rig.until("the alert", lambda: watched.prometheus.query('ALERTS{alertname="LockstepJobFailed", alertstate="firing"}'))
    assert [alert["metric"]["job_namespace"] for alert in alerts] == [watched.failed]


def test_every_query_of_the_dashboard_finds_a_job_that_runs(watched: Watched) -> None:
    prometheus = watched.prometheus
    with watched.rig.job() as job:
        job.more = reported()
        running(job)
        variables = {"namespace": job.jobs.namespace, "job": JOB, "__rate_interval": "30s", "__range": "10m"}
        for variable in (each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"):
            selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            name, text = variable["name"], filled(selector, variables)
            job.until(
                f"{name} in {text}", lambda label=label, name=name, text=text: variables[name] in prometheus.label_values(label, text)
            )
        for panel in DASHBOARD["panels"]:
            queries = [filled(target["expr"], variables) for target in panel["targets"]]
            found = [job.until(f"{panel['title']}: {query}", lambda query=query: prometheus.query(query)) for query in queries]
            if panel["title"] in SHOWN:
                assert [[float(one["value"][1]) for one in series] for series in found] == [[value] for value in SHOWN[panel["title"]]]
        assert SHOWN.keys() <= {panel["title"] for panel in DASHBOARD["panels"]}


def filled(expression: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: variables[match[1]], expression)


def reported() -> dict[str, Any]:
    """Parts of the report of a job that trains."""
    return {
        "trainer": TrainerReport("Step", 7, 70, 600, tuple(Metric(name, value) for name, value in MEASURED.items())),
        "checkpoint": CheckpointReport(5, "/workspace/runs/x/checkpoints/step-5.a1", THEN),
        "goodput": Goodput(began=int(time.time() * 1000), until=int(time.time() * 1000) + 9000, spent={"train": 9000}, furthest_step=7),
        "fabric": FabricReport(Verified.TRUE, FabricReason.VERIFIED, "as asked"),
        "preflight": PreflightReport(THEN, ok=True, checks=("allReduce",), nodes=2, milliseconds=5),
    }
