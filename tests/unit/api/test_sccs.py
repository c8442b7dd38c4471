"""What OpenShift's API server says of a pod that no SCC admits, in one sentence: recorded from it (tests/openshift/test_rights.py)."""

from __future__ import annotations

import pytest

from lockstep.api.sccs import scc_refusal

DENIED = 'provider "{}": Forbidden: not usable by user or serviceaccount'
USER = ".containers[0].runAsUser: Invalid value: 0: must be in the ranges: [1000650000, 1000659999]"
LOCKS = '.containers[0].capabilities.add: Invalid value: "IPC_LOCK": capability may not be added'
INIT = ".initContainers[0].runAsUser: Invalid value: 1000: must be in the ranges: [1000650000, 1000659999]"
USERS = ".spec.hostUsers: Invalid value: null: Host Users must be set to false"
OF_RDMA = [
    DENIED.format("anyuid"), f"provider restricted-v2: {INIT}", f"provider restricted-v2: {USER}", f"provider restricted-v2: {LOCKS}",
        f"provider restricted-v3: {USERS}",
    f"provider restricted-v3: {USER.replace('1000650000, 1000659999', '1000, 65534')}", f"provider restricted-v3: {LOCKS}",
    DENIED.format("restricted"), DENIED.format("nonroot-v2"), DENIED.format("privileged"),
]  # fmt: skip
WITH_OURS = [*OF_RDMA, DENIED.format("lockstep-rdma")]
GIVE = "oc adm policy add-scc-to-user lockstep-rdma -z {} -n team"


def said(items: list[str], account: str = "ml-dev-sa") -> tuple[str, str]:
    listed = f"[{', '.join(items)}]" if len(items) > 1 else items[0]
    refusal = scc_refusal(f'pods "x-0" is forbidden: unable to validate against any security context constraint: {listed}', "team", account)
    assert refusal is not None
    what, remedy = refusal
    assert what.startswith("no SCC that the pod's service account may use admits it: ")
    return what.removeprefix("no SCC that the pod's service account may use admits it: "), remedy


def test_the_scc_with_the_fewest_reasons_is_quoted_with_field_value_and_range() -> None:
    assert said(WITH_OURS)[0] == f"restricted-v2 says {INIT}; {USER}; {LOCKS}"
    assert said([OF_RDMA[4], *OF_RDMA[1:4]])[0] == f"restricted-v2 says {INIT}; {USER}; {LOCKS}", "restricted-v3 is never near"
    usable = [f"provider anyuid: {LOCKS}", *WITH_OURS[1:]]
    assert said(usable)[0] == f"anyuid says {LOCKS}"
    assert said([f"provider restricted-v2: {USER}"])[0] == f"restricted-v2 says {USER}"


def test_where_no_scc_may_be_used_or_the_words_are_others_the_server_s_own_stay() -> None:
    none = [DENIED.format("restricted-v2"), DENIED.format("restricted-v3")]
    assert said(none)[0] == ", ".join(none).join("[]")
    older = "spec.containers[0].securityContext.runAsUser: Invalid value: 0: must be in the ranges: [1000650000, 1000659999]"
    assert said([older])[0] == older


@pytest.mark.parametrize(
    ("items", "account", "remedy"),
    [
        (WITH_OURS, "ml-dev-sa", f"RDMA pods need the SCC lockstep-rdma: an administrator types: {GIVE.format('ml-dev-sa')}"),
        (WITH_OURS, "", f"RDMA pods need the SCC lockstep-rdma: an administrator types: {GIVE.format('SERVICE_ACCOUNT')}"),
        (OF_RDMA, "ml-dev-sa", "RDMA pods need the SCC lockstep-rdma: an administrator repeats lockstep deploy CLUSTER, which brings it"),
        (
            [f"provider restricted-v2: {USER}",
                "provider lockstep-rdma: .spec.volumes[1]: Invalid value: \"csi\": csi volumes are not allowed to be used"],
            "", "oc adm policy who-can use scc restricted-v2 -n team shows who may use which",
        ),
        (
            ["provider restricted-v2: .spec.securityContext.fsGroup: Invalid value: [1000]: 1000 is not an allowed group",
                f"provider restricted-v2: {LOCKS}"],
            "", "write platform: openshift into the cluster file, and pods leave user and group to the SCC, which gives them the"
                " namespace's",
        ),
    ],
    ids=["RDMA", "RDMA for an unknown account", "RDMA before any deployment", "another reason", "a file of plain Kubernetes"],
)  # fmt: skip
def test_what_to_do_is_said(items: list[str], account: str, remedy: str) -> None:
    assert said(items, account)[1] == remedy


def test_another_refusal_is_none_of_an_scc() -> None:
    assert scc_refusal('pods "x-0" is forbidden: exceeded quota: q', "team") is None
