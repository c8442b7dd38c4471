"""The chart as helm renders it, beside what kustomize builds of the manifests with the patches that a person would write by hand.

Three things differ, and are named here: helm makes the namespace and keeps the CRDs, and kustomize puts a new variable before the others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.files.yamltext import dump_yaml, load_all_yaml
from lockstep.api.objects import Object
from lockstep.plan.cluster.scope import USER_ROLES
from lockstep.plan.ship.deploy import called
from release import chart, parts
from release.programs import program
from support.checkout import ROOT

pytestmark = pytest.mark.long
DIGEST, OTHER = (f"sha256:{letter * 64}" for letter in "ab")
NAME = "registry.example.com/team/lockstep-operator"
IMAGES = parts.Images(f"{NAME}:{parts.version()}@{DIGEST}", f"registry.example.com/team/lockstep-trainer@{DIGEST}")
HOME = "lockstep-system"
KEEP = {"helm.sh/resource-policy": "keep"}
Run = Callable[..., subprocess.CompletedProcess[str]]


@dataclass
class Row:
    """Values, and the patches of kustomize that mean the same: of the Deployment, or of any object."""

    values: Object = field(default_factory=dict)
    deployment: Object = field(default_factory=dict)
    container: Object = field(default_factory=dict)
    image: str = f"{NAME}:{parts.version()}@{DIGEST}"
    overlay: str = "kubernetes"
    monitoring: bool = False
    namespaces: tuple[str, ...] = ()
    lacks: Callable[[Object], bool] = lambda item: False


def pod(**spec: Any) -> Object:
    return {"template": {"spec": spec}}


def is_of_people(item: Object) -> bool:
    return item["kind"] == "CustomResourceDefinition" or item["metadata"]["name"] in USER_ROLES


RESOURCES = {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi", "cpu": "2"}}
ROWS = {
    "the defaults": Row(),
    "replicas": Row({"replicas": 3}, deployment={"replicas": 3}),
    "resources": Row({"resources": RESOURCES}, container={"resources": RESOURCES}),
    "a priority class": Row(
        {"priorityClassName": "system-cluster-critical"}, deployment=pod(priorityClassName="system-cluster-critical")
    ),
    "pull secrets": Row({"imagePullSecrets": [{"name": "pull"}]}, deployment=pod(imagePullSecrets=[{"name": "pull"}])),
    "an image by another digest": Row({"image": {"repository": "r/o", "tag": "", "digest": OTHER}}, image=f"r/o@{OTHER}"),
    "named namespaces": Row({"namespaces": ["team-a", "team-b"]}, namespaces=("team-a", "team-b")),
    "OpenShift": Row({"platform": "openshift"}, overlay="openshift"),
    "monitoring": Row({"monitoring": {"enabled": True}}, monitoring=True),
    "no CRDs": Row({"crds": {"enabled": False}}, lacks=lambda item: item["kind"] == "CustomResourceDefinition"),
    "no operator": Row({"operator": {"enabled": False}}, lacks=lambda item: not is_of_people(item)),
    "all at once": Row(
        {"replicas": 1, "priorityClassName": "p", "namespaces": ["x"], "platform": "openshift", "monitoring": {"enabled": True}},
        deployment={"replicas": 1, **pod(priorityClassName="p")}, overlay="openshift", monitoring=True, namespaces=("x",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chart.write(tmp_path_factory.mktemp("chart"), IMAGES)[0]


@pytest.fixture
def template(packed: Path, tmp_path: Path) -> Run:
    """`helm template` with these values and options."""

    def run(values: Object | None = None, *options: str, namespace: str = HOME) -> subprocess.CompletedProcess[str]:
        (tmp_path / "values.yaml").write_text(dump_yaml(values or {}))
        command = [program("helm"), "template", "lockstep", packed, "-n", namespace, "-f", tmp_path / "values.yaml", *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def patches(row: Row) -> list[Object]:
    """Patches and variables as an administrator of kustomize writes them."""
    variables = [{"name": "LOCKSTEP_AGENT_IMAGE", "value": row.image}]
    if row.namespaces:
        variables.append({"name": "LOCKSTEP_NAMESPACES", "value": ",".join(row.namespaces)})
    container = {"name": "operator", "image": row.image, "env": variables, **row.container}
    spec = row.deployment | pod(**row.deployment.get("template", {}).get("spec", {}), containers=[container])
    made = [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "lockstep-operator", "namespace": HOME}, "spec": spec}]
    if row.namespaces:
        rbac = "rbac.authorization.k8s.io/v1"
        made.append({"$patch": "delete", "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": "lockstep-operator"}})
    return made


def bindings(row: Row) -> list[Object]:
    """What a person gives the operator in named namespaces, as docs/how-to/deploy.md says it."""
    group = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": f"{group}/v1", "kind": "RoleBinding",
            "metadata": {"name": "lockstep-system-operator", "namespace": name, "labels": {"app.kubernetes.io/name": "lockstep"}},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "lockstep-operator"},
            "subjects": [{"kind": "ServiceAccount", "name": "lockstep-operator", "namespace": HOME}],
        }
        for name in row.namespaces
    ]  # fmt: skip


def kustomized(row: Row, folder: Path) -> dict[str, Object]:
    crds = sorted((ROOT / "manifests/crds").iterdir())
    folders = [ROOT / "manifests/operator/overlays" / row.overlay, *([ROOT / "manifests/monitoring"] if row.monitoring else [])]
    resources = [_up(path, folder) for path in (*crds, *folders)]
    (folder / "bindings.yaml").write_text("---\n".join(map(dump_yaml, bindings(row))))
    resources += ["bindings.yaml"] if row.namespaces else []
    stated = {"resources": resources, "patches": [{"patch": yaml.safe_dump(patch)} for patch in patches(row)]}
    (folder / "kustomization.yaml").write_text(dump_yaml(stated))
    done = subprocess.run(
        [program("kustomize"), "build", "--load-restrictor", "LoadRestrictionsNone", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {called(item): item for item in load_all_yaml(done.stdout)}


def _up(path: Path, folder: Path) -> str:
    """Kustomize takes no absolute paths."""
    return "/".join([".."] * (len(folder.parts) - 1)) + str(path)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_helm_makes_of_values_what_kustomize_makes_of_patches(row: Row, template: Run, tmp_path: Path) -> None:
    done = template(row.values)
    assert done.returncode == 0, done.stderr
    made = {called(item): item for item in load_all_yaml(done.stdout) if item}
    folder = tmp_path / "kustomize"
    folder.mkdir()
    wanted = {name: item for name, item in kustomized(row, folder).items() if not row.lacks(item) and item["kind"] != "Namespace"}
    for item in wanted.values():
        if item["kind"] == "CustomResourceDefinition":
            item["metadata"]["annotations"] = item["metadata"].get("annotations", {}) | KEEP
    assert made.keys() == wanted.keys()
    for item in (*made.values(), *wanted.values()):
        if item["kind"] == "Deployment":
            item["spec"]["template"]["spec"]["containers"][0]["env"].sort(key=itemgetter("name"))
    for name, item in made.items():
        assert item == wanted[name], name


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({"image": {"digest": ""}}, (), 'image.digest is "", and the operator\'s image is pulled by its digest only: set it to sha256:'),
        ({"replicas": "two"}, (), "at '/replicas': got string, want integer"),
        ({"replica": 2}, (), "additional properties 'replica' not allowed"),
        ({"image": {"name": "x"}}, (), "at '/image': additional properties 'name' not allowed"),
        ({}, ("--kube-version", "v1.29.9"), "chart requires kubeVersion: >=1.30.0-0 which is incompatible with Kubernetes v1.29.9"),
    ],
)
def test_a_bad_input_is_one_sentence_that_names_it(values: Object, options: tuple[str, ...], words: str, template: Run) -> None:
    done = template(values, *options)
    assert done.returncode != 0 and words in done.stderr and done.stdout == ""


def test_another_namespace_is_refused_with_what_to_type(template: Run) -> None:
    done = template(namespace="other")
    words = "namespace other: Lockstep's operator lives in lockstep-system, so that a cluster has one: helm install NAME CHART -n lockstep"
    assert done.returncode != 0 and words in done.stderr


@pytest.mark.parametrize("version", ["v1.30.0", "v1.34.4-gke.100"])
def test_every_supported_kubernetes_takes_the_chart_also_with_a_vendor_s_version(version: str, template: Run) -> None:
    assert template({}, "--kube-version", version).returncode == 0


def test_helm_s_linter_finds_nothing(packed: Path) -> None:
    done = subprocess.run([program("helm"), "lint", "--strict", packed, "-n", HOME], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
