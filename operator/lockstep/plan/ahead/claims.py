"""The claims that a job mounts: are they there, bound, large enough and for several nodes; and if they must be made, can they be (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.api import names
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.cluster.storageclasses import is_default_class
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.storage import Claim, pod_claims, shared_claims
from lockstep_spec.choices import StorageMode

SECTION = "claims"


@dataclass(frozen=True)
class NeededClaim:
    """A claim as the job needs it."""

    name: str
    mounts: int
    """Nodes that mount it at once."""
    made: Claim | None = None
    """Claim to create when missing; None: it must exist."""
    read_only: bool = False


def needed_claims(resolved: Resolved) -> list[NeededClaim]:
    nodes = resolved.nodes
    claims = [NeededClaim(claim.name, nodes, claim, claim.access_mode == "ReadOnlyMany") for claim in shared_claims(resolved)]
    claims += [
        NeededClaim(f"{claim.name}-{names.pod_name(resolved.name, node)}", 1, claim)
        for claim in pod_claims(resolved)
        for node in range(nodes)
    ]
    if resolved.storage_mode is StorageMode.SHARED:
        claims.append(NeededClaim(resolved.workspace_claim, nodes))
    claims += [NeededClaim(volume.claim, nodes, read_only=True) for volume in resolved.profile.spec.pod.volumes]
    for volume in resolved.job.spec.pod_template.volumes:
        if volume.persistent_volume_claim is not None:
            claims.append(
                NeededClaim(volume.persistent_volume_claim.claim_name, nodes, read_only=bool(volume.persistent_volume_claim.read_only))
            )
    first: dict[str, NeededClaim] = {}
    for claim in claims:
        first.setdefault(claim.name, claim)
    return list(first.values())


def claim_findings(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    needed = needed_claims(resolved)
    claims, storage = facts.list("PersistentVolumeClaim"), facts.list("StorageClass")
    if not claims.seen:
        yield Finding(
            SECTION, Outcome.UNKNOWN, f"whether {', '.join(claim.name for claim in needed)} exist: your account may not list claims"
        )
        return
    present = {str(claim["metadata"]["name"]): claim for claim in claims.items}
    classes = {str(item["metadata"]["name"]): item for item in storage.items} if storage.seen else None
    missing = [claim for claim in needed if claim.name not in present and claim.made is not None]
    for claim in needed:
        if claim.name in present:
            yield _present(claim, present[claim.name], classes)
        elif claim.made is None:
            fix = f"create it in namespace {facts.namespace}, or name one that exists"
            yield Finding(SECTION, Outcome.REFUSED, f"claim {claim.name} does not exist, and it is not one that Lockstep makes", fix)
    for storage_class in dict.fromkeys(claim.made.storage_class for claim in missing if claim.made is not None):
        of_class = [claim for claim in missing if claim.made is not None and claim.made.storage_class == storage_class]
        yield _made(of_class, storage_class, classes)


def _present(needed: NeededClaim, claim: Object, classes: Mapping[str, Object] | None) -> Finding:
    name, spec, status = needed.name, claim["spec"], claim.get("status", {})
    if claim["metadata"].get("deletionTimestamp"):
        return Finding(SECTION, Outcome.REFUSED, f"claim {name} is being deleted", f"kubectl describe pvc {name}: what uses it holds it")
    phase = status.get("phase", "Pending")
    if phase == "Lost":
        return Finding(SECTION, Outcome.REFUSED, f"claim {name} has lost its volume", f"kubectl describe pvc {name}")
    modes = list(spec.get("accessModes") or [])
    shared = {"ReadWriteMany", "ReadOnlyMany"} if needed.read_only else {"ReadWriteMany"}
    if needed.mounts > 1 and not shared & {*modes}:
        fix = "name a ReadWriteMany claim, or storage.mode: PerPod"
        return Finding(SECTION, Outcome.REFUSED, f"claim {name} is {', '.join(modes)}: {needed.mounts} nodes can't mount it together", fix)
    if phase != "Bound" and not _binds_late(spec.get("storageClassName"), classes):
        return Finding(SECTION, Outcome.WAITS, f"claim {name} is {phase}", f"kubectl describe pvc {name}", f"claim {name} to be bound")
    size = str((status.get("capacity") or {}).get("storage") or spec["resources"]["requests"]["storage"])
    size_asked = None if needed.made is None else needed.made.size
    if size_asked is not None and number(size) < number(size_asked):
        return Finding(
            SECTION, Outcome.NOTE, f"claim {name} has {size}, the cluster asks for {size_asked}: an existing claim is never changed"
        )
    return Finding(SECTION, Outcome.OK, f"claim {name} is {phase}, {size}, {', '.join(modes)}")


def _binds_late(name: str | None, classes: Mapping[str, Object] | None) -> bool:
    storage_class = (classes or {}).get(name or "")
    return storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"


def _made(needed: list[NeededClaim], storage_class: str | None, classes: Mapping[str, Object] | None) -> Finding:
    claims = [claim.made for claim in needed if claim.made is not None]
    listed = ", ".join(f"{claim.name} ({claim_made.size})" for claim, claim_made in zip(needed, claims, strict=True))
    modes = ", ".join(dict.fromkeys(claim.access_mode for claim in claims))
    what = f"{listed} would be made, {modes}"
    if classes is None:
        return Finding(
            SECTION,
            Outcome.UNKNOWN,
            f"{what}; whether storage class {storage_class or 'by default'} is there: your account may not list classes",
        )
    fix = f"choose one of {', '.join(sorted(classes))} in the cluster file" if classes else "an administrator makes a storage class"
    if storage_class is None:
        default = [name for name, item in classes.items() if is_default_class(item)]
        if not default:
            return Finding(
                SECTION,
                Outcome.REFUSED,
                f"{what}, of the default storage class, but the cluster has none",
                fix,
            )
        return Finding(SECTION, Outcome.OK, f"{what}, of the default storage class {default[0]}")
    if storage_class not in classes:
        return Finding(
            SECTION,
            Outcome.REFUSED,
            f"{what}, of storage class {storage_class}, which does not exist",
            fix,
        )
    return Finding(SECTION, Outcome.OK, f"{what}, of storage class {storage_class}")
