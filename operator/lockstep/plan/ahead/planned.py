"""The plan of one job: its objects, what a cluster would say to them, and what the run will need, as findings and one verdict over them
(pure).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from lockstep.api import names
from lockstep.api.cluster import Platform
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.api.sccs import scc_refusal
from lockstep.plan.ahead.forecast import NOT_OFFLINE, Forecast
from lockstep.plan.ahead.live import Comparison
from lockstep.plan.ahead.standin import is_stand_in
from lockstep.plan.checks.doctor import differing_keys
from lockstep.plan.checks.needs import claim_findings, needed_claims, reference_findings
from lockstep.plan.cluster.facts import SCC_REVIEW, ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome, fine, note, refused, unknown, warning
from lockstep.plan.cluster.fitting import BEYOND, EXCEEDED, limits_given, quota_findings, room
from lockstep.plan.cluster.scope import image_of
from lockstep.plan.diff import shown
from lockstep.plan.render.objects import claims, render
from lockstep.plan.render.resolve import UNNAMED_IMAGE, image_doubt, refuse_missing_gpus, trainer_image
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, Refused, Resolved
from lockstep.plan.render.storage import pod_claims
from lockstep_spec.choices import Precision
from lockstep_spec.gpus import known_gpu
from lockstep_spec.words import number_of

SHOWN = 60
"""Characters of a value that a change shows."""
CONCERNS_START = ("image", "cluster", "objects", "nodes", "quota", "claims", "admission", "needs", "hosts")
"""Sections that say whether the job can start."""
CONCERNS_RUN = ("memory", "steps")
"""Sections that say whether it then has the memory and the room that it needs; the others tell what it will do."""
MORE_RIGHTS = "--context NAME, of an account with more rights"
"""Remedy for facts that an account may not see."""


class PlanVerdict(StrEnum):
    """Verdict over all findings."""

    FITS = "fits now"
    FITS_AS_SEEN = "fits as far as can be seen"
    MAY_WAIT = "may wait"
    WAITS = "would wait"
    MAY_FAIL = "may fail once it runs"
    REFUSED = "refused"


EXIT_CODES = {
    PlanVerdict.FITS: 0, PlanVerdict.FITS_AS_SEEN: 0, PlanVerdict.REFUSED: 1, PlanVerdict.MAY_WAIT: 3, PlanVerdict.WAITS: 3,
    PlanVerdict.MAY_FAIL: 4,
}  # fmt: skip


def verdict(findings: Iterable[Finding], *, offline: bool = False) -> PlanVerdict:
    """Return the gravest of what the findings say. A risk is graver than waiting, which ends by itself.

    What isn't known counts as what it may hide: an unknown memory or number of steps as a risk, an unknown cluster as a wait. `offline`:
    the cluster was not meant to be asked, so of the unknowns only memory counts.
    """
    findings = list(findings)
    outcomes = {one.outcome for one in findings}
    unseen = {one.subject for one in _unseen(findings)}
    if Outcome.REFUSED in outcomes:
        return PlanVerdict.REFUSED
    if Outcome.RISK in outcomes or "memory" in unseen or (unseen.intersection(CONCERNS_RUN) and not offline):
        return PlanVerdict.MAY_FAIL
    if Outcome.WAITS in outcomes:
        return PlanVerdict.WAITS
    if not unseen:
        return PlanVerdict.FITS
    return PlanVerdict.FITS_AS_SEEN if offline else PlanVerdict.MAY_WAIT


def _unseen(findings: Iterable[Finding]) -> list[Finding]:
    return [one for one in findings if one.outcome is Outcome.UNKNOWN and one.subject in (*CONCERNS_START, *CONCERNS_RUN)]


def _not_known(findings: Iterable[Finding]) -> str:
    """Return the sections that aren't known, each with what to type to know it; '' if all are."""
    sections: dict[str, list[str]] = {}
    for one in _unseen(findings):
        subjects = sections.setdefault(one.fix or MORE_RIGHTS, [])
        subjects += [one.subject] if one.subject not in subjects else []
    return ", ".join(f"{' and '.join(subjects)} ({fix})" for fix, subjects in sections.items())


def sentence(findings: Sequence[Finding], *, offline: bool = False) -> str:
    """Return the last line of the plan."""
    result = verdict(findings, offline=offline)
    if result is PlanVerdict.REFUSED:
        return f"refused: {'; '.join(one.message for one in findings if one.outcome is Outcome.REFUSED)}"
    awaited = ", and for ".join(dict.fromkeys(one.awaited for one in findings if one.outcome is Outcome.WAITS))
    unseen = _not_known(findings)
    not_known = f"; not known: {unseen}" if unseen else ""
    if result is PlanVerdict.MAY_FAIL:
        risks = "; ".join(one.message for one in findings if one.outcome is Outcome.RISK)
        return f"{result.value}{f': {risks}' if risks else ''}{f'; would wait for {awaited}' if awaited else ''}{not_known}"
    return f"{f'would wait for {awaited}' if result is PlanVerdict.WAITS else result.value}{not_known}"


def _job(resolved: Resolved) -> Finding:
    ranks = number_of(resolved.gpus_per_node, "GPU") if resolved.gpus_per_node else number_of(resolved.ranks_per_node, "CPU rank")
    where = f"in namespace {resolved.namespace}, by cluster {resolved.profile.metadata.name}"
    if is_stand_in(resolved):
        kind = resolved.profile.spec.gpus.type
        assumed = ", and one GPU a node, as nothing states more" if kind is None and resolved.job.spec.gpus_per_node is None else ""
        where, ranks = f"without a cluster{assumed}", f"{ranks}{f' ({kind})' if kind and resolved.gpus_per_node else ''}"
    message = (
        f"{resolved.name} {where}: {number_of(resolved.nodes, 'node')} with {ranks} each, {resolved.transport} between them, storage"
        f" {resolved.storage_mode.value}"
    )
    return note("job", message)


def samples(resolved: Resolved, job: TrainingJob) -> list[Object]:
    """The job, its StatefulSet and one pod of it, fit for a dry run: what only the operator knows is left out or replaced."""
    body = job.written()
    body["metadata"] |= {"namespace": resolved.namespace}
    (rendered,) = [item for item in render(resolved) if item["kind"] == "StatefulSet"]
    text = json.dumps(rendered).replace(json.dumps(MADE_BY_OPERATOR)[1:-1], resolved.image)
    stateful_set: Object = json.loads(text)
    metadata = {key: value for key, value in stateful_set["metadata"].items() if key not in ("name", "ownerReferences")}
    stateful_set["metadata"] = metadata | {"generateName": f"{resolved.name[:40]}-"}
    return [body, pod_of(stateful_set, resolved), stateful_set]


def pod_of(stateful_set: Object, resolved: Resolved) -> Object:
    """The first of its pods, with the volumes of its own that the controller would add."""
    template = json.loads(json.dumps(stateful_set["spec"]["template"]))
    name = names.pod_name(resolved.name, 0)
    for claim in pod_claims(resolved):
        template["spec"]["volumes"].append({"name": claim.name, "persistentVolumeClaim": {"claimName": f"{claim.name}-{name}"}})
    metadata = template["metadata"] | {"namespace": resolved.namespace, "generateName": f"{resolved.name[:40]}-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _image(resolved: Resolved, facts: ClusterFacts | None) -> Iterator[Finding]:
    """The image of a job to which neither it nor its cluster gives one: as the operator will decide."""
    if resolved.image != MADE_BY_OPERATOR:
        if doubt := image_doubt(resolved):
            yield Finding("image", Outcome.WARNING, doubt, "name that image, or none; preflight asks the ranks' Python")
        return
    deployment = None if facts is None else facts.object("Deployment", names.OPERATOR_NAME).first
    if deployment is None:
        yield unknown("image", UNNAMED_IMAGE, "spec.image in the job, or image in the cluster file")
        return
    image = trainer_image(image_of(deployment))
    if image is not None:
        yield fine("image", f"{image}, from the operator's registry: neither the job nor its cluster sets one")
        return
    message = (
        f"neither the job nor its cluster sets one, and the operator's image {image_of(deployment)} isn't called lockstep-operator:TAG,"
        " which would give the default"
    )
    yield refused("image", message, "set spec.image, or image in the cluster file")


def _precision(resolved: Resolved) -> Iterator[Finding]:
    """A finding if the job trains in bf16, which the GPUs that are named don't have."""
    kind = resolved.profile.spec.gpus.type or ""
    gpu = known_gpu(kind) if resolved.gpus_per_node and resolved.training and resolved.training.precision is Precision.BF16 else None
    if gpu is not None and not gpu.bfloat16:
        yield warning("precision", f"{kind} has no bf16, the precision of this job", "--set training.precision=FP16")


def _gpus(resolved: Resolved) -> Iterator[Finding]:
    """A finding if the operator refuses the job's GPUs, whatever the nodes have now."""
    try:
        refuse_missing_gpus(resolved)
    except Refused as error:
        yield refused("nodes", str(error))


def _objects(resolved: Resolved, compared: Sequence[Comparison] | None) -> Iterator[Finding]:
    """`compared`: None where the cluster was not asked, or may not be read."""
    if compared is None:
        listed = ", ".join(f"{item['kind']}/{item['metadata']['name']}" for item in render(resolved))
        yield note("objects", f"would be made where missing: {listed} (lockstep render prints them)")
        return
    absent = [one.name for one in compared if one.absent]
    same = [one.name for one in compared if not one.differs]
    if absent:
        yield fine("objects", f"would be made: {', '.join(absent)}")
    if same:
        yield fine("objects", f"there and as they should be: {', '.join(same)}")
    for one in compared:
        if one.foreign:
            fix = "give the job another name, or remove what is there"
            yield refused("objects", f"{one.name} is there and belongs to something else", fix)
        elif one.changes:
            changes = "; ".join(
                f"{change.path}: {shown(change.observed, SHOWN)} → {shown(change.desired, SHOWN)}" for change in one.changes
            )
            yield note("objects", f"{one.name} would change at the next start from zero pods: {changes}")


def cluster_findings(resolved: Resolved, pod: Object, compared: Sequence[Comparison] | None, facts: ClusterFacts) -> Iterator[Finding]:
    """Everything that the cluster would say. `pod`: as it was tried out; what the API server has made of it counts."""
    yield from _profile(resolved, facts)
    tried = facts.tries.get("Pod")
    admitted = (tried and tried.admitted) or pod
    yield from room(admitted, resolved.nodes, facts)
    if resolved.job.spec.queue_name is not None:
        message = f"Kueue's queue {resolved.job.spec.queue_name} decides when it starts, by a quota of its own"
        yield note("nodes", message)
    yield from quota_findings(admitted, resolved.nodes, _others(resolved, compared, facts), facts)
    yield from _limits(pod, admitted)
    yield from claim_findings(needed_claims(resolved), facts)
    yield from _admission(resolved, facts)
    yield from reference_findings(resolved, facts)


def _limits(pod: Object, admitted: Object) -> Iterator[Finding]:
    """Limits that nobody has stated, and that every pod gets."""
    for container, limits in limits_given(pod, admitted).items():
        listed = ", ".join(
            f"{value} {resource}{f' ({BEYOND[resource]})' if resource in BEYOND else ''}" for resource, value in limits.items()
        )
        message = f"a LimitRange of the namespace limits container {container}, which states no limit, to {listed}"
        yield note("quota", message, "state spec.resources, or resources.limits in the cluster")


def _profile(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    name = resolved.profile.metadata.name
    profile, job = facts.object("TrainingCluster", name), facts.tries.get("TrainingJob")
    if not profile.seen:
        message = f"whether TrainingCluster {name} is as its file says: your account may not read it"
        yield unknown("cluster", message)
    elif profile.first is None and (job is None or job.accepted is not None):
        fix = f"lockstep deploy {name} (needs the rights of an administrator)"
        yield refused("cluster", f"TrainingCluster {name} is not on the cluster", fix)
    elif profile.first is not None and (differs := differing_keys(resolved.profile.spec, profile.first)):
        message = f"TrainingCluster {name} differs from its file in {', '.join(differs)}: the cluster's counts, this plan goes by the file"
        yield note("cluster", message, f"lockstep deploy {name}")
    if facts.own_pods:
        message = f"the job has {number_of(len(facts.own_pods), 'pod')} now: what they use is counted as free"
        yield note("cluster", message)


def _admission(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    """Answers of the API server to dry runs of the job, a pod and the StatefulSet; on OpenShift, which SCC the pods' account gets."""
    for kind in ("TrainingJob", "Pod", "StatefulSet"):
        tried = facts.tries.get(kind)
        if tried is None:
            continue
        if tried.accepted is None:
            yield unknown("admission", f"whether a {kind} would be admitted: {tried.message}", tried.fix)
        elif tried.accepted:
            yield fine("admission", f"a dry run of the {kind} was admitted")
        elif EXCEEDED in tried.message:  # by what others use now: what all pods need of it is counted, where quotas may be listed
            counted = facts.list("ResourceQuota").seen
            message, awaited = f"the API server has no room for the {kind} now: {tried.message}", "the namespace's quota to have room"
            outcome, look = (Outcome.NOTE, "") if counted else (Outcome.WAITS, f"kubectl describe quota -n {facts.namespace}")
            yield Finding("admission", outcome, message, look, awaited)
        else:
            mended = (tried.message, _mended(tried.message, facts.namespace))
            message, fix = scc_refusal(tried.message, facts.namespace, resolved.profile.spec.security.service_account) or mended
            yield refused("admission", f"the API server refuses the {kind}: {message}", fix)
        for text in dict.fromkeys(tried.warnings):
            yield note("admission", f"the API server warns of the {kind}: {text}")
    if resolved.profile.spec.platform is Platform.OPENSHIFT:
        yield _by_scc(resolved, facts)


def _mended(message: str, namespace: str) -> str:
    if "PodSecurity" in message:
        return (
            "use another namespace, or fabric.mode: TCP, whose pods are `restricted`; or an administrator: kubectl label namespace"
            f" {namespace} pod-security.kubernetes.io/enforce=privileged --overwrite"
        )
    if "no PriorityClass" in message:
        return "kubectl get priorityclasses lists those there are"
    if any(words in message for words in ("must specify", "usage per", " limit of ")):
        return (
            "change spec.resources or the cluster's resources, or have an administrator change what refuses them (kubectl describe"
            f" quota,limitrange -n {namespace})"
        )
    return ""


def _by_scc(resolved: Resolved, facts: ClusterFacts) -> Finding:
    account = resolved.profile.spec.security.service_account
    review = facts.tries.get(SCC_REVIEW)
    if review is None or review.accepted is None:
        why = review.message if review is not None else "the cluster was not asked"
        return unknown("admission", f"which SCC service account {account} gets: {why}")
    if review.accepted:
        return fine("admission", f"service account {account} may run such pods{review.message}")
    fix = f"an administrator: oc adm policy add-scc-to-user SCC -z {account} -n {facts.namespace} (docs/reference/rights.md says which)"
    return refused("admission", f"no SCC of service account {account} admits the job's pods{review.message}", fix)


def _others(resolved: Resolved, compared: Sequence[Comparison] | None, facts: ClusterFacts) -> list[Object]:
    """The job's objects beside its pods that would be made; claims of pods only where they are not there yet."""
    present = {claim["metadata"]["name"] for claim in facts.list("PersistentVolumeClaim").items}
    objects = [item for item in render(resolved) if item["kind"] != "PersistentVolumeClaim"] + claims(resolved, present)
    if compared is not None:
        new = {one.name for one in compared if one.absent}
        if f"StatefulSet/{resolved.name}" in new:  # (a Secret is never looked at)
            new.add(f"Secret/{names.key_secret_name(resolved.name)}")
        objects = [item for item in objects if f"{item['kind']}/{item['metadata']['name']}" in new]
    return [*objects, *(claim for claim in _pod_claims(resolved) if claim["metadata"]["name"] not in present)]


def _pod_claims(resolved: Resolved) -> Iterator[Object]:
    for claim in pod_claims(resolved):
        for node in range(resolved.nodes):
            of_class = {} if claim.storage_class is None else {"storageClassName": claim.storage_class}
            metadata = {"name": f"{claim.name}-{names.pod_name(resolved.name, node)}"}
            spec = {"resources": {"requests": {"storage": claim.size}}, **of_class}
            yield {"kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def all_findings(
    resolved: Resolved, pod: Object, compared: Sequence[Comparison] | None, facts: ClusterFacts | None, estimate: Forecast
) -> list[Finding]:
    """Everything that there is to say, in order. `facts`: None offline."""
    alone = is_stand_in(resolved)
    of_cluster = [] if alone else [*_image(resolved, facts), *_gpus(resolved), *_objects(resolved, compared)]
    findings = [_job(resolved), *_precision(resolved), *of_cluster]
    if facts is not None:
        findings += cluster_findings(resolved, pod, compared, facts)
    elif alone:
        findings.append(
            unknown("cluster", "nodes, image, RDMA, quota, claims, admission: no cluster is named, so none was asked", "--cluster NAME")
        )
    else:
        findings.append(unknown("cluster", "nodes, quota, claims, admission: the cluster was not asked (--offline)", NOT_OFFLINE))
    if resolved.suspend:
        findings.append(note("job", "spec.suspend is true: it starts when it is resumed"))
    return findings + estimate.findings
