"""Objects that a job's pods name: claims, whether they are there, bound, large enough and for several nodes, or can be made; and objects
that Lockstep doesn't make: service account, secrets, config maps, networks. Of those only the presence is checked, not the content (pure).

As a plan tells it; doctor asks the same of a job of the default size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.api import names
from lockstep.api.cluster import TrainingClusterSpec
from lockstep.api.objects import Object
from lockstep.api.quantity import number
from lockstep.plan.checks.site import check_networks
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome, fine, note, refused, unknown, waits
from lockstep.plan.cluster.storageclasses import is_default_class
from lockstep.plan.render.fabric import Transport
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.storage import Claim, pod_claims, shared_claims
from lockstep_spec.choices import StorageMode

CLAIMS, NEEDS = "claims", "needs"
"""Sections of a plan."""


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


def cluster_claims(spec: TrainingClusterSpec) -> list[NeededClaim]:
    """Return the shared claims that jobs of several nodes need."""
    storage, nodes = spec.storage, max(2, spec.gpus.default_nodes)
    sizes = {storage.workspace_claim: storage.workspace_size, storage.datasets_claim: storage.datasets_size}
    return [NeededClaim(name, nodes, Claim(name, "ReadWriteMany", size, storage.class_rwx)) for name, size in sizes.items()]


def claim_findings(needed: Sequence[NeededClaim], facts: ClusterFacts) -> Iterator[Finding]:
    claims, storage = facts.list("PersistentVolumeClaim"), facts.list("StorageClass")
    if not claims.seen:
        yield unknown(CLAIMS, f"whether {', '.join(claim.name for claim in needed)} exist: your account may not list claims")
        return
    present = {str(claim["metadata"]["name"]): claim for claim in claims.items}
    classes = {str(item["metadata"]["name"]): item for item in storage.items} if storage.seen else None
    missing = [claim for claim in needed if claim.name not in present and claim.made is not None]
    for claim in needed:
        if claim.name in present:
            yield _present(claim, present[claim.name], classes, f"kubectl describe pvc {claim.name} -n {facts.namespace}")
        elif claim.made is None:
            fix = f"create it in namespace {facts.namespace}, or name one that exists"
            yield refused(CLAIMS, f"claim {claim.name} does not exist, and it is not one that Lockstep makes", fix)
    for storage_class in dict.fromkeys(claim.made.storage_class for claim in missing if claim.made is not None):
        of_class = [claim for claim in missing if claim.made is not None and claim.made.storage_class == storage_class]
        yield _made(of_class, storage_class, classes)


def _present(needed: NeededClaim, claim: Object, classes: Mapping[str, Object] | None, look: str) -> Finding:
    name, spec, status = needed.name, claim["spec"], claim.get("status", {})
    if claim["metadata"].get("deletionTimestamp"):
        return refused(CLAIMS, f"claim {name} is being deleted", f"{look}: what uses it holds it")
    phase = status.get("phase", "Pending")
    if phase == "Lost":
        return refused(CLAIMS, f"claim {name} has lost its volume", look)
    modes = list(spec.get("accessModes") or [])
    shared = {"ReadWriteMany", "ReadOnlyMany"} if needed.read_only else {"ReadWriteMany"}
    if needed.mounts > 1 and not shared & {*modes}:
        fix = "name a ReadWriteMany claim, or storage.mode: PerPod"
        return refused(CLAIMS, f"claim {name} is {', '.join(modes)}: {needed.mounts} nodes can't mount it together", fix)
    if phase != "Bound" and not _binds_late(spec.get("storageClassName"), classes):
        return waits(CLAIMS, f"claim {name} is {phase}", look, f"claim {name} to be bound")
    size = str((status.get("capacity") or {}).get("storage") or spec["resources"]["requests"]["storage"])
    size_asked = None if needed.made is None else needed.made.size
    if size_asked is not None and number(size) < number(size_asked):
        return note(CLAIMS, f"claim {name} has {size}, the cluster asks for {size_asked}: an existing claim is never changed")
    return fine(CLAIMS, f"claim {name} is {phase}, {size}, {', '.join(modes)}")


def _binds_late(name: str | None, classes: Mapping[str, Object] | None) -> bool:
    storage_class = (classes or {}).get(name or "")
    return storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"


def _made(needed: list[NeededClaim], storage_class: str | None, classes: Mapping[str, Object] | None) -> Finding:
    claims = [claim.made for claim in needed if claim.made is not None]
    listed = ", ".join(f"{claim.name} ({made.size})" for claim, made in zip(needed, claims, strict=True))
    what = f"{listed} would be made, {', '.join(dict.fromkeys(claim.access_mode for claim in claims))}"
    if classes is None:
        message = f"{what}; whether storage class {storage_class or 'by default'} is there: your account may not list classes"
        return unknown(CLAIMS, message)
    default = next((name for name, item in classes.items() if is_default_class(item)), None)
    if storage_class in classes or (storage_class is None and default is not None):
        return fine(CLAIMS, f"{what}, of {f'storage class {storage_class}' if storage_class else f'the default storage class {default}'}")
    missing = (
        f"storage class {storage_class}, which does not exist" if storage_class else "the default storage class, but the cluster has none"
    )
    fix = f"choose one of {', '.join(sorted(classes))} in the cluster file" if classes else "an administrator makes a storage class"
    return refused(CLAIMS, f"{what}, of {missing}", fix)


@dataclass(frozen=True)
class Reference:
    """One object that somebody else makes. `field`: where the job or its cluster names it. `missing`: what its absence comes to."""

    kind: str
    name: str
    field: str
    missing: Outcome = Outcome.REFUSED


def service_account(spec: TrainingClusterSpec) -> Reference:
    return Reference("ServiceAccount", spec.security.service_account, "the cluster's security.service_account")


def references(resolved: Resolved) -> list[Reference]:
    """Everything that the job's pods name; of one object only the first reference, unless a later one needs it more."""
    by_name: dict[tuple[str, str], Reference] = {}
    for reference in _references(resolved):
        earlier = by_name.get((reference.kind, reference.name))
        if earlier is None or earlier.missing is Outcome.NOTE:
            by_name[reference.kind, reference.name] = reference
    return list(by_name.values())


def _references(resolved: Resolved) -> Iterator[Reference]:
    spec = resolved.job.spec
    yield service_account(resolved.profile.spec)
    for secret in spec.image_pull_secrets:  # a missing one is passed over, and the image is asked for without it
        yield Reference("Secret", secret.name, "imagePullSecrets", Outcome.NOTE)
    for name in resolved.profile.spec.pod.image_pull_secrets:
        yield Reference("Secret", name, "the cluster's pod.image_pull_secrets", Outcome.NOTE)
    for variable in spec.env:
        source = variable.value_from
        for kind, key in (("Secret", source and source.secret_key_ref), ("ConfigMap", source and source.config_map_key_ref)):
            if key:
                yield Reference(kind, key.name, f"env {variable.name}", Outcome.NOTE if key.optional else Outcome.REFUSED)
    if spec.training is not None and spec.training.model.token_secret is not None:
        yield Reference("Secret", spec.training.model.token_secret.name, "training.model.tokenSecret")
    for variables in spec.env_from:
        for kind, named in (("Secret", variables.secret_ref), ("ConfigMap", variables.config_map_ref)):
            if named is not None:
                yield Reference(kind, named.name, "envFrom")
    for volume in spec.pod_template.volumes:
        if volume.secret is not None:
            yield Reference("Secret", volume.secret.secret_name, f"podTemplate.volumes[{volume.name}]")
        if volume.config_map is not None:
            yield Reference("ConfigMap", volume.config_map.name, f"podTemplate.volumes[{volume.name}]")


def reference_findings(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    yield from object_findings(references(resolved), facts)
    if resolved.transport is Transport.RDMA:
        yield from _networks(resolved, facts)


def object_findings(needed: Sequence[Reference], facts: ClusterFacts) -> Iterator[Finding]:
    """One finding about each object that is missing or can't be seen, and one about all that are there."""
    present = []
    for reference in needed:
        listing = facts.object(reference.kind, reference.name)
        what = f"{reference.kind} {reference.name} ({reference.field})"
        if not listing.seen:
            yield unknown(NEEDS, f"whether {what} exists: your account may not read it")
        elif listing.first is not None:
            present.append(f"{reference.kind} {reference.name}")
        else:
            yield Finding(NEEDS, reference.missing, f"{what} is not in namespace {facts.namespace}", _how(reference, facts.namespace))
    if present:
        contents = " (contents are not read)" if any("Account" not in name for name in present) else ""
        yield fine(NEEDS, f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} there{contents}")


def _how(reference: Reference, namespace: str) -> str:
    if reference.kind == "ServiceAccount":
        return f"kubectl create serviceaccount {reference.name} -n {namespace}"
    kind, source = ("secret generic", "literal=KEY=VALUE") if reference.kind == "Secret" else ("configmap", "file=FILE")
    place = "cluster file" if reference.field.startswith("the cluster's") else "job"
    return f"kubectl create {kind} {reference.name} -n {namespace} --from-{source}, or remove it from the {place}"


def _networks(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    """Findings of lint about the rails' networks, as they concern a job: what fails refuses it, and what is doubtful is unknown."""
    spec = resolved.profile.spec
    findings = list(check_networks(spec, facts))
    for one in findings:
        yield replace(one, subject=NEEDS, outcome=Outcome.REFUSED if one.outcome is Outcome.FAILED else Outcome.UNKNOWN)
    if spec.network.rdma.networks and not findings:
        yield fine(NEEDS, f"the networks {', '.join(dict.fromkeys(spec.network.rdma.networks))} are there")
