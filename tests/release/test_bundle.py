"""The OLM bundle: operator-framework's own validators take it, and what OLM makes of it runs a job."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.objects import Object
from lockstep.platforms.clusters.install import read_objects
from release.programs import SOURCES, program
from support.clusters.cluster_jobs import Jobs, until
from support.release.files import Kubectl, done, run_to_its_end, until_operates

pytestmark = pytest.mark.long
SYSTEM, RBAC = "lockstep-system", "rbac.authorization.k8s.io"


def findings(folder: Path) -> tuple[int, str]:
    ended = subprocess.run([program("bundle-validate"), str(folder)], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_the_validators_find_nothing(dist: Path) -> None:
    assert findings(dist / "bundle") == (0, "")


VERSION, CRD = "manifests/lockstep.clusterserviceversion.yaml", "manifests/trainingjobs.lockstep.dev_customresourcedefinition.yaml"
BUDGET = "manifests/lockstep-operator_poddisruptionbudget.yaml"


@pytest.mark.parametrize(
    "file, old, new, finding",
    [
        (VERSION, "version: v1alpha1", "version: v1", 'owned CRD "lockstep.dev/v1, Kind=TrainingCluster" not found'),
        (VERSION, "supported: true", "supported: false", "none of InstallModeTypes are supported"),
        (VERSION, "AI/Machine Learning", "Training", '"Training" is not in the set of standard categories'),
        (CRD, "name: trainingjobs.lockstep.dev", "name: jobs.lockstep.dev", "must be spec.names.plural"),
        ("metadata/annotations.yaml", "candidate", "new", "not following the recommended naming convention"),
        (BUDGET, "maxUnavailable: 1", "maxUnavailable: 0", "maxUnavailable field cannot be set to 0"),
    ],
)
def test_the_validators_name_what_is_wrong(dist: Path, tmp_path: Path, file: str, old: str, new: str, finding: str) -> None:
    path = shutil.copytree(dist / "bundle", tmp_path / "bundle") / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    code, said = findings(tmp_path / "bundle")
    assert code == 1 and finding in said


def test_a_folder_without_a_bundle_is_said_in_a_sentence(tmp_path: Path) -> None:
    assert findings(tmp_path) == (2, f"unable to find a csv in bundle directory {tmp_path}\n")


def test_olm_s_own_definition_takes_the_clusterserviceversion_strictly(dist: Path, kubectl: Kubectl, namespace: str) -> None:
    command = ["go", "list", "-m", "-f", "{{.Dir}}", "github.com/operator-framework/api"]
    module = subprocess.run(command, cwd=SOURCES / "bundle-validate", capture_output=True, text=True, check=True).stdout.strip()
    definition = ("-f", f"{module}/crds/operators.coreos.com_clusterserviceversions.yaml")
    done(kubectl, "create", *definition)
    try:
        until("it is served", lambda: kubectl("wait", "--for=condition=Established", *definition).returncode == 0)
        done(kubectl, "create", "--validate=strict", "-n", namespace, "-f", str(dist / "bundle" / VERSION))
    finally:
        kubectl("delete", *definition)


def made_by_olm(folder: Path) -> Iterator[Object]:
    """Yield what OLM makes of a bundle in the operator's namespace, for all namespaces (its rbac.go and step_ensurer.go)."""
    manifests = [item for path in sorted((folder / "manifests").iterdir()) for item in read_objects(path)]
    [version] = [item for item in manifests if item["kind"] == "ClusterServiceVersion"]
    strategy, name = version["spec"]["install"]["spec"], version["metadata"]["name"]
    yield from (item for item in manifests if item is not version)
    for number, permission in enumerate(strategy["clusterPermissions"]):
        account = {"kind": "ServiceAccount", "name": permission["serviceAccountName"], "namespace": SYSTEM}
        role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": f"{name}-{number}"}
        metadata = {"name": role["name"]}
        yield {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account["name"]}}
        yield {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, "rules": permission["rules"]}
        yield {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": metadata, "roleRef": role, "subjects": [account]}
    for one in strategy["deployments"]:
        metadata = {"name": one["name"], "labels": one["label"]}
        yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": one["spec"]}


def test_the_operator_that_olm_makes_of_it_runs_a_job(mirrored: Path, kubectl: Kubectl, jobs: Jobs, request: pytest.FixtureRequest) -> None:
    made = dump_all_yaml(made_by_olm(mirrored / "bundle"))
    before = ("-f", str(mirrored / "bundle/before-olm.yaml"))
    request.addfinalizer(lambda: kubectl("delete", "--ignore-not-found", *before))
    request.addfinalizer(lambda: kubectl("delete", "--ignore-not-found", "-n", SYSTEM, "-f", "-", input=made))
    done(kubectl, "apply", *before)
    done(kubectl, "apply", "--server-side", "-n", SYSTEM, "-f", "-", input=made)
    until_operates(kubectl)
    run_to_its_end(jobs)
