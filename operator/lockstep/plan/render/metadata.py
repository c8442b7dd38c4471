"""Labels and annotations of a job's pods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.api import names
from lockstep.api.cluster import Rdma
from lockstep.api.job import JobType
from lockstep.api.podtemplate import PodTemplate
from lockstep.plan.layers import Notice
from lockstep.plan.render.fabric import Transport, rail_networks

if TYPE_CHECKING:
    from lockstep.plan.render.resolve import Resolved


def annotation_refusals(template: PodTemplate, transport: Transport, rdma: Rdma) -> list[Notice]:
    """Annotations that Lockstep needs for itself."""
    taken = [names.ANNOTATION_RUN_HASH]
    if transport is Transport.RDMA and rdma.networks:
        taken.append(names.ANNOTATION_NETWORKS)
    return [
        Notice(
            "AnnotationReserved",
            f"podTemplate.annotations[{key}] is set by Lockstep itself (networks: from the cluster's rails): remove it",
        )
        for key in taken
        if key in template.annotations
    ]


def pod_labels(resolved: Resolved) -> dict[str, str]:
    return {**resolved.job.spec.pod_template.labels, **app_labels(resolved), **names.job_labels(resolved.name)}


def app_labels(resolved: Resolved) -> dict[str, str]:
    """What people select the pods and the claims of a dev environment by."""
    is_interactive = resolved.job.spec.type is JobType.INTERACTIVE
    return {names.LABEL_APP: names.app_label(resolved.name)} if is_interactive else {}


def pod_annotations(resolved: Resolved) -> dict[str, str]:
    """The job's own, which container kubectl means where nobody says, and for RDMA the networks that Multus attaches."""
    own = {names.ANNOTATION_DEFAULT_CONTAINER: names.CONTAINER, **resolved.job.spec.pod_template.annotations}
    rdma = resolved.profile.spec.network.rdma
    if resolved.transport is not Transport.RDMA or not rdma.networks:
        return dict(own)
    return {**own, names.ANNOTATION_NETWORKS: rail_networks(rdma)}
