"""A job against what is on a cluster: what `lockstep plan` says of its file's objects, `lockstep deploy --diff` of its next start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.api import names
from lockstep.api.objects import Object, has_ended
from lockstep.plan.diff import Change, changes
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.accept import accept
from lockstep.plan.reconcile.frozenrun import read_run
from lockstep.plan.render.objects import PLAIN, Frozen, RenderContext, children, claims, freeze, thaw
from lockstep.plan.render.resolve import trainer_image
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, Resolved
from lockstep_gang.contract.run import parse_run


@dataclass(frozen=True)
class Comparison:
    """One object: absent (and then made), another's (`foreign`), or there, with what would change."""

    name: str
    """Kind and name, for example Service/x-headless."""
    absent: bool = False
    foreign: bool = False
    changes: tuple[Change, ...] = ()

    @property
    def differs(self) -> bool:
        return self.absent or self.foreign or bool(self.changes)


def compare(resolved: Resolved, observed: Sequence[Object]) -> list[Comparison]:
    """Compare the objects that are there with those of a start from zero pods now; Secrets are left out.

    The operator's own part (the job's uid, the agent's image, where to report) is taken as it is on the cluster, so that only
    what the files say can differ.
    """
    by_key = {_key(item): item for item in observed}
    job = by_key.get(f"TrainingJob/{resolved.name}")
    uid = None if job is None else str(job["metadata"]["uid"])
    running = _running(resolved.name, by_key)
    context = _context(running, uid)
    if resolved.image == MADE_BY_OPERATOR:
        resolved = replace(resolved, image=trainer_image(context.agent_image) or MADE_BY_OPERATOR)
    frozen = freeze(resolved if job is None else _as_it_is_there(resolved, job), context)
    replicas = 0 if resolved.suspend or (job is not None and has_ended(job.get("status") or {})) else frozen.nodes
    owned = [item for item in children(frozen, owner_uid=context.owner_uid, key=context.key, replicas=replicas) if item["kind"] != "Secret"]
    return [
        *(Comparison(_key(claim), absent=_key(claim) not in by_key) for claim in claims(resolved)),
        *(_compare_run(frozen, running) if item["kind"] == "ConfigMap" and running else _compare(item, by_key, uid) for item in owned),
    ]


def next_start(job: Object, clusters: Sequence[Object], runs: Mapping[str, Object], agent_image: str) -> tuple[Change, ...] | Notice:
    """Compare what a stored job was started with last and what it would start with beside these TrainingClusters, by this version and an
    operator of `agent_image`. Notice: it would not be accepted. `runs`: ConfigMaps by `namespace/name`.

    What the operator adds and people don't choose, where to report and the keys, is taken as it is there.
    """
    observed = Observed(job, profiles=tuple(clusters))
    name = str(observed.status_part("run").get("name"))
    stored = runs.get(f"{observed.namespace}/{name}")
    running = None if stored is None else read_run(observed, stored, name.removeprefix(names.run_name(observed.name, "")))
    context = PLAIN if running is None else replace(_context(running, observed.uid), build=running.parsed.build)
    accepted = accept(observed, replace(context, agent_image=agent_image))
    if isinstance(accepted, Notice):
        return accepted
    return () if running is None else _compare_run(accepted.frozen, running).changes


def _as_it_is_there(resolved: Resolved, job: Object) -> Resolved:
    """Return the job with what only the object on the cluster says: its uid, and the nodes that preflight ruled out."""
    left_out = tuple(node["name"] for node in job.get("status", {}).get("excludedNodes") or [])
    return replace(resolved, uid=str(job["metadata"]["uid"]), platform=replace(resolved.platform, excluded_nodes=left_out))


def _key(item: Object) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def _running(job: str, by_key: Mapping[str, Object]) -> Frozen | None:
    """The frozen run that the StatefulSet names."""
    annotations = by_key.get(f"StatefulSet/{job}", {"metadata": {}})["metadata"].get("annotations", {})
    config_map = by_key.get(f"ConfigMap/{names.run_name(job, annotations.get(names.ANNOTATION_RUN_HASH, ''))}")
    return None if config_map is None else thaw(config_map)


def _context(running: Frozen | None, uid: str | None) -> RenderContext:
    owner = PLAIN.owner_uid if uid is None else uid
    if running is None:
        return replace(PLAIN, owner_uid=owner)
    (agent,) = json.loads(running.template)["pod"]["spec"]["initContainers"]
    return replace(PLAIN, owner_uid=owner, agent_image=agent["image"], report=parse_run(running.run).report, key_secret=running.key_secret)


def _compare_run(frozen: Frozen, running: Frozen) -> Comparison:
    """run.json and pod template field by field: as ConfigMaps they are only two names."""
    differences = changes({"run": json.loads(frozen.run)}, {"run": json.loads(running.run)})
    differences += changes({"template": json.loads(frozen.template)}, {"template": json.loads(running.template)})
    if not differences and frozen.hash != running.hash:  # something was taken away, which a comparison of what is set can't see
        differences = [Change("hash", frozen.hash, running.hash)]
    return Comparison(f"ConfigMap/{frozen.name}", changes=tuple(differences))


def _compare(item: Object, by_key: Mapping[str, Object], uid: str | None) -> Comparison:
    existing = by_key.get(_key(item))
    if existing is None:
        return Comparison(_key(item), absent=True)
    owners = [owner["uid"] for owner in existing["metadata"].get("ownerReferences", []) if owner.get("controller")]
    if uid is None or owners != [uid]:
        return Comparison(_key(item), foreign=True)
    return Comparison(_key(item), changes=tuple(changes(_without_run(item), existing)))


def _without_run(item: Object) -> Object:
    """A StatefulSet without its pod template and the template's hash: those are compared as the frozen run."""
    if item["kind"] != "StatefulSet":
        return item
    metadata = {key: value for key, value in item["metadata"].items() if key != "annotations"}
    return {**item, "metadata": metadata, "spec": {key: value for key, value in item["spec"].items() if key != "template"}}
