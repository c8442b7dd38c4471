"""Objects that a job's pods name and somebody else makes: service account, secrets, config maps, networks. Only their presence is checked, never their content (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.plan.checks.rails import check_networks
from lockstep.plan.cluster.facts import ClusterFacts
from lockstep.plan.cluster.finding import Finding, Outcome
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
    """Findings of lint about the rails' networks, as they concern a job: what fails refuses it, and what is doubtful is unknown."""
    spec = resolved.profile.spec
    findings = list(check_networks(spec, facts))
    for one in findings:
        yield replace(one, subject=SECTION, outcome=Outcome.REFUSED if one.outcome is Outcome.FAILED else Outcome.UNKNOWN)
    if spec.network.rdma.networks and not findings:
        yield Finding(SECTION, Outcome.OK, f"the networks {', '.join(dict.fromkeys(spec.network.rdma.networks))} are there")
