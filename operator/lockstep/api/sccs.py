"""OpenShift's security context constraints (SCCs): a refusal of a pod by all of them, in one sentence (pure)."""

from __future__ import annotations

import re

RDMA_SCC = "lockstep-rdma"
"""Name of the SCC of RDMA pods, and of the roles that allow its use."""
_REFUSED = "unable to validate against any security context constraint: "
_NEXT = re.compile(r", (?=provider |no access to scc/)")
_TOO_STRICT = re.compile(r'provider "?([^\s":]+)"?: (?!Forbidden: not usable)(.*)', re.DOTALL)
_USERS = "hostUsers: Invalid value"
"""Refusal by restricted-v3, whatever else a pod asks for: no pod of Lockstep has a user namespace."""
_STATED = "fsGroup: Invalid value: [1000]"
"""Refusal of the group that pods of platform: kubernetes have."""


def scc_refusal(message: str, namespace: str, account: str = "") -> tuple[str, str] | None:
    """Return what the nearest of the usable SCCs has against a pod, in its own words, and what to do; None where no SCC refused it.

    `account`: the pod's service account, where it is known.
    """
    _, found, listed = message.partition(_REFUSED)
    if not found:
        return None
    each = _NEXT.split(listed[1:-1] if listed.startswith("[") else listed)
    items = [match.groups() for item in each if (match := _TOO_STRICT.match(item))]
    reasons = {scc: [reason for by, reason in items if by == scc] for scc, _ in items}
    nearest = min(reasons, key=lambda scc: (_USERS in str(reasons[scc]), len(reasons[scc])), default="")
    said = f"{nearest} says {'; '.join(reasons[nearest])}" if nearest else listed
    return f"no SCC that the pod's service account may use admits it: {said}", _remedy(listed, nearest, namespace, account)


def _remedy(listed: str, nearest: str, namespace: str, account: str) -> str:
    if _STATED in listed:
        return "write platform: openshift into the cluster file, and pods leave user and group to the SCC, which gives them the namespace's"
    if "IPC_LOCK" in listed and nearest != RDMA_SCC:
        if RDMA_SCC not in listed:
            return f"RDMA pods need the SCC {RDMA_SCC}: an administrator repeats lockstep deploy CLUSTER, which brings it"
        give = f"oc adm policy add-scc-to-user {RDMA_SCC} -z {account or 'SERVICE_ACCOUNT'} -n {namespace}"
        return f"RDMA pods need the SCC {RDMA_SCC}: an administrator types: {give}"
    return f"oc adm policy who-can use scc restricted-v2 -n {namespace} shows who may use which"
