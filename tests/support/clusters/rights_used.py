"""The rights that a service account has on a real API server, and those that it has used, by the server's audit log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client


@dataclass(frozen=True, order=True)
class Right:
    """One verb on one resource. `namespace` "": in all of them, or the resource is in none. `name` "": whatever it is called."""

    verb: str
    group: str
    resource: str
    """Resource with its subresource."""
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        named = f"/{self.name}" if self.name else ""
        group = f".{self.group}" if self.group else ""
        return f"{self.verb} {self.resource}{group}{named}" + (f" in {self.namespace}" if self.namespace else "")

    def covers(self, use: Right) -> bool:
        same = (self.verb, self.group, self.resource) == (use.verb, use.group, use.resource)
        return same and self.namespace in ("", use.namespace) and self.name in ("", use.name)


def granted(connection: Any, account: str, namespace: str) -> set[Right]:
    """Rights by bindings to the account itself, without those of every account."""
    rbac = client.RbacAuthorizationV1Api(connection)
    rights: set[Right] = set()
    for binding in rbac.list_cluster_role_binding().items:
        if _binds(binding, account, namespace):
            rights |= set(_rights(rbac.read_cluster_role(binding.role_ref.name).rules, ""))
    for binding in rbac.list_role_binding_for_all_namespaces().items:
        if not _binds(binding, account, namespace):
            continue
        place, role = binding.metadata.namespace, binding.role_ref
        found = rbac.read_cluster_role(role.name) if role.kind == "ClusterRole" else rbac.read_namespaced_role(role.name, place)
        rights |= set(_rights(found.rules, place))
    return rights


def _binds(binding: Any, account: str, namespace: str) -> bool:
    return any((s.kind, s.name, s.namespace) == ("ServiceAccount", account, namespace) for s in binding.subjects or ())


def _rights(rules: Iterable[Any], namespace: str) -> Iterable[Right]:
    for rule in rules:
        for verb in rule.verbs:
            for group in rule.api_groups or ():
                for resource in rule.resources or ():
                    for name in rule.resource_names or ("",):
                        yield Right(verb, group, resource, namespace, name)


def used(log: Path, account: str, namespace: str, begin: int = 0) -> dict[Right, bool]:
    """Rights that the account used, and True for those allowed every time; without the rights of every account (reviews of itself,
    discovery).

    `begin`: bytes of the log that aren't looked at.
    """
    rights: dict[Right, bool] = {}
    for line in log.read_bytes()[begin:].splitlines():
        event = json.loads(line)
        about = event.get("objectRef") or {}
        if event["user"]["username"] != f"system:serviceaccount:{namespace}:{account}" or "resource" not in about:
            continue
        resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
        right = Right(event["verb"], about.get("apiGroup", ""), resource, about.get("namespace", ""), about.get("name", ""))
        allowed = event.get("annotations", {}).get("authorization.k8s.io/decision") == "allow"
        rights[right] = rights.get(right, True) and allowed
    return rights


def unused(grants: set[Right], uses: Iterable[Right]) -> set[Right]:
    """Rights that no use needs. A use needs only the narrowest right that covers it."""
    needed = set()
    for use in uses:
        covering = [right for right in grants if right.covers(use)]
        if covering:
            needed.add(max(covering, key=lambda right: (bool(right.name), bool(right.namespace))))
    return grants - needed
