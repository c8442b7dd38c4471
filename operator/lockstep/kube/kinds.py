"""The few kinds that Lockstep touches, and their paths: they stand in a table, so that no discovery request is ever made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

from lockstep.api.errors import ConfigError


class Kind(NamedTuple):
    """A kind's place in the API: its group and version, its plural, whether it lives in a namespace."""

    api_version: str
    plural: str
    namespaced: bool = True


KINDS: Mapping[str, Kind] = {
    "Namespace": Kind("v1", "namespaces", False),
    "Node": Kind("v1", "nodes", False),
    "Pod": Kind("v1", "pods"),
    "Service": Kind("v1", "services"),
    "ConfigMap": Kind("v1", "configmaps"),
    "Secret": Kind("v1", "secrets"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "Event": Kind("v1", "events"),
    "EndpointSlice": Kind("discovery.k8s.io/v1", "endpointslices"),
    "StatefulSet": Kind("apps/v1", "statefulsets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Job": Kind("batch/v1", "jobs"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": Kind("rbac.authorization.k8s.io/v1", "clusterroles", False),
    "ClusterRoleBinding": Kind("rbac.authorization.k8s.io/v1", "clusterrolebindings", False),
    "CustomResourceDefinition": Kind("apiextensions.k8s.io/v1", "customresourcedefinitions", False),
    "SecurityContextConstraints": Kind("security.openshift.io/v1", "securitycontextconstraints", False),
    "ValidatingAdmissionPolicy": Kind("admissionregistration.k8s.io/v1", "validatingadmissionpolicies", False),
    "ValidatingAdmissionPolicyBinding": Kind("admissionregistration.k8s.io/v1", "validatingadmissionpolicybindings", False),
    "PersistentVolume": Kind("v1", "persistentvolumes", False),
    "ResourceQuota": Kind("v1", "resourcequotas"),
    "LimitRange": Kind("v1", "limitranges"),
    "SriovNetworkNodePolicy": Kind("sriovnetwork.openshift.io/v1", "sriovnetworknodepolicies"),
    "StorageClass": Kind("storage.k8s.io/v1", "storageclasses", False),
    "NetworkAttachmentDefinition": Kind("k8s.cni.cncf.io/v1", "network-attachment-definitions"),
    "PodSecurityPolicyReview": Kind("security.openshift.io/v1", "podsecuritypolicyreviews"),
    "SelfSubjectAccessReview": Kind("authorization.k8s.io/v1", "selfsubjectaccessreviews", False),
    "LocalSubjectAccessReview": Kind("authorization.k8s.io/v1", "localsubjectaccessreviews"),
    "SubjectAccessReview": Kind("authorization.k8s.io/v1", "subjectaccessreviews", False),
    "ServiceMonitor": Kind("monitoring.coreos.com/v1", "servicemonitors"),
    "PrometheusRule": Kind("monitoring.coreos.com/v1", "prometheusrules"),
    "TokenReview": Kind("authentication.k8s.io/v1", "tokenreviews", False),
    "TrainingJob": Kind("lockstep.dev/v1alpha1", "trainingjobs"),
    "TrainingCluster": Kind("lockstep.dev/v1alpha1", "trainingclusters", False),
    "ImageStream": Kind("image.openshift.io/v1", "imagestreams"),
    "BuildConfig": Kind("build.openshift.io/v1", "buildconfigs"),
    "Build": Kind("build.openshift.io/v1", "builds"),
}


def type_meta(kind: str) -> dict[str, str]:
    """An object's kind and apiVersion, which the items of a list don't state."""
    return {"kind": kind, "apiVersion": KINDS[kind].api_version}


def path_of(kind: str, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
    """The path of a collection, an object or one of its subresources; without namespace, of the whole cluster. Raises ConfigError for a
    name that would lead to another object.
    """
    place = KINDS[kind]
    root = f"/apis/{place.api_version}" if "/" in place.api_version else f"/api/{place.api_version}"
    scope = f"/namespaces/{_part(namespace)}" if place.namespaced and namespace else ""
    return "/".join([f"{root}{scope}/{place.plural}", *(_part(part) for part in (name, *subresource.split("/")) if part)])


def _part(name: str) -> str:
    if name in (".", ".."):
        raise ConfigError(f"{name!r} is not a valid name of an object or namespace")
    return quote(name, safe="")
