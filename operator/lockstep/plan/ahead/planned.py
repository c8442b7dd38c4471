"""The plan of one job: its objects, what a cluster would say to them, and what the run will need, as lines (pure)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from lockstep.api import names
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.ahead.admission import admission_lines
from lockstep.plan.ahead.claims import claim_lines
from lockstep.plan.ahead.forecast import Forecast
from lockstep.plan.ahead.live import Comparison
from lockstep.plan.ahead.references import reference_lines
from lockstep.plan.cluster.fitting import node_lines
from lockstep.plan.cluster.limitrange import as_admitted
from lockstep.plan.cluster.lookahead import Around, Line, Outcome
from lockstep.plan.cluster.quota import quota_lines
from lockstep.plan.render.objects import claims, render
from lockstep.plan.render.resolve import MADE_BY_OPERATOR, UNNAMED_IMAGE, Refused, Resolved, refuse_missing_gpus, trainer_image
from lockstep.plan.render.storage import pod_claims
from lockstep_spec.words import number_of

SHOWN = 60
"""Characters of a value that a change shows."""


def job_line(resolved: Resolved) -> Line:
    ranks = number_of(resolved.gpus_per_node, "GPU") if resolved.gpus_per_node else number_of(resolved.ranks_per_node, "CPU rank")
    where = f"namespace {resolved.namespace}, by cluster {resolved.profile.metadata.name}"
    said = f"{resolved.name} in {where}: {number_of(resolved.nodes, 'node')} with {ranks} each, {resolved.transport} between them, storage {resolved.storage_mode.value}"
    return Line("job", Outcome.NOTE, said)


def samples(resolved: Resolved, job: TrainingJob) -> list[Object]:
    """The job, its StatefulSet and one pod of it, fit for a dry run: what only the operator knows is left out or replaced."""
    body = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    body |= {"apiVersion": job.api_version, "kind": job.kind}
    body["metadata"] |= {"namespace": resolved.namespace}
    (found,) = [item for item in render(resolved) if item["kind"] == "StatefulSet"]
    text = json.dumps(found).replace(json.dumps(MADE_BY_OPERATOR)[1:-1], resolved.image)
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


def _image_lines(resolved: Resolved, around: Around | None) -> Iterator[Line]:
    """Of a job to which neither it nor its cluster gives an image: as the operator will decide."""
    if resolved.image != MADE_BY_OPERATOR:
        return
    if around is None or around.operator_image is None:
        yield Line("image", Outcome.UNKNOWN, UNNAMED_IMAGE)
        return
    image = trainer_image(around.operator_image)
    if image is not None:
        yield Line("image", Outcome.OK, f"{image}, from beside the operator's image: neither the job nor its cluster names one")
        return
    said = f"neither the job nor its cluster names one, and the operator's image {around.operator_image} isn't called lockstep-operator:TAG, so that none is known beside it"
    yield Line("image", Outcome.REFUSED, said, "set spec.image, or image in the cluster file")


def _gpu_lines(resolved: Resolved) -> Iterator[Line]:
    """What the operator refuses, whatever the nodes have now."""
    try:
        refuse_missing_gpus(resolved)
    except Refused as error:
        yield Line("nodes", Outcome.REFUSED, str(error))


def object_lines(resolved: Resolved, compared: Sequence[Comparison] | None) -> Iterator[Line]:
    """`compared`: None where the cluster was not asked, or may not be read."""
    if compared is None:
        listed = ", ".join(f"{item['kind']}/{item['metadata']['name']}" for item in render(resolved))
        yield Line("objects", Outcome.NOTE, f"would be made where missing: {listed} (lockstep render prints them)")
        return
    absent = [found.name for found in compared if found.absent]
    same = [found.name for found in compared if not found.differs]
    if absent:
        yield Line("objects", Outcome.OK, f"would be made: {', '.join(absent)}")
    if same:
        yield Line("objects", Outcome.OK, f"there and as they should be: {', '.join(same)}")
    for found in compared:
        if found.foreign:
            fix = "give the job another name, or remove what is there"
            yield Line("objects", Outcome.REFUSED, f"{found.name} is there and belongs to something else", fix)
        elif found.changes:
            changes = "; ".join(f"{change.path}: {_short(change.observed)} → {_short(change.desired)}" for change in found.changes)
            yield Line("objects", Outcome.NOTE, f"{found.name} would change at the next start from zero pods: {changes}")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, int, list, dict, type(None))) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def new_objects(resolved: Resolved, compared: Sequence[Comparison] | None) -> frozenset[str] | None:
    """What a quota would have to have room for. A Secret is never looked at: there is one where there is a StatefulSet."""
    if compared is None:
        return None
    absent = {found.name for found in compared if found.absent}
    if f"StatefulSet/{resolved.name}" in absent:
        absent.add(f"Secret/{names.key_secret_name(resolved.name)}")
    return frozenset(absent)


def cluster_lines(resolved: Resolved, pod: Object, around: Around) -> Iterator[Line]:
    """Everything that the cluster would say."""
    yield from _profile(resolved, around)
    yield from node_lines(as_admitted(pod, around.ranges or ())[0], resolved.nodes, around)
    if resolved.job.spec.queue_name is not None:
        yield Line("nodes", Outcome.NOTE, f"Kueue's queue {resolved.job.spec.queue_name} decides when it starts, by a quota of its own")
    yield from quota_lines(pod, resolved.nodes, _others(resolved, around), around)
    yield from claim_lines(resolved, around)
    yield from admission_lines(resolved, around)
    yield from reference_lines(resolved, around)


def _profile(resolved: Resolved, around: Around) -> Iterator[Line]:
    name = resolved.profile.metadata.name
    there = around.present.get(("TrainingCluster", name))
    job = around.tries.get("TrainingJob")
    if there is None:
        yield Line("cluster", Outcome.UNKNOWN, f"whether TrainingCluster {name} is as its file says: your account may not read it")
    elif not there and (job is None or job.accepted is not None):
        fix = f"lockstep deploy {name} (needs the rights of an administrator)"
        yield Line("cluster", Outcome.REFUSED, f"TrainingCluster {name} is not on the cluster", fix)
    elif around.profile_differs:
        said = f"TrainingCluster {name} differs from its file in {', '.join(around.profile_differs)}: the cluster's counts, this plan goes by the file"
        yield Line("cluster", Outcome.NOTE, said, f"lockstep deploy {name}")
    if around.own_pods:
        said = f"the job has {number_of(len(around.own_pods), 'pod')} now: what they use is counted as free"
        yield Line("cluster", Outcome.NOTE, said)


def _others(resolved: Resolved, around: Around) -> list[Object]:
    """The job's objects beside its pods; claims of pods only where they are not there yet."""
    there = {claim["metadata"]["name"] for claim in around.claims or ()}
    found = [item for item in render(resolved) if item["kind"] != "PersistentVolumeClaim"]
    found += [claim for claim in claims(resolved) if claim["metadata"]["name"] not in there]
    new = None if around.new is None else [item for item in found if f"{item['kind']}/{item['metadata']['name']}" in around.new]
    return [*(found if new is None else new), *(claim for claim in _pod_claims(resolved) if claim["metadata"]["name"] not in there)]


def _pod_claims(resolved: Resolved) -> Iterator[Object]:
    for claim in pod_claims(resolved):
        for node in range(resolved.nodes):
            spec: Object = {"resources": {"requests": {"storage": claim.size}}}
            if claim.storage_class is not None:
                spec["storageClassName"] = claim.storage_class
            yield {
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": f"{claim.name}-{names.pod_name(resolved.name, node)}"},
                "spec": spec,
            }


def all_lines(resolved: Resolved, pod: Object, compared: Sequence[Comparison] | None, around: Around | None, told: Forecast) -> list[Line]:
    """`around`: None offline."""
    lines = [job_line(resolved), *_image_lines(resolved, around), *_gpu_lines(resolved), *object_lines(resolved, compared)]
    if around is not None:
        lines += cluster_lines(resolved, pod, around)
    else:
        lines.append(Line("cluster", Outcome.UNKNOWN, "nodes, quota, claims, admission: the cluster was not asked (--offline)"))
    if resolved.suspend:
        lines.append(Line("job", Outcome.NOTE, "spec.suspend is true: it starts when it is resumed"))
    return lines + told.lines
