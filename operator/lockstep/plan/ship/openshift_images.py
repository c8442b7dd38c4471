"""Images in OpenShift's own registry: how pods of any namespace name them, and who may pull them (pure).

An ImageStream's short name (lockstep-operator:0.1.0) means something only to pods of its own namespace; the agent's image is needed by
pods of the jobs' namespace, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lockstep.api.names import APP, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAMESPACE

if TYPE_CHECKING:
    from lockstep.api.cluster import Platform

REGISTRY = "image-registry.openshift-image-registry.svc:5000"
PULLER = "system:image-puller"


def in_registry(image: str, namespace: str) -> str:
    """The name of an ImageStream's image everywhere in the cluster."""
    return f"{REGISTRY}/{namespace}/{image}"


def operator_reference(image: str, platform: Platform, namespace: str = OPERATOR_NAMESPACE) -> str:
    """The operator's image as pods of every namespace name it: on OpenShift, one without a registry is an ImageStream's beside the operator."""
    from lockstep.api.cluster import Platform

    return in_registry(image, namespace) if platform is Platform.OPENSHIFT and "/" not in image else image


def short_name(image: str, namespace: str = OPERATOR_NAMESPACE) -> str:
    """The opposite: as people name it."""
    return image.removeprefix(in_registry("", namespace))


def repository(image: str) -> str:
    """The reference without its tag or digest."""
    folder, slash, name = image.rpartition("/")
    return f"{folder}{slash}{re.split('[:@]', name)[0]}"


def puller(namespace: str) -> dict[str, Any]:
    """Lets the pods of `namespace` pull what was built beside the operator. One object for each namespace that jobs run in."""
    labels = {LABEL_NAME: APP, LABEL_MANAGED_BY: APP}
    group = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": service_accounts(namespace)}
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": f"lockstep-image-puller-{namespace}", "namespace": OPERATOR_NAMESPACE, "labels": labels},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": PULLER},
        "subjects": [group],
    }


def pull_command(theirs: str, namespace: str) -> str:
    """Command by which an administrator of `namespace` lets pods of another one pull its images."""
    return f"oc policy add-role-to-group {PULLER} {service_accounts(theirs)} -n {namespace}"


def service_accounts(namespace: str) -> str:
    """The group of all of a namespace's."""
    return f"system:serviceaccounts:{namespace}"
