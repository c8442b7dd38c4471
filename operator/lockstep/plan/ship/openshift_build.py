"""Objects by which OpenShift builds an image itself, without registry or account, and the outcome of its Build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.plan.ship.imagebuild import Build, Image
from lockstep.plan.ship.openshift_images import in_registry, pull_command

DONE = "Complete"
ENDED = (DONE, "Failed", "Error", "Cancelled")
LAST_LINES = 8
"""Lines of a failed build's log that the error repeats: usually the failed command and its output."""


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
        deploy = f"make deploy-cluster CLUSTER=NAME{'' if default else f' OPERATOR_IMAGE={named}'}"
        if beside_operator:
            return f"{deploy}; it lets pods of the cluster file's namespace pull {everywhere}"
        return f"{deploy}; its own pods and those of jobs must be let to pull it: " + "; ".join(
            pull_command(theirs, namespace) for theirs in (OPERATOR_NAMESPACE, "JOBS_NAMESPACE")
        )
    if beside_operator:
        return f"image: {everywhere} in the cluster file; make deploy-cluster lets pods of its namespace pull it"
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
    reason = f"build {name} in namespace {namespace} ended as {build_outcome(build).message}; the end of its log (oc logs -n {namespace} build/{name}):"
    return (reason, *(f"    {line}" for line in lines)) if lines else (f"{reason} it has no log",)
