"""Scope of an operator: the whole cluster, named namespaces, or its own alone; what is sent for each, and which an account may have (pure).

The manifests describe the whole cluster. The other two have the same rules, granted by RoleBindings or by a Role of the namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lockstep.api.names import ANNOTATION_CLUSTER, APP, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAME, OPERATOR_NAMESPACE, report_url
from lockstep.api.objects import CLAIM, DEFINITION, Object, plural
from lockstep.api.sccs import RDMA_SCC
from lockstep.plan.cluster.facts import ClusterFacts

RBAC = "rbac.authorization.k8s.io"
JOBS_ROLE = f"{OPERATOR_NAME}-jobs"
"""Role of a namespace's own operator: what the ClusterRole grants elsewhere."""
HEARD_ROLE = "lockstep-heard"
"""Role by which everybody may read the operator's Lease."""
NAMED_BINDING = f"{OPERATOR_NAMESPACE}-operator"
"""RoleBinding by which the operator of lockstep-system works in a named namespace. A namespace's own operator has none of this name."""
PROFILE_CONFIG = "lockstep-cluster"
"""ConfigMap of a namespace's own operator, in place of the TrainingCluster."""
PROFILE_KEY = "cluster.json"
PROFILE_FOLDER = "/etc/lockstep/cluster"
USER_ROLES = tuple(f"{APP}-{role}" for role in ("view", "edit", "admin"))
"""ClusterRoles that add to the built-in roles of people."""
UNKNOWN_JOBS = (
    "this cluster doesn't know TrainingJobs, and nothing was sent: an administrator of the cluster types this once, with the files that"
    " were just written; then repeat your command:"
)
"""First line of a refusal, before the commands that send `definitions`."""
ADMISSION = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
"""Bounds of the operator's account, without which it works, too."""
NOT_IN_A_NAMESPACE = (
    "CustomResourceDefinition", "Namespace", "ClusterRole", "ClusterRoleBinding", "TrainingCluster", "SecurityContextConstraints",
    *ADMISSION,
)  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """`namespaces`: none is the whole cluster. `own`: there is one, and the operator lives in it, with rights there and nowhere else."""

    namespaces: tuple[str, ...] = ()
    own: bool = False

    @property
    def home(self) -> str:
        """The operator's namespace."""
        return self.namespaces[0] if self.own else OPERATOR_NAMESPACE

    @property
    def choice(self) -> str:
        """Option of the command line that chooses it; "" for the whole cluster."""
        return "--namespace-only" if self.own else f"--namespaces {','.join(self.namespaces)}" if self.namespaces else ""


EVERYWHERE = Scope()
OWN = Scope(own=True)
"""The choice of an operator of one namespace, before that is known."""


def scoped(objects: list[Object], scope: Scope) -> list[Object]:
    """Objects to send in place of `objects`, which are for the whole cluster."""
    if not scope.namespaces:
        return objects
    if not scope.own:
        return [new for item in objects for new in _in_named(item, scope)]
    return [new for item in objects for new in _in_own(item, scope)]


def outdated(scope: Scope) -> list[Object]:
    """Rights that another scope was given, and this one must not keep: nothing that is applied takes them away."""
    whole = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": OPERATOR_NAME}}
    return [whole] if scope.namespaces and not scope.own else []


def is_outdated(binding: Object, scope: Scope) -> bool:
    """Return True if a RoleBinding of Lockstep's gives the operator of lockstep-system rights in a namespace that `scope` doesn't name."""
    metadata = binding["metadata"]
    is_ours = metadata["name"] == NAMED_BINDING and binding["roleRef"] == _role_ref("ClusterRole", OPERATOR_NAME)
    return is_ours and not scope.own and metadata["namespace"] not in scope.namespaces


def scope_of(deployment: Object) -> Scope:
    """The one that an operator's Deployment was made for."""
    environment = {item["name"]: item.get("value", "") for item in deployment["spec"]["template"]["spec"]["containers"][0].get("env", [])}
    names = tuple(filter(None, environment.get("LOCKSTEP_NAMESPACES", "").split(",")))
    return Scope(names, own=bool(names) and deployment["metadata"]["namespace"] != OPERATOR_NAMESPACE)


def image_of(deployment: Object) -> str:
    """The operator's image, which pods of jobs start with, too."""
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


NO_OPERATOR = "no operator is installed: lockstep deploy CLUSTER, or run the job without one (lockstep run --in-namespace)"


def unserved(facts: ClusterFacts) -> str:
    """Reason that no operator works in the namespace, as far as this person may see, and who changes that; "" where one does.

    Judges the operator's Deployment, and in the namespace NAMED_BINDING and a ServiceAccount of an operator of its own.
    """
    operator, binding = facts.object("Deployment", OPERATOR_NAME), facts.object("RoleBinding", NAMED_BINDING)
    namespace, deployment = facts.namespace, operator.first
    if deployment is None:
        return NO_OPERATOR if operator.seen else ""
    is_elsewhere = deployment["metadata"]["namespace"] != namespace
    scope = scope_of(deployment)
    if scope.own and namespace in scope.namespaces:
        return ""
    if is_elsewhere and facts.object("ServiceAccount", OPERATOR_NAME).first is not None:
        return (
            f"namespace {namespace} has ServiceAccount {OPERATOR_NAME}, as if it had an operator of its own, and no Deployment of that"
            f" name: repeat lockstep deploy CLUSTER --namespace-only, or kubectl delete serviceaccount {OPERATOR_NAME} -n {namespace}"
        )
    if scope.namespaces and namespace not in scope.namespaces:
        wider = ",".join((*scope.namespaces, namespace))
        return (
            f"the operator works in {', '.join(scope.namespaces)} only: an administrator adds {namespace} (lockstep deploy CLUSTER"
            f" --namespaces {wider}), or an admin of the namespace deploys one there (lockstep deploy CLUSTER --namespace-only)"
        )
    if scope.namespaces and binding.seen and binding.first is None:
        return (
            f"the operator has lost its rights in namespace {namespace}: an administrator repeats lockstep deploy CLUSTER --namespaces"
            f" {','.join(scope.namespaces)}"
        )
    return ""


def _role_ref(kind: str, name: str) -> Object:
    return {"apiGroup": RBAC, "kind": kind, "name": name}


def _binding(name: str, namespace: str, role: Object, home: str) -> Object:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_NAME: APP}},
        "roleRef": role,
        "subjects": [{"kind": "ServiceAccount", "name": OPERATOR_NAME, "namespace": home}],
    }


def _in_named(item: Object, scope: Scope) -> list[Object]:
    if item["kind"] == "ClusterRoleBinding" and item["metadata"]["name"] == OPERATOR_NAME:
        return [_binding(NAMED_BINDING, name, item["roleRef"], scope.home) for name in scope.namespaces]
    if item["kind"] == "Deployment":
        _set_environment(item, {"LOCKSTEP_NAMESPACES": ",".join(scope.namespaces)})
    return [item]


def _in_own(item: Object, scope: Scope) -> list[Object]:
    kind, metadata = item["kind"], item["metadata"]
    if kind == "TrainingCluster":
        return [_profile_config(item, scope.home)]
    if kind == "ClusterRole" and metadata["name"] == OPERATOR_NAME:
        # Pods are deleted only on Nodes that are lost, and this operator sees none.
        rules = [rule for rule in item["rules"] if (rule["resources"], rule["verbs"]) != (["pods"], ["delete"])]
        role = {"apiVersion": f"{RBAC}/v1", "kind": "Role", "metadata": {**metadata, "name": JOBS_ROLE, "namespace": scope.home}}
        return [
            role | {"rules": rules},
            _binding(JOBS_ROLE, scope.home, _role_ref("Role", JOBS_ROLE), scope.home),
        ]
    if kind in NOT_IN_A_NAMESPACE or metadata["name"] == HEARD_ROLE:  # who deploys here may give rights to nobody else
        return []
    if metadata.get("namespace") == OPERATOR_NAMESPACE:
        item = {**item, "metadata": {**metadata, "namespace": scope.home}}
    if kind == "RoleBinding":
        subjects = [{**s, "namespace": scope.home} if s.get("namespace") == OPERATOR_NAMESPACE else s for s in item["subjects"]]
        return [{**item, "subjects": subjects}]
    if kind == "Deployment":
        _set_environment(
            item,
            {
                "LOCKSTEP_NAMESPACE": scope.home,
                "LOCKSTEP_NAMESPACES": scope.home,
                "LOCKSTEP_REPORT_URL": report_url(scope.home),
                "LOCKSTEP_METRICS_PORT": "0",  # who may read them, only a cluster-wide right tells
                "LOCKSTEP_CLUSTER": f"{PROFILE_FOLDER}/{PROFILE_KEY}",
            },
        )
        pod = item["spec"]["template"]["spec"]
        pod["volumes"].append({"name": "cluster", "configMap": {"name": PROFILE_CONFIG}})
        pod["containers"][0]["volumeMounts"].append({"name": "cluster", "mountPath": PROFILE_FOLDER, "readOnly": True})
    return [item]


def _set_environment(deployment: Object, values: dict[str, str]) -> None:
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [*(v for v in container["env"] if v["name"] not in values), *({"name": k, "value": v} for k, v in values.items())]


def _profile_config(profile: Object, namespace: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": PROFILE_CONFIG, "namespace": namespace, "labels": {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}},
        "data": {PROFILE_KEY: json.dumps(profile, indent=2, sort_keys=True) + "\n"},
    }


def with_profile_hash(objects: list[Object]) -> list[Object]:
    """A namespace's own operator reads its cluster when it starts: another one starts it again."""
    config = next((item for item in objects if item["kind"] == "ConfigMap" and item["metadata"]["name"] == PROFILE_CONFIG), None)
    for item in objects:
        if config is not None and item["kind"] == "Deployment":
            metadata = item["spec"]["template"]["metadata"]
            digest = hashlib.sha256(config["data"][PROFILE_KEY].encode()).hexdigest()[:16]
            metadata["annotations"] = {**metadata.get("annotations", {}), ANNOTATION_CLUSTER: digest}
    return objects


def definitions(objects: list[Object]) -> list[Object]:
    """Return what an administrator sends once before an admin of a namespace can deploy an operator there, of the objects for the whole
    cluster.
    """
    uses_scc = any(item["kind"] == "RoleBinding" and item["metadata"]["name"] == RDMA_SCC for item in objects)
    names = {*USER_ROLES, RDMA_SCC} if uses_scc else {*USER_ROLES}
    return [item for item in objects if item["kind"] == "CustomResourceDefinition" or item["metadata"]["name"] in names]


class Admission(Enum):
    """Next step of a deployment."""

    AS_PLANNED = "send what the rights allow"
    OFFER_OWN = "offer an operator of one namespace"
    NEED_DEFINITIONS = "an administrator must define TrainingJobs first"


@dataclass(frozen=True)
class AccountStanding:
    """Rights of an account on a cluster, and what is there already."""

    lacks: tuple[Object, ...] = ()
    """Objects of the operator of the whole cluster that the account may not send."""
    may_have_own: bool = False
    """It may send all objects of an operator of one namespace."""
    has_operator: bool = False
    """An operator of the whole cluster, or of named namespaces, is there."""
    knows_jobs: bool = True
    """The API server knows TrainingJobs."""

    @property
    def missing(self) -> str:
        """Sentence that says what the account lacks, without its end."""
        kinds = list(dict.fromkeys(plural(item["kind"]) for item in self.lacks if "namespace" not in item["metadata"]))
        places = list(dict.fromkeys(item["metadata"]["namespace"] for item in self.lacks if "namespace" in item["metadata"]))
        parts = [*([", ".join(kinds)] if kinds else []), *(f"objects of namespace {place}" for place in places)]
        return f"your account may not install an operator of the whole cluster (it may not change {' and '.join(parts)})"


def needed_for_operator(objects: Iterable[Object]) -> list[Object]:
    """Return the objects that an operator of the whole cluster needs. CRDs and namespaces may exist already, and claims belong to the
    account that made them.
    """
    own = [item for item in objects if item["metadata"].get("namespace", OPERATOR_NAMESPACE) == OPERATOR_NAMESPACE]
    return [item for item in own if item["kind"] not in (DEFINITION, "Namespace", CLAIM, *ADMISSION)]


def admission(standing: AccountStanding) -> Admission:
    """Return how a deployment goes on if no option states the operator's namespaces."""
    if not standing.lacks or standing.has_operator or not standing.may_have_own:
        return Admission.AS_PLANNED
    return Admission.OFFER_OWN if standing.knows_jobs else Admission.NEED_DEFINITIONS
