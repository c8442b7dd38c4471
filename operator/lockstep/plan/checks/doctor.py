"""Is this cluster ready for jobs? From what one person may see of it: what is right, what is wrong, and how to mend it (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.files.clusterfile import ClusterFile
from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.plan.checks.site import site
from lockstep.plan.cluster.scope import image_of
from lockstep.plan.cluster.seen import NOT_YOURS, Finding, Seen, Verdict
from lockstep.plan.render.resolve import default_image_said


def examine(found: ClusterFile, seen: Seen, crds: Mapping[str, Object]) -> Iterator[Finding]:
    """Every finding, in the order in which they should be mended. `crds`: those of this version, by name."""
    yield from _rights(seen)
    yield from _definitions(seen, crds, found.cluster.name)
    yield _operator(seen, found.cluster.name)
    yield _profile(seen, found)
    yield from _image(seen, found)
    yield _account(seen, found)
    yield from site(seen, found.profile.spec)


def _rights(seen: Seen) -> Iterator[Finding]:
    lacking = [what for what, allowed in seen.rights.items() if not allowed and (seen.serves or "TrainingJob" not in what)]
    where = f"in namespace {seen.namespace}"
    if lacking:
        fix = f"an administrator: kubectl create rolebinding USER-edit --clusterrole=edit --user=USER -n {seen.namespace}"
        yield Finding("rights", Verdict.FAILED, f"you may not {', '.join(lacking)} {where}", fix)
    elif seen.rights:
        yield Finding("rights", Verdict.OK, f"you may {', '.join(what for what, allowed in seen.rights.items() if allowed)} {where}")


def _definitions(seen: Seen, wanted: Mapping[str, Object], cluster: str) -> Iterator[Finding]:
    deploy = f"lockstep deploy {cluster} (needs the rights of an administrator)"
    if seen.crds is None and seen.serves is None:
        yield Finding("CRDs", Verdict.UNKNOWN, f"whether this cluster knows TrainingJobs: {NOT_YOURS}")
        return
    if seen.crds is None and not seen.serves:
        yield Finding("CRDs", Verdict.FAILED, "this cluster doesn't know TrainingJobs", deploy)
        return
    if seen.crds is None:
        yield Finding("CRDs", Verdict.UNKNOWN, "TrainingJobs are known here; of which version, you may not see")
        return
    absent = [name for name in wanted if name not in seen.crds]
    older = [name for name, crd in wanted.items() if name in seen.crds and _schema(seen.crds[name]) != _schema(crd)]
    if absent:
        yield Finding("CRDs", Verdict.FAILED, f"{', '.join(absent)} not installed", deploy)
    elif older:
        yield Finding("CRDs", Verdict.WARNING, f"{', '.join(older)} of another version than this lockstep's", deploy)
    else:
        yield Finding("CRDs", Verdict.OK, f"{len(wanted)} installed, of this version")


def _schema(crd: Object) -> object:
    """What is compared: the fields' names, since the API server fills in defaults of its own."""
    return [_fields(version.get("schema", {}).get("openAPIV3Schema", {})) for version in crd["spec"]["versions"]]


def _fields(schema: Object) -> object:
    inner = {name: _fields(value) for name, value in schema.get("properties", {}).items()}
    items = schema.get("items")
    return inner or (_fields(items) if isinstance(items, dict) else schema.get("type"))


def _operator(seen: Seen, cluster: str) -> Finding:
    if not seen.may_see_operator:
        return Finding("operator", Verdict.UNKNOWN, f"you may not look into namespace {OPERATOR_NAMESPACE}")
    if seen.deployment is None:
        return Finding(
            "operator", Verdict.FAILED, "not installed", f"lockstep deploy {cluster}; or without one: lockstep run --in-namespace"
        )
    if seen.unserved:
        return Finding("operator", Verdict.FAILED, f"none works in namespace {seen.namespace}", seen.unserved)
    home = seen.deployment["metadata"].get("namespace", OPERATOR_NAMESPACE)
    ready, wanted = seen.deployment.get("status", {}).get("readyReplicas", 0), seen.deployment["spec"].get("replicas", 1)
    if ready < wanted and seen.operator_stuck:
        found = f"{ready} of {wanted} replicas ready: {seen.operator_stuck}"
        return Finding("operator", Verdict.WARNING if ready else Verdict.FAILED, found, f"kubectl describe pods -n {home}")
    if not ready:
        logs = f"kubectl logs -n {home} deploy/{seen.deployment['metadata']['name']}"
        return Finding("operator", Verdict.FAILED, f"0 of {wanted} replicas ready", logs)
    verdict = Verdict.OK if ready >= wanted else Verdict.WARNING
    return Finding("operator", verdict, f"{ready} of {wanted} replicas ready", "" if ready >= wanted else f"kubectl get pods -n {home}")


def _profile(seen: Seen, found: ClusterFile) -> Finding:
    name = found.profile.metadata.name
    deploy = f"lockstep deploy {found.cluster.name}"
    if seen.profile is None and "TrainingCluster" in seen.hidden:
        return Finding("cluster", Verdict.UNKNOWN, f"whether TrainingCluster {name} is as its file says: {NOT_YOURS}")
    if seen.profile is None:
        return Finding("cluster", Verdict.FAILED, f"TrainingCluster {name} is not on the cluster", deploy)
    differs = differing_keys(found.profile.spec, seen.profile)
    if differs:
        return Finding("cluster", Verdict.WARNING, f"{name} differs from its file in {', '.join(differs)}", f"{deploy}, or lockstep diff")
    return Finding("cluster", Verdict.OK, f"{name} is as its file says")


def differing_keys(spec: TrainingClusterSpec, there: Object) -> list[str]:
    """Sections in which the TrainingCluster on the cluster is not as the file has it."""
    stated = spec.to_dict()
    stated.get("network", {}).pop("mode", None)  # MODE= of the deployment, not the file's
    return sorted(key for key, value in stated.items() if _without_mode(key, there["spec"].get(key)) != value)


def _without_mode(key: str, value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "mode"} if key == "network" and isinstance(value, dict) else value


def _image(seen: Seen, found: ClusterFile) -> Iterator[Finding]:
    """Of a cluster that names none."""
    if found.profile.spec.image is None and seen.deployment is not None:
        said, is_known = default_image_said(image_of(seen.deployment))
        yield Finding(
            "image", Verdict.OK if is_known else Verdict.WARNING, said, "" if is_known else "image: in the cluster file, or in each job"
        )


def _account(seen: Seen, found: ClusterFile) -> Finding:
    name = found.profile.spec.security.service_account
    if seen.account is None and "ServiceAccount" in seen.hidden:
        return Finding("service account", Verdict.UNKNOWN, f"whether {name} is in namespace {seen.namespace}: {NOT_YOURS}")
    if seen.account is None:
        fix = f"kubectl create serviceaccount {name} -n {seen.namespace}"
        return Finding("service account", Verdict.FAILED, f"{name} is not in namespace {seen.namespace}", fix)
    return Finding("service account", Verdict.OK, f"{name} is there")
