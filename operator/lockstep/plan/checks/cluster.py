"""Every finding about a file held against the cluster that it describes."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.api.files.clusterfile import ClusterFile
from lockstep.plan.checks.finding import Finding, failed, warning
from lockstep.plan.checks.place import lint_namespace, lint_nodes, lint_rights, lint_storage
from lockstep.plan.checks.quota import lint_quota
from lockstep.plan.checks.rails import lint_policies, lint_rails
from lockstep.plan.cluster.facts import ClusterFacts


def lint_against(found: ClusterFile, facts: ClusterFacts) -> Iterator[Finding]:
    """In the order in which they should be mended."""
    spec = found.profile.spec
    yield from lint_namespace(facts)
    yield from _platform(found, facts)
    yield from lint_nodes(spec, facts)
    yield from lint_storage(spec, facts)
    if spec.network.rdma.enabled:
        yield from lint_rails(spec, facts)
        yield from lint_policies(spec, facts)
    yield from lint_rights(spec, facts)
    yield from lint_quota(spec, facts)


def _platform(found: ClusterFile, facts: ClusterFacts) -> Iterator[Finding]:
    stated = found.profile.spec.platform.value
    if stated == "Kubernetes" and facts.is_openshift:
        yield warning(
            "cluster.platform", "it is kubernetes, but the cluster has SCCs, which refuse a stated user id", "write platform: openshift"
        )
    elif stated == "OpenShift" and not facts.is_openshift:
        said = "it is openshift (the default), but the cluster has no SCC that hands out user ids: pods would run as their image's root, or be refused"
        yield failed("cluster.platform", said, "write platform: kubernetes")
