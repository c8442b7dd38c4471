"""The CustomResourceDefinitions of TrainingJob and TrainingCluster, generated from the models."""

from __future__ import annotations

from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.api.model import Rule
from lockstep.api.names import GROUP, JOB_NAME_MAX, JOB_NAME_PATTERN, VERSION
from lockstep.api.schema import Schema, structural_schema, validation
from lockstep.api.status import TrainingJobStatus

JOB_NAME_RULE = Rule(
    cel=f"self.metadata.name.size() <= {JOB_NAME_MAX} && self.metadata.name.matches('{JOB_NAME_PATTERN}')",
    message=(
        f"metadata.name must be at most {JOB_NAME_MAX} characters: lower-case letters, digits and '-', starting with a letter"
        " (pods, Services and labels are named after it)"
    ),
    holds=None,
)


def training_job_crd() -> dict[str, Any]:
    """The definition of TrainingJob: namespaced, with the status and scale subresources."""
    schema = _root(structural_schema(TrainingJob)) | {"x-kubernetes-validations": [validation(JOB_NAME_RULE)]}
    schema["properties"]["status"] = _without_defaults(structural_schema(TrainingJobStatus))
    version = _version(schema, [
        _column("Ready", "integer", ".status.ranks.ready", "Ranks that run."),
        _column("Step", "integer", ".status.trainer.step", "The optimizer step that training has reached."),
        _column("Progress", "integer", ".status.trainer.progressPercentage", "Per cent of all steps."),
        _column("Restarts", "integer", ".status.restarts", "How often all ranks were started again."),
        _column("Reason", "string", '.status.conditions[?(@.type=="Progressing")].reason', "What the job is doing, in one word."),
        _column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
        _column("Cluster", "string", ".status.cluster.name", "The TrainingCluster in use.", wide=True),
        _column("Fabric", "string", ".status.cluster.transport", "The transport in use.", wide=True),
        _column("Checkpoint", "integer", ".status.checkpoint.lastCommittedStep", "The step of the last durable checkpoint.", wide=True),
    ])  # fmt: skip
    version["subresources"] = {
        "status": {},
        "scale": {"specReplicasPath": ".spec.nodes", "statusReplicasPath": ".status.nodes", "labelSelectorPath": ".status.selector"},
    }
    return _definition("TrainingJob", "trainingjobs", "tj", "Namespaced", version)


def training_cluster_crd() -> dict[str, Any]:
    """The definition of TrainingCluster: cluster-scoped, without status."""
    version = _version(_root(structural_schema(TrainingCluster)), [
        _column("Platform", "string", ".spec.platform", "OpenShift or Kubernetes."),
        _column("GPUs", "integer", ".spec.gpus.perNode", "GPUs a pod takes."),
        _column("Nodes", "integer", ".spec.gpus.defaultNodes", "Nodes of a job that doesn't say."),
        _column("RDMA", "boolean", ".spec.network.rdma.enabled", "Whether nodes have RDMA NICs."),
        _column("Storage", "string", ".spec.storage.mode", "Shared or PerPod."),
        _column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
    ])  # fmt: skip
    return _definition("TrainingCluster", "trainingclusters", "tc", "Cluster", version)


def _root(schema: Schema) -> Schema:
    """metadata and the type are the API server's; a name's bound is stated so that the cost of rules on it is known."""
    plain = {"type": "string", "maxLength": 253}
    schema["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object", "properties": {"name": plain}},
    }
    schema["required"] = ["spec"]
    return schema


def _without_defaults(schema: Any) -> Any:
    """Leave out defaults: a value that the API server added to a status would differ from what the operator wants, which would write it
    again forever.
    """
    if isinstance(schema, list):
        return [_without_defaults(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _without_defaults(value) for key, value in schema.items() if key != "default" or isinstance(value, dict)}


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


def _version(schema: Schema, columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": VERSION, "served": True, "storage": True, "additionalPrinterColumns": columns, "schema": {"openAPIV3Schema": schema}}


def _definition(kind: str, plural: str, short: str, scope: str, version: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower(), "shortNames": [short]},
            "versions": [version],
        },
    }
