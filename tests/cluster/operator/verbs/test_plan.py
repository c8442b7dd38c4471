"""`lockstep plan` against a real API server: refusals are the server's own, nothing is made, and what may not be seen is said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from lockstep.cli.main import app
from support.clusters.cluster_jobs import SERVICE_ACCOUNT, Jobs, kubeconfig_of, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
Found = dict[str, Any]


def plan(jobs: Jobs, folder: Path, code: int, kubeconfig: Path | None = None) -> Found:
    """Of a job of two nodes, which must end with this exit code."""
    spec = {"nodes": 2, "script": {"path": "/workspace/a.py"}}
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "planned"}, "spec": spec})
    )
    options = ["plan", "-f", str(path), "--cluster", "local", "-n", jobs.namespace, "-o", "json"]
    done = CliRunner().invoke(app, options, env={"KUBECONFIG": str(kubeconfig)} if kubeconfig else None)
    assert done.exit_code == code, f"{done.output}{done.exception}"
    return json.loads(done.output)


def said(found: Found, section: str, outcome: str) -> str:
    return " | ".join(line["message"] for line in found["lines"] if (line["section"], line["outcome"]) == (section, outcome))


def test_a_plan_says_what_the_cluster_would_and_makes_nothing(other: Jobs, kubectl: Kubectl, cluster: Path, tmp_path: Path) -> None:
    missing = plan(other, tmp_path, 1)
    assert f"ServiceAccount {SERVICE_ACCOUNT} (the cluster's security.service_account) is not in" in said(missing, "needs", "refused")

    other.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT}})
    fits = plan(other, tmp_path, 0)
    assert (fits["verdict"], said(fits, "admission", "ok").count("was admitted")) == ("fits now", 3)
    assert "2 of 2 nodes fit now" in said(fits, "nodes", "ok")

    limited = plan(other, tmp_path, 3, kubeconfig_of("edit", other, cluster, tmp_path))
    assert limited["message"] == "may wait; not known: cluster and nodes and claims (--context NAME, of an account with more rights)"
    assert "your account may not list nodes" in said(limited, "nodes", "unknown")
    assert said(limited, "admission", "ok").count("was admitted") == 3

    hard = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1", "requests.storage": "1Ti"}}}
    other.create({"apiVersion": "v1", "kind": "ResourceQuota", **hard})
    until("the quota to be counted", lambda: (other.get("ResourceQuota", "small") or {}).get("status", {}).get("used"))
    full = plan(other, tmp_path, 1)
    assert said(full, "quota", "refused") == "quota small allows 1 in all, the job asks for 2 pods"

    other.delete("ResourceQuota", "small")
    assert kubectl("label", "namespace", other.namespace, "pod-security.kubernetes.io/enforce=restricted").returncode == 0
    assert plan(other, tmp_path, 0)["verdict"] == "fits now"

    made = kubectl("get", "trainingjobs,statefulsets,pods,services,pvc,secrets,networkpolicies", "-n", other.namespace, "-o", "name")
    assert made.stdout == "", made.stdout


def test_what_a_quota_wants_stated_is_refused_in_the_api_servers_words(other: Jobs, tmp_path: Path) -> None:
    other.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": SERVICE_ACCOUNT}})
    other.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "stated"}, "spec": {"hard": {"limits.cpu": "64"}}})
    until("the quota to be counted", lambda: "used" in ((other.get("ResourceQuota", "stated") or {}).get("status") or {}))
    found = plan(other, tmp_path, 1)
    assert "failed quota: stated: must specify limits.cpu for: trainer" in said(found, "admission", "refused")
    assert said(found, "quota", "refused") == ""
