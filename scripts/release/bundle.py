"""The operator as a bundle for the Operator Lifecycle Manager (OLM), which OperatorHub installs from: dist/bundle/.

OLM makes the ClusterServiceVersion's Deployment and account with its rights, CRDs, and objects of few other kinds (its
pkg/controller/operators/catalog/supportedresources.go). It refuses a bundle with any other object, so those are in before-olm.yaml, which
an administrator applies first. So are NetworkPolicies, which only its newest versions take.

The account's rights in the operator's own namespace are a Role among the manifests and not `permissions`: those OLM grants in all
namespaces if it installs the operator for all of them.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.platforms.clusters.install import read_objects
from release.installyaml import KUBECTL
from release.parts import OLDEST_KUBERNETES, Images, crds, operator_objects, version, with_image, write_yaml
from setup import ROOT

JOB, CLUSTER = "manifests/samples/trainingjob-rdma.yaml", "clusters/barcelona.yaml"
"""Examples of a job and of an OpenShift cluster."""
PACKAGE = "lockstep"
CHANNEL = "candidate"
KINDS = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "Service", "PodDisruptionBudget")
BEFORE = {"kubernetes": "before-olm.yaml", "openshift": "before-olm-openshift.yaml"}
BEFORE_COMMENT = """What OLM can't install of Lockstep {version}: the operator's namespace, and bounds of its account. Before you subscribe:
{kubectl} apply -f {name}"""
MODES = {"OwnNamespace": False, "SingleNamespace": False, "MultiNamespace": False, "AllNamespaces": True}
"""Modes in which OLM may install the operator. Its rights are for all namespaces; for one, `lockstep deploy --namespace-only`."""
FIELDS = {
    "TrainingJob": {"spec": ("nodes", "cluster", "image", "script", "training", "suspend"), "status": ("conditions",)},
    "TrainingCluster": {"spec": ("platform", "nodes", "network", "storage"), "status": ()},
}
"""Fields that a console shows with their descriptions, by kind."""
NAMES = {"TrainingJob": "Training job", "TrainingCluster": "Training cluster"}
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64"><rect width="64" height="64" rx="12" fill="#3f51b5"/>\
<g fill="#fff"><rect x="12" y="14" width="40" height="8" rx="4"/><rect x="12" y="28" width="40" height="8" rx="4"/>\
<rect x="12" y="42" width="40" height="8" rx="4"/></g></svg>"""
DESCRIPTION = f"""Lockstep fine-tunes models with DeepSpeed on several GPU machines of your cluster. It starts all ranks of a job
together, goes on from the last checkpoint after a failure, and says in plain words what is wrong.

**Before you install it**, apply `before-olm.yaml` of the bundle's folder (on OpenShift `before-olm-openshift.yaml`): it makes the namespace
`{OPERATOR_NAMESPACE}`, the only one that the operator works in, and objects that OLM can't install.

**Afterwards**, an administrator describes the cluster by a TrainingCluster. Users then create TrainingJobs in their namespaces.

**If you remove the operator**, TrainingJobs, claims and the CustomResourceDefinitions stay, and running jobs train on.
"""
DOCKERFILE = """FROM scratch
{labels}
COPY manifests /manifests/
COPY metadata /metadata/
"""


def labels() -> dict[str, str]:
    prefix = "operators.operatorframework.io.bundle"
    values = {"mediatype": "registry+v1", "manifests": "manifests/", "metadata": "metadata/", "package": PACKAGE, "channels": CHANNEL}
    return {f"{prefix}.{key}.v1": value for key, value in values.items()} | {f"{prefix}.channel.default.v1": CHANNEL}


def cluster_rules(objects: list[Object]) -> list[Any]:
    """Rules of each ClusterRole that is bound to the operator's account in the whole cluster."""
    bound = {item["roleRef"]["name"] for item in objects if item["kind"] == "ClusterRoleBinding"}
    return [item["rules"] for item in objects if item["kind"] == "ClusterRole" and item["metadata"]["name"] in bound]


def beside(objects: list[Object]) -> list[Object]:
    """Objects that the bundle has beside the ClusterServiceVersion and the CRDs, without a namespace: OLM puts them into the operator's."""
    bound = {item["roleRef"]["name"] for item in objects if item["kind"] == "ClusterRoleBinding"}
    return [
        {**item, "metadata": {key: value for key, value in item["metadata"].items() if key != "namespace"}}
        for item in objects
        if item["kind"] in KINDS and item["kind"] != "ClusterRoleBinding"
        if item["kind"] != "ClusterRole" or item["metadata"]["name"] not in bound
    ]


def before(objects: list[Object]) -> list[Object]:
    """Objects that OLM refuses in a bundle."""
    return [item for item in objects if item["kind"] not in (*KINDS, "Deployment", "ServiceAccount")]


def examples() -> list[Object]:
    profile = parse_cluster_file((ROOT / CLUSTER).read_text(encoding="utf-8"), CLUSTER).profile
    cluster = {"apiVersion": profile.api_version, "kind": profile.kind, "metadata": {"name": profile.metadata.name}}
    return [*read_objects(ROOT / JOB), {**cluster, "spec": profile.spec.to_dict()}]


def owned(crd: Object) -> Object:
    """A CRD as the ClusterServiceVersion describes it, with the schema's own texts."""
    names, served = crd["spec"]["names"], crd["spec"]["versions"][0]
    schema = served["schema"]["openAPIV3Schema"]
    described: Object = {
        "name": crd["metadata"]["name"], "kind": names["kind"], "version": served["name"], "displayName": NAMES[names["kind"]],
        "description": schema["description"],
    }  # fmt: skip
    for part, fields in FIELDS[names["kind"]].items():
        texts = {field: schema["properties"][part]["properties"][field].get("description", field) for field in fields}
        described[f"{part}Descriptors"] = [{"path": field, "displayName": field, "description": text} for field, text in texts.items()]
    return described


def cluster_service_version(objects: list[Object], images: Images) -> Object:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    related = {"operator": images.operator, "trainer": images.trainer}
    return {
        "apiVersion": "operators.coreos.com/v1alpha1",
        "kind": "ClusterServiceVersion",
        "metadata": {
            "name": f"{PACKAGE}.v{version()}",
            "labels": {"operatorframework.io/arch.amd64": "supported", "operatorframework.io/os.linux": "supported"},
            "annotations": {
                "alm-examples": json.dumps(examples(), indent=2),
                "capabilities": "Basic Install",
                "categories": "AI/Machine Learning",
                "containerImage": images.operator,
                "operatorframework.io/suggested-namespace": OPERATOR_NAMESPACE,
            },
        },
        "spec": {
            "displayName": "Lockstep",
            "description": DESCRIPTION,
            "version": version(),
            "maturity": "alpha",
            "minKubeVersion": OLDEST_KUBERNETES,
            "keywords": ["training", "fine-tuning", "DeepSpeed", "GPU"],
            "provider": {"name": "Lockstep"},
            "icon": [{"base64data": base64.b64encode(ICON.encode()).decode(), "mediatype": "image/svg+xml"}],
            "installModes": [{"type": mode, "supported": supported} for mode, supported in MODES.items()],
            "install": {
                "strategy": "deployment",
                "spec": {
                    "clusterPermissions": [{"serviceAccountName": OPERATOR_NAME, "rules": rules} for rules in cluster_rules(objects)],
                    "deployments": [{"name": OPERATOR_NAME, "label": deployment["metadata"]["labels"], "spec": deployment["spec"]}],
                },
            },
            "customresourcedefinitions": {"owned": [owned(crd) for crd in crds()]},
            "relatedImages": [{"name": name, "image": image} for name, image in related.items() if image],
        },
    }


def write(dist: Path, images: Images) -> list[Path]:
    """Write the bundle's folder. Raises Failed if the image has no digest."""
    folder = dist / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    objects = with_image(operator_objects("openshift"), images.operator)
    named = {f"{item['metadata']['name']}_{item['kind'].lower()}.yaml": item for item in (*crds(), *beside(objects))}
    named[f"{PACKAGE}.clusterserviceversion.yaml"] = cluster_service_version(objects, images)
    written = [write_yaml(folder / "manifests" / name, [item]) for name, item in named.items()]
    written.append(write_yaml(folder / "metadata/annotations.yaml", [{"annotations": labels()}]))
    for platform, name in BEFORE.items():
        comment = BEFORE_COMMENT.format(version=version(), kubectl=KUBECTL[platform], name=name)
        written.append(write_yaml(folder / name, before(operator_objects(platform)), comment))
    dockerfile = folder / "bundle.Dockerfile"
    dockerfile.write_text(DOCKERFILE.format(labels="\n".join(f"LABEL {key}={value}" for key, value in labels().items())))
    return [*written, dockerfile]
