"""What the API server would say to the job's objects: dry runs, Pod Security labels, OpenShift's SCCs (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.api.cluster import Platform
from lockstep.plan.cluster.lookahead import Around, Line, Outcome
from lockstep.plan.render.resolve import Resolved
from lockstep.plan.render.security import locks_memory_as_root

SECTION = "admission"
ENFORCE = "pod-security.kubernetes.io/enforce"
REVIEW = "PodSecurityPolicyReview"
"""OpenShift's answer to which service accounts may run such pods."""


def admission_lines(resolved: Resolved, around: Around) -> Iterator[Line]:
    for kind in ("TrainingJob", "Pod", "StatefulSet"):
        yield from _tried(kind, around)
    if (asked := around.tries.get("Pod")) is None or asked.accepted is None:
        yield from _by_labels(resolved, around)
    if resolved.profile.spec.platform is Platform.OPENSHIFT:
        yield _by_scc(resolved, around)


def _tried(kind: str, around: Around) -> Iterator[Line]:
    found = around.tries.get(kind)
    if found is None:
        return
    if found.accepted is None:
        yield Line(SECTION, Outcome.UNKNOWN, f"whether a {kind} would be admitted: {found.said}")
    elif found.accepted:
        yield Line(SECTION, Outcome.OK, f"a dry run of the {kind} was admitted")
    else:
        yield Line(SECTION, Outcome.REFUSED, f"the API server refuses the {kind}: {found.said}", _fix(found.said))
    for warning in dict.fromkeys(found.warnings):
        yield Line(SECTION, Outcome.NOTE, f"the API server warns of the {kind}: {warning}")


def _fix(said: str) -> str:
    if "PodSecurity" in said:
        return "use another namespace, or fabric.mode: TCP, whose pods are `restricted`; or an administrator: kubectl label namespace … pod-security.kubernetes.io/enforce=privileged"
    if "security context constraint" in said:
        return "an administrator grants the SCC to the service account (lockstep deploy prints the command)"
    if "no PriorityClass" in said:
        return "kubectl get priorityclasses lists those there are"
    return ""


def _by_labels(resolved: Resolved, around: Around) -> Iterator[Line]:
    """Where nobody could be asked: the one thing that can be told from the namespace's labels."""
    if around.namespace_labels is None:
        return
    level = around.namespace_labels.get(ENFORCE, "privileged")
    if level in ("baseline", "restricted") and locks_memory_as_root(resolved.profile.spec, resolved.transport):
        said = f"namespace {around.namespace} enforces Pod Security {level}, which has no place for the UID 0 and CAP_IPC_LOCK of RDMA pods"
        yield Line(SECTION, Outcome.REFUSED, said, _fix("PodSecurity"))
    else:
        yield Line(SECTION, Outcome.OK, f"namespace {around.namespace} enforces Pod Security {level}, which the job's pods fulfil")


def _by_scc(resolved: Resolved, around: Around) -> Line:
    account = resolved.profile.spec.security.service_account
    found = around.tries.get(REVIEW)
    if found is None or found.accepted is None:
        why = found.said if found is not None else "the cluster was not asked"
        return Line(SECTION, Outcome.UNKNOWN, f"which SCC service account {account} gets: {why}")
    if found.accepted:
        return Line(SECTION, Outcome.OK, f"service account {account} may run such pods{found.said}")
    fix = f"an administrator: oc adm policy add-scc-to-user SCC -z {account} -n {around.namespace} (docs/how-to/fabric.md says which)"
    return Line(SECTION, Outcome.REFUSED, f"no SCC of service account {account} admits the job's pods{found.said}", fix)
