"""Who may install which operator, and what they are offered."""

from __future__ import annotations

import pytest

from lockstep.cli.clusters.deploymentplan import Mode, planned
from lockstep.cli.shared.places import Verb
from lockstep.plan.cluster.scope import AccountStanding, Admission, admission, needed_for_operator

LACKS = ({"kind": "ClusterRole", "metadata": {"name": "lockstep-operator"}},)


@pytest.mark.parametrize(
    ("standing", "expected"),
    [
        (AccountStanding(), Admission.AS_PLANNED),
        (AccountStanding(LACKS, may_have_own=True), Admission.OFFER_OWN),
        (AccountStanding(LACKS, may_have_own=True, knows_jobs=False), Admission.NEED_DEFINITIONS),
        (AccountStanding(LACKS, may_have_own=True, has_operator=True), Admission.AS_PLANNED),
        (AccountStanding(LACKS, may_have_own=False), Admission.AS_PLANNED),
        (AccountStanding(LACKS, may_have_own=False, knows_jobs=False), Admission.AS_PLANNED),
    ],
    ids=["all rights", "rights of one namespace", "no TrainingJobs yet", "an operator is there", "neither", "neither, and no TrainingJobs"],
)
def test_one_namespace_s_operator_is_offered_to_who_may_install_that_one_alone(standing: AccountStanding, expected: Admission) -> None:
    assert admission(standing) is expected


def test_what_the_account_lacks_is_said_by_kind_and_by_namespace() -> None:
    needed = needed_for_operator(planned(Verb(), "local", Mode.TCP).objects)
    kinds = {item["kind"] for item in needed}
    assert {"Deployment", "ClusterRole", "TrainingCluster"} <= kinds
    assert kinds.isdisjoint({"CustomResourceDefinition", "Namespace", "PersistentVolumeClaim"})
    assert {item["metadata"].get("namespace", "lockstep-system") for item in needed} == {"lockstep-system"}, (
        "its own namespace is not asked for"
    )
    assert (
        AccountStanding(tuple(needed)).missing
        == "your account may not install an operator of the whole cluster (it may not change TrainingClusters, ClusterRoles,"
        " ClusterRoleBindings and objects of namespace lockstep-system)"
    )
    assert AccountStanding(LACKS).missing.endswith("(it may not change ClusterRoles)")
