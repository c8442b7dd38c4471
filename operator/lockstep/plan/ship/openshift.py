"""OpenShift's own registry and builds: how pods of any namespace name an image there and who may pull it, the objects by which OpenShift
builds one itself, without registry or account, and the outcome of its Build (pure).

An ImageStream's short name (lockstep-operator:0.1.0) means something only to pods of its own namespace; the agent's image is needed by
pods of the jobs' namespace, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.api.names import APP, LABEL_MANAGED_BY, LABEL_NAME, OPERATOR_NAMESPACE
from lockstep.plan.ship.imagebuild import Build, Image

if TYPE_CHECKING:
    from lockstep.api.cluster import Platform

REGISTRY = "image-registry.openshift-image-registry.svc:5000"
PULLER = "system:image-puller"
DONE = "Complete"
ENDED = (DONE, "Failed", "Error", "Cancelled")
LAST_LINES = 8
"""Lines of a failed build's log that the error repeats: usually the failed command and its output."""


def in_registry(image: str, namespace: str) -> str:
    """The name of an ImageStream's image everywhere in the cluster."""
    return f"{REGISTRY}/{namespace}/{image}"


def operator_reference(image: str, platform: Platform, namespace: str = OPERATOR_NAMESPACE) -> str:
    """The operator's image as pods of every namespace name it: on OpenShift, one without a registry is an ImageStream's beside the
    operator.
    """
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


def objects(build: Build) -> list[dict[str, Any]]:
    """The ImageStream that the image goes to, and the BuildConfig that makes it of the files that are sent."""
    labels = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/component": str(build.image)}
    metadata = {"name": build.name, "labels": labels}
    arguments = [dict(zip(("name", "value"), argument.split("=", 1), strict=True)) for argument in build.build_arguments]
    return [
        # A pod of this namespace may name it as it would an image: lockstep-operator:0.1.0.
        {"apiVersion": "image.openshift.io/v1", "kind": "ImageStream", "metadata": metadata, "spec": {"lookupPolicy": {"local": True}}},
        {
            "apiVersion": "build.openshift.io/v1",
            "kind": "BuildConfig",
            "metadata": metadata,
            "spec": {
                "source": {"type": "Binary", "binary": {}},
                "strategy": {"type": "Docker", "dockerStrategy": {"dockerfilePath": build.containerfile, "buildArgs": arguments}},
                "output": {"to": {"kind": "ImageStreamTag", "name": build.stream_tag}},
                "mountTrustedCA": True,  # the cluster's own certificates, for pip
                "runPolicy": "SerialLatestOnly",
                "successfulBuildsHistoryLimit": 2,
                "failedBuildsHistoryLimit": 2,
            },
        },
    ]


def next_step(build: Build, namespace: str) -> str:
    """Command to type so that jobs use the image; their pods may be in other namespaces than this one."""
    everywhere, beside_operator = in_registry(build.stream_tag, namespace), namespace == OPERATOR_NAMESPACE
    if build.image is Image.OPERATOR:
        named = build.stream_tag if beside_operator else everywhere
        default = beside_operator and build.stream_tag == f"{build.name}:{build.version}"
        deploy = f"lockstep deploy NAME{'' if default else f' --image {named}'}"
        if beside_operator:
            return f"{deploy}; it lets pods of the cluster file's namespace pull {everywhere}"
        return f"{deploy}; its own pods and those of jobs must be let to pull it: " + "; ".join(
            pull_command(theirs, namespace) for theirs in (OPERATOR_NAMESPACE, "JOBS_NAMESPACE")
        )
    if beside_operator:
        return f"image: {everywhere} in the cluster file; lockstep deploy NAME lets pods of its namespace pull it"
    here = f"image: {build.stream_tag} in the cluster file, where jobs run in namespace {namespace}"
    return f"{here}; where they run in another one, image: {everywhere} and: {pull_command('JOBS_NAMESPACE', namespace)}"


@dataclass(frozen=True)
class BuildOutcome:
    """State of a Build. `digest` is the image's in the internal registry, which OpenShift doesn't always tell."""

    ended: bool
    complete: bool
    message: str = ""
    digest: str = ""


def build_outcome(build: dict[str, Any]) -> BuildOutcome:
    """Outcome of a Build as the API server has it."""
    status = build.get("status") or {}
    phase = str(status.get("phase", "New"))
    message = ": ".join(str(status[key]).rstrip(".") for key in ("reason", "message") if status.get(key))
    digest = str(((status.get("output") or {}).get("to") or {}).get("imageDigest") or "")
    return BuildOutcome(phase in ENDED, phase == DONE, f"{phase} ({message})" if message else phase, digest)


def openshift_failure(build: dict[str, Any], namespace: str, log: Sequence[str]) -> tuple[str, ...]:
    """Lines that tell of a build that did not complete: OpenShift's reason, and the end of its log."""
    name = build["metadata"]["name"]
    snippet = str((build.get("status") or {}).get("logSnippet") or "").splitlines()
    lines = [line for line in log or snippet if line.strip()][-LAST_LINES:]
    reason = (
        f"build {name} in namespace {namespace} ended as {build_outcome(build).message}; the end of its log (oc logs -n {namespace}"
        f" build/{name}):"
    )
    return (reason, *(f"    {line}" for line in lines)) if lines else (f"{reason} it has no log",)
