"""Facts that one person may see of a cluster: every read of discover, lint, doctor and plan, and what is deployed. Nothing is changed: each
write is a dry run or a question.

What is refused for a lack of rights is a Listing that says so, and never an error. Every function raises ApiError for any other refusal,
and OSError when the cluster can't be reached.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.api import names
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.api.objects import Object
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster, tolerated
from lockstep.kube.kinds import KINDS, path_of
from lockstep.plan.cluster import scope
from lockstep.plan.cluster.facts import DNS_SERVICES, NETWORK, RIGHTS, SCC_REVIEW, ClusterFacts, Listing, Sight, Try
from lockstep.plan.cluster.scope import NAMED_BINDING, PROFILE_CONFIG, PROFILE_KEY, Scope, image_of, scope_of
from lockstep.platforms.clusters.listings import is_allowed, list_kind, may, read_object, sight_of_jobs

if TYPE_CHECKING:
    from lockstep.api.cluster import TrainingCluster, TrainingClusterSpec
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.plan.render.resolved import Resolved

OF_A_FILE = (
    "Node", "StorageClass", "PersistentVolume", "SecurityContextConstraints", "SriovNetworkNodePolicy",
    "PersistentVolumeClaim", NETWORK, "ResourceQuota", "LimitRange",
)  # fmt: skip
"""Kinds that the keys of a cluster file come from."""
OF_READINESS = ("CustomResourceDefinition", "Node", "StorageClass", "PersistentVolumeClaim", NETWORK)
OF_A_JOB = ("Node", "Pod", "StorageClass", "PersistentVolumeClaim", NETWORK, "ResourceQuota", "LimitRange")
OF_ROOM = ("Node", "Pod")
EVERYWHERE = ("Pod", "SriovNetworkNodePolicy")
"""Kinds of namespaces that are listed in all of them."""
LIVE = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


async def _lists(cluster: Cluster, namespace: str, kinds: Sequence[str], groups: frozenset[str] | None = None) -> dict[str, Listing]:
    """`groups`: API groups that the server has; kinds of others are not asked for: whoever may list nothing is answered 403 for an unknown
    kind, too.
    """

    async def listing(kind: str) -> Listing:
        group, _, _ = KINDS[kind].api_version.rpartition("/")
        if groups is not None and group and group not in groups:
            return Listing(kind, sight=Sight.NO_SUCH_KIND)
        place = namespace if KINDS[kind].namespaced and kind not in EVERYWHERE else None
        return await list_kind(cluster, kind, place, LIVE if kind == "Pod" else None)

    return dict(zip(kinds, await asyncio.gather(*map(listing, kinds)), strict=True))


async def _objects(cluster: Cluster, namespace: str, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Listing]:
    """`keys`: kind and name."""
    keys = list(dict.fromkeys(keys))
    places = [namespace if KINDS[kind].namespaced else None for kind, _ in keys]
    reads = (read_object(cluster, kind, place, name) for (kind, name), place in zip(keys, places, strict=True))
    return dict(zip(keys, await asyncio.gather(*reads), strict=True))


async def read_operator(cluster: Cluster, namespace: str | None = None) -> Listing:
    """The operator's Deployment. `namespace`: one of its own there comes first."""
    places = dict.fromkeys(place for place in (namespace, OPERATOR_NAMESPACE) if place)
    listings = await asyncio.gather(*(read_object(cluster, "Deployment", place, OPERATOR_NAME) for place in places))
    present = next((listing for listing in listings if listing.first is not None), None)
    return present or next((listing for listing in listings if not listing.seen), listings[0])


async def read_profile(cluster: Cluster, name: str, namespace: str) -> Listing:
    """The cluster of the namespace's own operator, else the TrainingCluster; not seen where this person may look at one of both places
    only.
    """
    own = Listing("TrainingCluster", sight=Sight.FORBIDDEN)
    with tolerated(FORBIDDEN):
        config = await cluster.get("ConfigMap", namespace, PROFILE_CONFIG)
        if config is not None and PROFILE_KEY in (config.get("data") or {}):
            profile: Object = json.loads(config["data"][PROFILE_KEY])
            if profile["metadata"]["name"] == name:
                return Listing("TrainingCluster", (profile,))
        own = Listing("TrainingCluster")
    whole = await read_object(cluster, "TrainingCluster", None, name)
    return whole if whole.first is not None or not whole.seen else own


async def discover_facts(cluster: Cluster, namespace: str, namespace_from: str = "") -> ClusterFacts:
    """Facts that a cluster file is written from."""
    version, groups = await asyncio.gather(cluster.request("GET", "/version"), cluster.request("GET", "/apis"))
    group_names = frozenset(str(group["name"]) for group in groups.get("groups", []))
    lists, everybodys, objects = await asyncio.gather(
        _lists(cluster, namespace, OF_A_FILE, group_names),
        _lists(cluster, "default", [NETWORK], group_names),
        _objects(cluster, namespace, [("Namespace", namespace)]),
    )
    return ClusterFacts(
        namespace=namespace,
        server=cluster.server,
        version=str(version.get("gitVersion", "")),
        namespace_from=namespace_from,
        groups=group_names,
        lists=lists,
        objects=objects,
        networks_elsewhere={"default": everybodys[NETWORK]},
    )


async def lint_facts(cluster: Cluster, spec: TrainingClusterSpec, namespace: str) -> ClusterFacts:
    """Facts that a cluster file is compared with: those it is written from, the operator, SCCs of the service account, and a dry run of one
    pod of the file's size.
    """
    from lockstep.plan.checks.lint import sized_pod

    facts = await discover_facts(cluster, namespace)
    is_missing = facts.object("Namespace", namespace).seen and facts.object("Namespace", namespace).first is None
    pods = [] if is_missing else [sized_pod(spec, namespace)]
    elsewhere, operator, sccs, tries = await asyncio.gather(
        _networks_elsewhere(cluster, spec, namespace, facts.list(NETWORK)),
        read_operator(cluster, namespace),
        _may_use_sccs(cluster, facts, spec.security.service_account),
        asyncio.gather(*(_try(cluster, pod) for pod in pods)),
    )
    return replace(
        facts,
        objects={**facts.objects, ("Deployment", OPERATOR_NAME): operator},
        networks_elsewhere={**facts.networks_elsewhere, **elsewhere},
        may_use_scc=sccs,
        tries={"Pod": tries[0]} if tries else {},
    )


async def doctor_facts(cluster: Cluster, file: ClusterFile, namespace: str) -> ClusterFacts:
    """Facts that a cluster's readiness is judged by."""
    name, account = file.profile.metadata.name, file.profile.spec.security.service_account
    keys = (("ServiceAccount", account), ("ServiceAccount", OPERATOR_NAME), ("RoleBinding", NAMED_BINDING))
    (lists, slices), objects, (operator, profile), (jobs, rights) = await asyncio.gather(
        asyncio.gather(_lists(cluster, namespace, OF_READINESS), _dns_slices(cluster)),
        _objects(cluster, namespace, keys),
        asyncio.gather(read_operator(cluster, namespace), read_profile(cluster, name, namespace)),
        asyncio.gather(
            sight_of_jobs(cluster), asyncio.gather(*(may(cluster, verb, kind, namespace, sub) for verb, kind, sub in RIGHTS.values()))
        ),
    )
    elsewhere, trouble = await asyncio.gather(
        _networks_elsewhere(cluster, file.profile.spec, namespace, lists[NETWORK], search=True), operator_trouble(cluster, operator.first)
    )
    return ClusterFacts(
        namespace=namespace,
        lists=lists | {"EndpointSlice": slices},
        objects=objects | {("Deployment", OPERATOR_NAME): operator, ("TrainingCluster", name): profile},
        networks_elsewhere=elsewhere,
        rights=dict(zip(RIGHTS, rights, strict=True)),
        jobs=jobs,
        operator_trouble=trouble,
    )


async def network_facts(cluster: Cluster, spec: TrainingClusterSpec, namespace: str) -> ClusterFacts:
    """Only the networks of the namespace, and where those are that it lacks."""
    lists = await _lists(cluster, namespace, [NETWORK])
    elsewhere = await _networks_elsewhere(cluster, spec, namespace, lists[NETWORK], search=True)
    return ClusterFacts(namespace, lists=lists, networks_elsewhere=elsewhere)


async def room_facts(cluster: Cluster, namespace: str, job: str) -> ClusterFacts:
    """Nodes and what runs on them, and nothing else; what `job` has itself counts as free."""
    lists, own = await asyncio.gather(_lists(cluster, namespace, OF_ROOM), _own_pods(cluster, namespace, job))
    return ClusterFacts(namespace, lists=lists, own_pods=own)


async def plan_facts(cluster: Cluster, resolved: Resolved, samples: Sequence[Object]) -> ClusterFacts:
    """Facts that a job is compared with. `samples`: the job, one pod and the StatefulSet, as they are tried out."""
    from lockstep.api.cluster import Platform
    from lockstep.plan.checks.needs import references

    namespace, name = resolved.namespace, resolved.profile.metadata.name
    (lists, own), (objects, profile, operator), tries = await asyncio.gather(
        asyncio.gather(_lists(cluster, namespace, OF_A_JOB), _own_pods(cluster, namespace, resolved.name)),
        asyncio.gather(
            _objects(cluster, namespace, ((one.kind, one.name) for one in references(resolved))),
            read_profile(cluster, name, namespace),
            read_operator(cluster, namespace),
        ),
        asyncio.gather(*(_try(cluster, item) for item in samples)),
    )
    elsewhere = await _networks_elsewhere(cluster, resolved.profile.spec, namespace, lists[NETWORK])
    answers = {item["kind"]: tried for item, tried in zip(samples, tries, strict=True)}
    if resolved.profile.spec.platform is Platform.OPENSHIFT:
        answers[SCC_REVIEW] = await _review(cluster, resolved, next(item for item in samples if item["kind"] == "Pod"))
    return ClusterFacts(
        namespace,
        lists=lists,
        objects=objects | {("TrainingCluster", name): profile, ("Deployment", OPERATOR_NAME): operator},
        networks_elsewhere=elsewhere,
        own_pods=own,
        tries=answers,
    )


async def objects_seen(cluster: Cluster, job: str, namespace: str) -> list[Object] | None:
    """Return the job, and whatever of its names is there; None where one of them may not be read. Secrets are not read: their values are
    nobody's to compare.
    """
    keys = [("TrainingJob", job), ("StatefulSet", job), ("Service", names.service_name(job)), ("NetworkPolicy", job)]
    with tolerated(FORBIDDEN):
        items = [await cluster.get(kind, namespace, name) for kind, name in keys]
        for kind in ("ConfigMap", "PersistentVolumeClaim"):
            items += (await cluster.list(kind, namespace, {"labelSelector": f"{names.LABEL_MANAGED_BY}={names.APP}"}))["items"]
        return [item for item in items if item is not None]
    return None


async def _own_pods(cluster: Cluster, namespace: str, job: str) -> tuple[Object, ...]:
    return (await list_kind(cluster, "Pod", namespace, {"labelSelector": f"{names.LABEL_JOB}={job}", **LIVE})).items


async def _networks_elsewhere(
    cluster: Cluster, spec: TrainingClusterSpec, namespace: str, own: Listing, *, search: bool = False
) -> dict[str, Listing]:
    """Networks of the other namespaces that rails name. `search`: of all namespaces, too, where `own` lacks one."""
    rails = set(spec.network.rdma.networks)
    places = sorted({name.partition("/")[0] for name in rails if "/" in name} - {namespace}) if own.seen else []
    if search and own.seen and {name for name in rails if "/" not in name} - {item["metadata"]["name"] for item in own.items}:
        places.append("")
    listings = await asyncio.gather(*(list_kind(cluster, NETWORK, place or None) for place in places))
    return dict(zip(places, listings, strict=True))


async def _dns_slices(cluster: Cluster) -> Listing:
    """EndpointSlices of the cluster's DNS; not seen where none is, and one may not be read."""
    places = [name.partition("/")[::2] for name in DNS_SERVICES]
    queries = ({"labelSelector": f"kubernetes.io/service-name={service}"} for _, service in places)
    reads = (list_kind(cluster, "EndpointSlice", namespace, query) for (namespace, _), query in zip(places, queries, strict=True))
    listings = await asyncio.gather(*reads)
    slices = tuple(item for listing in listings for item in listing.items)
    return Listing("EndpointSlice", slices, Sight.SEEN if slices or all(one.seen for one in listings) else Sight.FORBIDDEN)


async def operator_trouble(cluster: Cluster, deployment: Object | None) -> str:
    """Reason that pods of the operator don't start; '' while nothing is seen."""
    from lockstep.platforms.clusters.install import BACKED_OFF, PULL_FAILED, operator_wait, unpulled_image

    if deployment is None:
        return ""
    home = str(deployment["metadata"].get("namespace", OPERATOR_NAMESPACE))
    unpulled = await unpulled_image(cluster, home, deployment, (*PULL_FAILED, BACKED_OFF))
    return unpulled or (await operator_wait(cluster, home, deployment)).message


async def _may_use_sccs(cluster: Cluster, facts: ClusterFacts, account: str) -> Mapping[str, bool] | None:
    """Answers for each SCC that was seen. None: not for this person to ask."""
    user = f"system:serviceaccount:{facts.namespace}:{account}"
    sccs = [str(item["metadata"]["name"]) for item in facts.list("SecurityContextConstraints").items]
    with tolerated(FORBIDDEN):
        answers = await asyncio.gather(*(_may_use(cluster, facts.namespace, user, scc) for scc in sccs))
        return dict(zip(sccs, answers, strict=True)) or None
    return None


async def _may_use(cluster: Cluster, namespace: str, user: str, scc: str) -> bool:
    attributes: Object = {
        "namespace": namespace,
        "verb": "use",
        "group": "security.openshift.io",
        "resource": "securitycontextconstraints",
        "name": scc,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    spec = {"user": user, "groups": groups, "resourceAttributes": attributes}
    return await is_allowed(cluster, "LocalSubjectAccessReview", namespace, spec)


async def _try(cluster: Cluster, item: Object) -> Try:
    try:
        admitted, warnings = await cluster.try_out(item, apply=item["kind"] == "TrainingJob")
    except ApiError as error:
        return _refused(item["kind"], error)
    return Try(True, warnings=tuple(warnings), admitted=admitted)


def _refused(kind: str, error: ApiError) -> Try:
    """A lack of rights is no refusal of the object: both come as 403, told apart by the words that the authorizer always uses."""
    if error.status == FORBIDDEN and " cannot " in error.message and " resource " in error.message:
        return Try(None, f"your account may not {'patch' if kind == 'TrainingJob' else 'create'} one: {error.message}")
    if "does not support dry run" in error.message:  # a webhook that has side effects: what it would say is not known
        return Try(None, f"the API server can't try one out: {error.message}", fix="lockstep run, whose start shows it")
    if error.status == NOT_FOUND and "could not find the requested resource" in error.message:
        message = f"the cluster knows no {kind}: lockstep deploy installs it; lockstep run --in-namespace does without"
        return Try(None, message, fix="lockstep deploy CLUSTER")
    return Try(False, error.message)


async def _review(cluster: Cluster, resolved: Resolved, pod: Object) -> Try:
    """Ask which SCC the pods would get from their service account: the asker's own SCCs, which a dry run counts, too, would not help
    them.
    """
    account = resolved.profile.spec.security.service_account
    template: dict[str, Any] = {
        "metadata": {key: value for key, value in pod["metadata"].items() if key in ("labels", "annotations")},
        "spec": pod["spec"],
    }
    body = {
        "apiVersion": "security.openshift.io/v1", "kind": SCC_REVIEW, "spec": {"template": template, "serviceAccountNames": [account]},
    }  # fmt: skip
    try:
        answer = await cluster.request("POST", path_of(SCC_REVIEW, resolved.namespace), body)
    except ApiError as error:
        if error.status == FORBIDDEN:
            return Try(None, "your account may not ask")
        if error.status == NOT_FOUND:
            return Try(None, "the cluster has no PodSecurityPolicyReview; is it OpenShift, as its file says?")
        return Try(False, f": {error.message}")
    allowed = (answer.get("status") or {}).get("allowedServiceAccounts") or []
    mine: Object = next((one for one in allowed if one.get("name") == account), {})
    by, reason = mine.get("allowedBy"), mine.get("reason")
    return Try(by is not None, f" (SCC {by['name']})" if by is not None else f": {reason}" if reason else "")


async def as_deployed(cluster: Cluster, profile: str, namespace: str) -> tuple[str | None, str | None, Scope]:
    """`network.mode` of the cluster that is there, the image of the operator and where it works; None: not there, or not to be seen."""
    deployment = (await read_operator(cluster, namespace)).first
    deployed = (await read_profile(cluster, profile, namespace)).first or {}
    mode = deployed.get("spec", {}).get("network", {}).get("mode")
    if deployment is None:
        return mode, None, Scope()
    return mode, image_of(deployment), scope_of(deployment)


async def with_image(cluster: Cluster, job: TrainingJob, profile: TrainingCluster, namespace: str) -> TrainingCluster:
    """The TrainingCluster with the image that the operator there would take, as far as it can be seen, where neither it nor the job names
    one.
    """
    if job.spec.image or profile.spec.image:
        return profile
    from lockstep.plan.render.resolve import trainer_image

    deployment = (await read_operator(cluster, namespace)).first
    image = None if deployment is None else trainer_image(image_of(deployment))
    return profile.model_copy(update={"spec": profile.spec.model_copy(update={"image": image})})


async def unserved(cluster: Cluster, namespace: str) -> str:
    """Reason that no operator works in this namespace; "" where one does, as far as this person may see."""
    operator, binding, account = await asyncio.gather(
        read_operator(cluster, namespace),
        read_object(cluster, "RoleBinding", namespace, NAMED_BINDING),
        read_object(cluster, "ServiceAccount", namespace, OPERATOR_NAME),
    )
    objects = {("Deployment", OPERATOR_NAME): operator, ("RoleBinding", NAMED_BINDING): binding, ("ServiceAccount", OPERATOR_NAME): account}
    return scope.unserved(ClusterFacts(namespace, objects=objects))
