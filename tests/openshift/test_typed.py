"""What a user of OpenShift types with `oc`: a job from its file to its result, and a dev environment's files, shells and size."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import dynamic

from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from openshift.control_plane import UID_RANGE
from support.checkout import ROOT
from support.clusters.cluster_demo import demo_pod
from support.clusters.cluster_jobs import Jobs, until

pytestmark = pytest.mark.long
Typed = Callable[..., subprocess.CompletedProcess[str]]
NAMESPACE = ("-n", "lockstep")
NODES = ("ml-dev-env-0", "ml-dev-env-1")


def well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def deployed(cluster_file: Path, oc: Typed) -> Iterator[str]:
    """What the deployment of the operator and the dev environment has said."""
    yield well(make("deploy-cluster", cluster_file, "MODE=tcp"))
    oc("delete", "tj", "demo", *NAMESPACE, "--ignore-not-found")
    well(make("clean-cluster", cluster_file, "PVCS=1", "YES=1"))


def make(target: str, cluster_file: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", target, f"CLUSTER={cluster_file}", *more], cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )


@pytest.fixture
def jobs(api: dynamic.DynamicClient, deployed: str) -> Jobs:
    return Jobs(api, "lockstep")


def uid_range(oc: Typed, namespace: str) -> range:
    found = json.loads(well(oc("get", "namespace", namespace, "-o", "json")))["metadata"]["annotations"][UID_RANGE]
    first, size = map(int, found.split("/"))
    return range(first, first + size)


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize(("namespace_of", "selector"), [("lockstep-system", ""), ("lockstep", "app=ml-dev-env-multi")])
def test_operator_and_dev_environment_run_under_the_strictest_scc_with_their_namespaces_user_ids(
    oc: Typed, namespace_of: str, selector: str
) -> None:
    pods: list[dict[str, Any]] = json.loads(well(oc("get", "pods", "-n", namespace_of, "-l", selector, "-o", "json")))["items"]
    ids = uid_range(oc, namespace_of)
    assert pods
    for pod in pods:
        assert pod["metadata"]["annotations"]["openshift.io/scc"] == "restricted-v2"
        assert pod["spec"]["securityContext"]["fsGroup"] in ids
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["securityContext"]["runAsUser"] in ids


@pytest.mark.usefixtures("deployed")
def test_a_job_is_applied_followed_waited_for_and_looked_at(oc: Typed, cluster_file: Path) -> None:
    job = yaml.safe_load((ROOT / "manifests/samples/trainingjob.yaml").read_text())
    job["spec"]["cluster"], training = "openshift", job["spec"]["training"]
    training["checkpoint"]["resumeFrom"] = "None"
    training["optimization"]["maxSteps"], training["evaluation"] = 6, training["evaluation"] | {"everySteps": 6, "samples": 16}
    resolved = resolve(TrainingJob.model_validate(job), load_cluster(str(cluster_file)).profile, PlatformDefaults(namespace="lockstep"))
    with demo_pod(resolved):
        assert well(oc("apply", *NAMESPACE, "-f", "-", input=dump_yaml(job))) == "trainingjob.lockstep.dev/demo created\n"
        until("node 0's container", lambda: oc("logs", "demo-0", *NAMESPACE).returncode == 0)
        followed = well(oc("logs", "-f", "demo-0", *NAMESPACE))
    assert re.search(r"^\[rank 0\] Step 6/6 \| Loss: ", followed, re.MULTILINE), followed
    assert well(oc("wait", "tj/demo", *NAMESPACE, "--for=condition=Complete", "--timeout=180s")).endswith("condition met\n")
    header, row = well(oc("get", "tj", "demo", *NAMESPACE)).splitlines()
    assert header.split() == ["NAME", "READY", "STEP", "PROGRESS", "RESTARTS", "REASON", "AGE"]
    assert "Complete" in row
    assert "the job is complete" in well(oc("describe", "tj", "demo", *NAMESPACE))
    assert re.search(r"Complete +trainingjob/demo +\S", well(oc("events", "--for=tj/demo", *NAMESPACE)), re.IGNORECASE)
    assert re.search(r"^ +lora\t<Object>$", well(oc("explain", "tj.spec.training")), re.MULTILINE)
    assert re.search(r"^demo +.*Complete", well(oc("lockstep", "get", *NAMESPACE, "--cluster", str(cluster_file))), re.MULTILINE)
    assert 'demo" deleted' in well(oc("delete", "tj", "demo", *NAMESPACE))


@pytest.mark.usefixtures("deployed")
def test_shells_and_files_of_a_dev_environment(oc: Typed, tmp_path: Path) -> None:
    ids = uid_range(oc, "lockstep")
    assert int(well(oc("exec", NODES[0], *NAMESPACE, "--", "id", "-u"))) in ids
    assert int(well(oc("rsh", *NAMESPACE, NODES[1], "id", "-u"))) in ids
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "by_rsync.py").write_text("print('rsync')\n")
    (tmp_path / "by_cp.py").write_text("print('cp')\n")
    well(oc("rsync", f"{tmp_path}/sent/", f"{NODES[0]}:/workspace/", *NAMESPACE))
    well(oc("cp", str(tmp_path / "by_cp.py"), f"lockstep/{NODES[0]}:/workspace/by_cp.py"))
    for file in ("by_rsync", "by_cp"):
        assert well(oc("exec", NODES[1], *NAMESPACE, "--", "python3", f"/workspace/{file}.py")) == f"{file.removeprefix('by_')}\n"
    well(oc("cp", f"lockstep/{NODES[1]}:/workspace/by_rsync.py", str(tmp_path / "back.py")))
    assert (tmp_path / "back.py").read_text() == "print('rsync')\n"


def test_a_dev_environment_is_scaled_and_runs_a_script_on_the_nodes_that_it_has(oc: Typed, jobs: Jobs, cluster_file: Path) -> None:
    for nodes, synced in ((1, r"\d+ sent"), (2, "nothing to do")):
        assert well(oc("scale", "tj/ml-dev-env", f"--replicas={nodes}", *NAMESPACE)) == "trainingjob.lockstep.dev/ml-dev-env scaled\n"
        scheduled = f"{nodes} of {nodes} pods scheduled"  # (all pods are made anew, and the volume stays)
        until(scheduled, lambda: jobs.condition("ml-dev-env", "PodsScheduled").get("message") == scheduled)  # noqa: B023
        well(oc("wait", "pod", "-l", "app=ml-dev-env-multi", *NAMESPACE, "--for=condition=Ready", "--timeout=180s"))
        assert re.search(rf"^ml-dev-env-0: {synced}", well(make("sync-multi-node", cluster_file)), re.MULTILINE)
        trained = well(make("run-multi-node", cluster_file, "SCRIPT=train_multi_node.py", "ARGS=--epochs 1 --fresh"))
        assert re.search(r"\[rank 0\] Step (\d+)/\1 \|", trained) and f"{nodes} ranks over gloo" in trained, trained
