"""An upgrade while a gang trains: its image can't be pulled, whoever upgrades is killed, it succeeds, and it is taken back."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.platforms.clusters.install import InstallError
from support.checkout import ROOT
from support.clusters.cluster_jobs import API, Jobs
from support.clusters.installed_operator import local_objects, local_profile, objects_of, send
from support.release.upgrades import Gang, KillingProxy, Leaders

LATER = "later"
UNPULLABLE = "localhost/lockstep/none-such:1"


def another_version(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Objects of a version with one field and one right more, whose operator starts anew."""
    changed = copy.deepcopy(objects)
    for item in changed:
        match item["kind"], item["metadata"]["name"]:
            case "CustomResourceDefinition", "trainingjobs.lockstep.dev":
                schema = item["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
                schema["properties"]["spec"]["properties"][LATER] = {"type": "string"}
            case "ClusterRole", "lockstep-operator":
                item["rules"].append({"apiGroups": ["lockstep.dev"], "resources": [LATER], "verbs": ["get"]})
            case "Deployment", _:
                item["spec"]["template"]["metadata"]["annotations"] = {"lockstep.dev/revision": LATER}
    return changed


def knows_later(jobs: Jobs) -> bool:
    """Return True if the API server has the CRD of the other version."""
    crd = jobs.kind("CustomResourceDefinition", "apiextensions.k8s.io/v1").get(name="trainingjobs.lockstep.dev").to_dict()
    return LATER in crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


def deploy_and_be_killed(cluster: Path, folder: Path, namespace: str) -> None:
    """`lockstep deploy` of this version, killed between CRDs and Deployment."""
    described = yaml.safe_load((ROOT / "clusters" / "local.yaml").read_text())
    described["cluster"] |= {"name": "halfway", "namespace": namespace}
    (folder / "halfway.yaml").write_text(yaml.safe_dump(described))
    command = [sys.executable, "-m", "lockstep.cli.main", "deploy", str(folder / "halfway.yaml"), "--no-dev", "--mode", "tcp"]
    KillingProxy(cluster).kill(command, folder, LOCKSTEP_STATE=str(folder))


def test_a_gang_trains_on_under_one_operator_while_an_upgrade_fails_is_killed_succeeds_and_is_taken_back(
    jobs: Jobs, cluster: Path, tmp_path: Path
) -> None:
    jobs.start("trains", "steps.py")
    jobs.until_running("trains")
    gang, present = Gang(jobs, "trains"), local_objects()
    try:
        with Leaders(cluster) as leaders:
            with pytest.raises(InstallError, match=f"the operator's image {UNPULLABLE} can't be pulled"):
                send(another_version(objects_of(local_profile(), UNPULLABLE)))
            assert knows_later(jobs)
            deploy_and_be_killed(cluster, tmp_path, jobs.namespace)
            gang.until_heard()
            assert not knows_later(jobs) and len(leaders.holders) <= 2, "the replica that is left leads"
            send(another_version(present))
            assert knows_later(jobs)
            gang.until_heard()
            send(present)
            assert not knows_later(jobs)
            gang.until_heard()
    finally:
        send(present)
        jobs.delete("TrainingCluster", "halfway", API)
    jobs.end("trains")
