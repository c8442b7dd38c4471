"""Images that OpenShift has built: pods of every namespace name them in a way that works there, and may pull them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.clusters import deploy
from lockstep.cli.clusters.deploymentplan import Mode, planned
from lockstep.cli.shared.places import Verb
from lockstep.plan.observed import Observed
from lockstep.plan.ship.deploy import Left, State, called
from lockstep.plan.ship.imagebuild import Build, Image
from lockstep.plan.ship.openshift import next_step
from lockstep.plan.waiting.containers import why_not_started
from lockstep.platforms.clusters.install import objects_for_jobs
from lockstep.platforms.clusters.remove import uninstalled
from lockstep.platforms.clusters.send import Sent

REGISTRY = "image-registry.openshift-image-registry.svc:5000"
BESIDE_OPERATOR = f"{REGISTRY}/lockstep-system"
BINDING = "RoleBinding lockstep-system/lockstep-image-puller-nccl-test"


def images(cluster: str, image: str | None) -> set[str]:
    """Of the operator's container, and of the init container of every job's pods."""
    (deployment,) = [item for item in planned(Verb(), cluster, Mode.TCP, image).objects if item["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {container["image"], *(one["value"] for one in container["env"] if one["name"] == "LOCKSTEP_AGENT_IMAGE")}


@pytest.mark.parametrize(
    ("cluster", "image", "sent"),
    [
        ("barcelona", None, f"{BESIDE_OPERATOR}/lockstep-operator:0.1.0"),
        ("barcelona", "lockstep-operator:2", f"{BESIDE_OPERATOR}/lockstep-operator:2"),
        ("barcelona", f"{BESIDE_OPERATOR}/lockstep-operator:2", f"{BESIDE_OPERATOR}/lockstep-operator:2"),
        ("barcelona", "quay.io/team/lockstep-operator:2", "quay.io/team/lockstep-operator:2"),
        ("local", "lockstep-operator:2", "lockstep-operator:2"),
    ],
)
def test_a_name_without_a_registry_is_written_out_on_openshift_for_pods_of_every_namespace(
    cluster: str, image: str | None, sent: str
) -> None:
    assert images(cluster, image) == {sent}


def test_people_are_shown_the_short_name_and_what_is_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(Verb(), "barcelona", Mode.RDMA, f"{BESIDE_OPERATOR}/lockstep-operator:2")
    assert plan.choices == "--mode rdma --image lockstep-operator:2"
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / ".lockstep"))
    monkeypatch.chdir(tmp_path)
    binding = next(item for item in plan.objects if called(item) == BINDING)
    deploy.tell_left(plan, Sent((), (Left(binding, State.MISSING),)))
    told = capsys.readouterr().out
    assert f"  {BINDING}: missing\n" in told and f"in which the operator's image is {BESIDE_OPERATOR}/lockstep-operator:2 (" in told
    assert "system:image-puller" in (tmp_path / ".lockstep/deploy/barcelona/cluster.yaml").read_text()


def test_service_accounts_of_the_jobs_namespace_may_pull_what_lies_beside_the_operator() -> None:
    objects = planned(Verb(), "barcelona", Mode.TCP).objects
    binding = next(item for item in objects if called(item) == BINDING)
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:image-puller"}
    assert binding["subjects"] == [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts:nccl-test"}]
    named = [called(item) for item in objects]
    assert named.index("Namespace lockstep-system") < named.index(BINDING)
    assert not [item for item in planned(Verb(), "local", Mode.TCP).objects if "image-puller" in called(item)]


def test_uninstall_removes_that_right_and_clean_leaves_it() -> None:
    plan = planned(Verb(), "barcelona", Mode.TCP)
    assert BINDING in map(called, uninstalled(plan.objects))
    assert BINDING not in map(called, objects_for_jobs(plan.profile, "nccl-test"))


GRANT = "oc policy add-role-to-group system:image-puller system:serviceaccounts:"


@pytest.mark.parametrize(
    ("image", "tag", "namespace", "said"),
    [
        (Image.OPERATOR, "", "lockstep-system",
            f"lockstep deploy NAME; it lets pods of the cluster file's namespace pull {BESIDE_OPERATOR}/lockstep-operator:0.1.0"),
        (Image.OPERATOR, "op:2", "lockstep-system",
            f"lockstep deploy NAME --image lockstep-operator:2; it lets pods of the cluster file's namespace pull"
            f" {BESIDE_OPERATOR}/lockstep-operator:2"),
        (Image.OPERATOR, "", "team", f"lockstep deploy NAME --image {REGISTRY}/team/lockstep-operator:0.1.0; its own pods and those of jobs"
                                     f" must be let to pull it: {GRANT}lockstep-system -n team; {GRANT}JOBS_NAMESPACE -n team"),
        (Image.TRAINER, "", "lockstep-system",
            f"image: {BESIDE_OPERATOR}/lockstep-trainer:0.1.0 in the cluster file; "
            "lockstep deploy NAME lets pods of its namespace pull it"),
        (Image.TRAINER, "", "team", f"image: lockstep-trainer:0.1.0 in the cluster file, where jobs run in namespace team; where they run"
                                    f" in another one, image: {REGISTRY}/team/lockstep-trainer:0.1.0 and: {GRANT}JOBS_NAMESPACE -n team"),
    ],
)  # fmt: skip
def test_a_build_ends_with_what_to_do_so_that_jobs_use_the_image(image: Image, tag: str, namespace: str, said: str) -> None:
    assert next_step(Build(image, "0.1.0", tag=tag), namespace) == said


def test_a_pod_that_may_not_pull_from_another_namespace_is_told_with_the_command() -> None:
    waiting = {
        "reason": "ErrImagePull",
        "message": f"reading manifest 0.1.0 in {BESIDE_OPERATOR}/lockstep-operator: authentication required",
    }
    status: dict[str, Any] = {"initContainerStatuses": [{"name": "agent", "image": "x", "state": {"waiting": waiting}}]}
    pod = {"metadata": {"name": "x-0", "uid": "u"}, "spec": {"nodeName": "n"}, "status": status}
    notice = why_not_started(Observed(job={"metadata": {"name": "x", "namespace": "team"}}, pods=(pod,)))
    assert notice is not None and f"{GRANT}JOBS_NAMESPACE -n IMAGE_NAMESPACE" in notice.message
