"""Objects that a job's pods name and somebody else makes: service account, secrets, config maps, networks. Only their presence is checked, never their content (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.plan.cluster.facts import NETWORK, ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome
from lockstep.plan.cluster.railnetworks import is_out_of_reach, moved_here, out_of_reach
from lockstep.plan.render.fabric import Transport
from lockstep.plan.render.resolved import Resolved

SECTION = "needs"


@dataclass(frozen=True)
class Reference:
    """One object that somebody else makes. `field`: where the job or its cluster names it. `missing`: what its absence comes to."""

    kind: str
    name: str
    field: str
    missing: Outcome = Outcome.REFUSED


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
    yield Reference("ServiceAccount", resolved.profile.spec.security.service_account, "the cluster's security.service_account")
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
    """One finding about each object that is missing or can't be seen, and one about all that are there."""
    present = []
    for reference in references(resolved):
        listing = facts.object(reference.kind, reference.name)
        what = f"{reference.kind} {reference.name} ({reference.field})"
        if not listing.seen:
            yield Finding(SECTION, Outcome.UNKNOWN, f"whether {what} exists: your account may not read it")
        elif listing.first is not None:
            present.append(f"{reference.kind} {reference.name}")
        else:
            yield Finding(SECTION, reference.missing, f"{what} is not in namespace {facts.namespace}", _how(reference, facts.namespace))
    if present:
        contents = " (contents are not read)" if any("Account" not in name for name in present) else ""
        yield Finding(SECTION, Outcome.OK, f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} there{contents}")
    if resolved.transport is Transport.RDMA:
        yield from _networks(resolved, facts)


def _how(reference: Reference, namespace: str) -> str:
    if reference.kind == "ServiceAccount":
        return f"kubectl create serviceaccount {reference.name} -n {namespace}"
    kind = "secret generic" if reference.kind == "Secret" else "configmap"
    place = "cluster file" if reference.field.startswith("the cluster's") else "job"
    return f"kubectl create {kind} {reference.name} -n {namespace} …, or remove it from the {place}"


def _networks(resolved: Resolved, facts: ClusterFacts) -> Iterator[Finding]:
    networks, namespace = resolved.profile.spec.network.rdma.networks, facts.namespace
    for network in dict.fromkeys(networks):
        if is_out_of_reach(network, namespace, resolved.profile.spec.platform):
            yield Finding(SECTION, Outcome.UNKNOWN, out_of_reach(network, namespace), moved_here(network, namespace))
    local = list(dict.fromkeys(name for name in networks if "/" not in name))
    if not local:
        return
    if not facts.list(NETWORK).seen:
        message = f"whether the networks {', '.join(local)} exist: your account may not list NetworkAttachmentDefinitions, or the cluster has none"
        yield Finding(SECTION, Outcome.UNKNOWN, message)
        return
    present = {item["metadata"]["name"] for item in facts.list(NETWORK).items}
    missing = [name for name in local if name not in present]
    if missing:
        fix = "an administrator makes its NetworkAttachmentDefinition there"
        yield Finding(SECTION, Outcome.REFUSED, f"network {', '.join(missing)} is not in namespace {namespace}", fix)
    else:
        yield Finding(SECTION, Outcome.OK, f"the networks {', '.join(local)} are there")
