"""A cluster's readiness for jobs, from what one person may see of it: what is right, what is wrong, and how to mend it (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import CLAIM, DEFINITION, Object, is_true
from lockstep.plan.checks.needs import claim_findings, cluster_claims, object_findings, service_account
from lockstep.plan.checks.site import check_nodes, check_rails, check_storage, usable_nodes
from lockstep.plan.cluster.facts import DNS_SERVICES, NOT_YOURS, ClusterFacts, Sight
from lockstep.plan.cluster.finding import Finding, Outcome, failed, fine, unknown, warning
from lockstep.plan.cluster.scope import image_of, unserved
from lockstep.plan.discovery.nodes import host
from lockstep.plan.render.fabric import GPU_RESOURCE
from lockstep.plan.render.resolve import describe_default_image
from lockstep.plan.ship.deploy import State, state_of
from lockstep.plan.waiting.nodes import allocatable
from lockstep_spec.choices import StorageMode
from lockstep_spec.words import number_of

SERVICE = "kubernetes.io/service-name"
OF_A_PLAN = {Outcome.REFUSED: Outcome.FAILED, Outcome.WAITS: Outcome.WARNING}


def examine(file: ClusterFile, facts: ClusterFacts, crds: Mapping[str, Object]) -> Iterator[Finding]:
    """Every finding, in the order in which they should be mended. `crds`: those of this version, by name."""
    spec = file.profile.spec
    yield from _rights(facts)
    yield from _definitions(facts, crds, file.cluster.name)
    yield _operator(facts, file.cluster.name)
    yield _profile(facts, file)
    yield from _image(facts, file)
    yield from _as_here("service account", object_findings([service_account(spec)], facts))
    yield _dns(facts)
    yield from _nodes(facts, spec)
    storage = list(_about("storage", check_storage(spec, facts)))
    yield from storage
    if spec.storage.mode is StorageMode.SHARED:
        yield from _claims(spec, facts, can_make=all(one.outcome is not Outcome.FAILED for one in storage))
    yield from _fabric(facts, spec)


def _about(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that lint has, too, as doctor tells them: the file's key stands in the message."""
    for one in findings:
        yield replace(one, subject=subject, message=f"{one.subject}: {one.message}")


def _as_here(subject: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that a plan has, too, as doctor tells them: what refuses a job fails."""
    for one in findings:
        yield replace(one, subject=subject, outcome=OF_A_PLAN.get(one.outcome, one.outcome))


def _claims(spec: TrainingClusterSpec, facts: ClusterFacts, *, can_make: bool) -> Iterator[Finding]:
    """Judge the shared claims. `can_make` False: a finding about their class says why none can be made, so only those that are there."""
    claims, needed = facts.list(CLAIM), cluster_claims(spec)
    there = {claim["metadata"]["name"] for claim in claims.items}
    judged = [claim for claim in needed if can_make or not claims.seen or claim.name in there]
    yield from _as_here("claims", claim_findings(judged, facts))


def _rights(facts: ClusterFacts) -> Iterator[Finding]:
    lacking = [what for what, allowed in facts.rights.items() if not allowed and (facts.jobs is Sight.SEEN or "TrainingJob" not in what)]
    where = f"in namespace {facts.namespace}"
    if lacking:
        fix = f"an administrator: kubectl create rolebinding USER-edit --clusterrole=edit --user=USER -n {facts.namespace}"
        yield failed("rights", f"you may not {', '.join(lacking)} {where}", fix)
    elif facts.rights:
        yield fine("rights", f"you may {', '.join(what for what, allowed in facts.rights.items() if allowed)} {where}")


def _definitions(facts: ClusterFacts, expected: Mapping[str, Object], cluster: str) -> Iterator[Finding]:
    deploy = f"lockstep deploy {cluster} (needs the rights of an administrator)"
    if not facts.list(DEFINITION).seen:
        yield {
            Sight.FORBIDDEN: unknown("CRDs", f"whether this cluster knows TrainingJobs: {NOT_YOURS}"),
            Sight.NO_SUCH_KIND: failed(
                "CRDs",
                "this cluster doesn't know TrainingJobs",
                f"lockstep deploy {cluster}; without the rights for that, it prints what an administrator types",
            ),
            Sight.SEEN: unknown("CRDs", "TrainingJobs are known here; of which version, you may not see"),
        }[facts.jobs]
        return
    present = {item["metadata"]["name"]: item for item in facts.list(DEFINITION).items}
    states = {name: state_of(crd, present.get(name)) for name, crd in expected.items()}
    absent, older = ([name for name, state in states.items() if state is which] for which in (State.MISSING, State.DIFFERS))
    if absent:
        yield failed("CRDs", f"{', '.join(absent)} not installed", deploy)
    elif older:
        yield warning("CRDs", f"{', '.join(older)} of another version than this lockstep's", deploy)
    else:
        yield fine("CRDs", f"{len(expected)} installed, of this version")


def _operator(facts: ClusterFacts, cluster: str) -> Finding:
    operator = facts.object("Deployment", OPERATOR_NAME)
    if not operator.seen:
        return unknown("operator", f"you may not look into namespace {OPERATOR_NAMESPACE}")
    deployment = operator.first
    if deployment is None:
        return failed("operator", "not installed", f"lockstep deploy {cluster}; or without one: lockstep run --in-namespace")
    why = unserved(facts)
    if why:
        return failed("operator", f"none works in namespace {facts.namespace}", why)
    home = deployment["metadata"].get("namespace", OPERATOR_NAMESPACE)
    ready, replicas = deployment.get("status", {}).get("readyReplicas", 0), deployment["spec"].get("replicas", 1)
    counted = f"{ready} of {replicas} replicas ready"
    if ready < replicas and facts.operator_trouble:
        outcome = Outcome.WARNING if ready else Outcome.FAILED
        return Finding("operator", outcome, f"{counted}: {facts.operator_trouble}", f"kubectl describe pods -n {home}")
    if not ready:
        return failed("operator", counted, f"kubectl logs -n {home} deploy/{deployment['metadata']['name']}")
    outcome, fix = (Outcome.OK, "") if ready >= replicas else (Outcome.WARNING, f"kubectl get pods -n {home}")
    return Finding("operator", outcome, counted, fix)


def _profile(facts: ClusterFacts, file: ClusterFile) -> Finding:
    name = file.profile.metadata.name
    deploy = f"lockstep deploy {file.cluster.name}"
    profile = facts.object("TrainingCluster", name)
    if not profile.seen:
        return unknown("cluster", f"whether TrainingCluster {name} is as its file says: {NOT_YOURS}")
    if profile.first is None:
        return failed("cluster", f"TrainingCluster {name} is not on the cluster", deploy)
    differs = differing_keys(file.profile.spec, profile.first)
    if differs:
        return warning("cluster", f"{name} differs from its file in {', '.join(differs)}", deploy)
    return fine("cluster", f"{name} is as its file says")


def differing_keys(spec: TrainingClusterSpec, profile: Object) -> list[str]:
    """Sections in which the TrainingCluster on the cluster is not as the file has it."""
    stated, there = spec.to_dict(), {**profile["spec"]}
    for sections in (stated, there):  # --mode of the deployment is not the file's
        if sections.get("network"):
            sections["network"] = {key: value for key, value in sections["network"].items() if key != "mode"}
    return sorted(key for key, value in stated.items() if there.get(key) != value)


def _image(facts: ClusterFacts, file: ClusterFile) -> Iterator[Finding]:
    """The image of jobs on a cluster that names none."""
    deployment = facts.object("Deployment", OPERATOR_NAME).first
    if file.profile.spec.image is None and deployment is not None:
        message, is_known = describe_default_image(image_of(deployment))
        if is_known:
            yield fine("image", message)
        else:
            yield warning("image", message, "image: in the cluster file, or in each job")


def _dns(facts: ClusterFacts) -> Finding:
    """Pods of a job find each other by name."""
    slices = facts.list("EndpointSlice")
    if not slices.seen:
        return unknown("DNS", f"you may not look at the endpoints of {' or '.join(DNS_SERVICES)}")
    ready = ready_endpoints(slices.items)
    if not ready:
        return unknown("DNS", f"there is neither {' nor '.join(DNS_SERVICES)}: preflight's check names shows whether pods find each other")
    name, count = max(ready.items(), key=lambda item: item[1])
    if count:
        return fine("DNS", f"{name} has {number_of(count, 'ready endpoint')}")
    fix = f"kubectl get pods -n {name.partition('/')[0]}"
    return failed("DNS", f"{name} has no ready endpoint: pods can't find each other by name", fix)


def ready_endpoints(slices: Iterable[Object]) -> dict[str, int]:
    """Number of ready endpoints of each of DNS_SERVICES that has EndpointSlices."""
    ready: dict[str, int] = {}
    for part in slices:
        service = part["metadata"]["labels"][SERVICE]
        name = next(name for name in DNS_SERVICES if name.endswith(f"/{service}"))
        endpoints = part.get("endpoints") or []
        ready[name] = ready.get(name, 0) + sum((endpoint.get("conditions") or {}).get("ready") is not False for endpoint in endpoints)
    return ready


def _nodes(facts: ClusterFacts, spec: TrainingClusterSpec) -> Iterator[Finding]:
    usable = usable_nodes(facts.list("Node").items, spec)
    troubled = {host(node): why for node in usable if (why := _trouble(node, spec))}
    for name, why in troubled.items():
        yield warning("nodes", f"node {name} {why}", f"kubectl describe node {name}")
    yield from _about("nodes", check_nodes(spec, facts, troubled))


def _trouble(node: Object, spec: TrainingClusterSpec) -> str:
    if not is_true(node.get("status", {}), "Ready"):
        return "is not Ready"
    if node["spec"].get("unschedulable"):
        return "is cordoned"
    gpus = allocatable(node, GPU_RESOURCE)
    return f"has {gpus} of {spec.gpus.per_node} GPUs" if gpus < spec.gpus.per_node else ""


def _fabric(facts: ClusterFacts, spec: TrainingClusterSpec) -> Iterator[Finding]:
    if not spec.network.rdma.enabled:
        yield fine("fabric", "TCP: the cluster has no RDMA")
        return
    if not spec.network.rdma.rails:
        fix = "name each NIC's network, resource or both in network.rdma.rails (docs/how-to/describe-a-cluster.md)"
        yield warning("fabric", "RDMA without rails: nothing puts an RDMA NIC into the pods", fix)
    yield from _about("fabric", check_rails(spec, facts))
