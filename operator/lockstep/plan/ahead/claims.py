"""The claims that a job mounts: are they there, bound, large enough and for several nodes; and if they must be made, can they be (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lockstep.api import names
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.cluster.lookahead import Around, Line, Outcome
from lockstep.plan.render.resolve import Resolved
from lockstep.plan.render.storage import Claim, pod_claims, shared_claims
from lockstep_spec.choices import StorageMode

SECTION = "claims"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


@dataclass(frozen=True)
class Wanted:
    """A claim as the job needs it."""

    name: str
    mounts: int
    """Nodes that mount it at once."""
    made: Claim | None = None
    """As it is made when missing; None: it must exist."""
    read_only: bool = False


def wanted_claims(resolved: Resolved) -> list[Wanted]:
    nodes = resolved.nodes
    found = [Wanted(claim.name, nodes, claim, claim.access_mode == "ReadOnlyMany") for claim in shared_claims(resolved)]
    found += [
        Wanted(f"{claim.name}-{names.pod_name(resolved.name, node)}", 1, claim) for claim in pod_claims(resolved) for node in range(nodes)
    ]
    if resolved.storage_mode is StorageMode.SHARED:
        found.append(Wanted(resolved.workspace_claim, nodes))
    found += [Wanted(volume.claim, nodes, read_only=True) for volume in resolved.profile.spec.pod.volumes]
    for volume in resolved.job.spec.pod_template.volumes:
        if volume.persistent_volume_claim is not None:
            found.append(Wanted(volume.persistent_volume_claim.claim_name, nodes, read_only=bool(volume.persistent_volume_claim.read_only)))
    first: dict[str, Wanted] = {}
    for claim in found:
        first.setdefault(claim.name, claim)
    return list(first.values())


def claim_lines(resolved: Resolved, around: Around) -> Iterator[Line]:
    wanted = wanted_claims(resolved)
    if around.claims is None:
        yield Line(SECTION, Outcome.UNKNOWN, f"whether {', '.join(claim.name for claim in wanted)} exist: your account may not list claims")
        return
    there = {str(claim["metadata"]["name"]): claim for claim in around.claims}
    classes = None if around.classes is None else {str(found["metadata"]["name"]): found for found in around.classes}
    made = [claim for claim in wanted if claim.name not in there and claim.made is not None]
    for claim in wanted:
        if claim.name in there:
            yield _there(claim, there[claim.name], classes)
        elif claim.made is None:
            fix = f"create it in namespace {around.namespace}, or name one that exists"
            yield Line(SECTION, Outcome.REFUSED, f"claim {claim.name} does not exist, and it is not one that Lockstep makes", fix)
    for storage_class in dict.fromkeys(claim.made.storage_class for claim in made if claim.made is not None):
        of_class = [claim for claim in made if claim.made is not None and claim.made.storage_class == storage_class]
        yield _made(of_class, storage_class, classes)


def _there(wanted: Wanted, claim: Object, classes: Mapping[str, Object] | None) -> Line:
    name, spec, status = wanted.name, claim["spec"], claim.get("status", {})
    if claim["metadata"].get("deletionTimestamp"):
        return Line(SECTION, Outcome.REFUSED, f"claim {name} is being deleted", f"kubectl describe pvc {name}: what uses it holds it")
    phase = status.get("phase", "Pending")
    if phase == "Lost":
        return Line(SECTION, Outcome.REFUSED, f"claim {name} has lost its volume", f"kubectl describe pvc {name}")
    modes = list(spec.get("accessModes") or [])
    shared = {"ReadWriteMany", "ReadOnlyMany"} if wanted.read_only else {"ReadWriteMany"}
    if wanted.mounts > 1 and not shared & {*modes}:
        fix = "name a ReadWriteMany claim, or storage.mode: PerPod"
        return Line(SECTION, Outcome.REFUSED, f"claim {name} is {', '.join(modes)}: {wanted.mounts} nodes can't mount it together", fix)
    if phase != "Bound" and not _binds_late(spec.get("storageClassName"), classes):
        return Line(SECTION, Outcome.WAITS, f"claim {name} is {phase}", f"kubectl describe pvc {name}", f"claim {name} to be bound")
    size = str((status.get("capacity") or {}).get("storage") or spec["resources"]["requests"]["storage"])
    asked = None if wanted.made is None else wanted.made.size
    if asked is not None and number(size) < number(asked):
        return Line(SECTION, Outcome.NOTE, f"claim {name} has {size}, the cluster asks for {asked}: an existing claim is never changed")
    return Line(SECTION, Outcome.OK, f"claim {name} is {phase}, {size}, {', '.join(modes)}")


def _binds_late(name: str | None, classes: Mapping[str, Object] | None) -> bool:
    found = (classes or {}).get(name or "")
    return found is not None and found.get("volumeBindingMode") == "WaitForFirstConsumer"


def _made(wanted: list[Wanted], storage_class: str | None, classes: Mapping[str, Object] | None) -> Line:
    claims = [claim.made for claim in wanted if claim.made is not None]
    listed = ", ".join(f"{claim.name} ({made.size})" for claim, made in zip(wanted, claims, strict=True))
    modes = ", ".join(dict.fromkeys(claim.access_mode for claim in claims))
    what = f"{listed} would be made, {modes}"
    if classes is None:
        return Line(
            SECTION,
            Outcome.UNKNOWN,
            f"{what}; whether storage class {storage_class or 'by default'} is there: your account may not list classes",
        )
    known = ", ".join(sorted(classes)) or "none at all"
    if storage_class is None:
        default = [name for name, found in classes.items() if (found["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true"]
        if not default:
            return Line(
                SECTION, Outcome.REFUSED, f"{what}, of the default storage class, which there is not", f"name one in the cluster: {known}"
            )
        return Line(SECTION, Outcome.OK, f"{what}, of the default storage class {default[0]}")
    if storage_class not in classes:
        return Line(
            SECTION,
            Outcome.REFUSED,
            f"{what}, of storage class {storage_class}, which is not there",
            f"there are {known}: correct the cluster",
        )
    return Line(SECTION, Outcome.OK, f"{what}, of storage class {storage_class}")
