"""Every reason that can keep a job from what was asked of it has a remedy of its own, and one that can work."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import typer.main

from lockstep.api.objects import Object
from lockstep.cli.main import app
from lockstep.plan.observed import Observed
from lockstep.plan.pages.remedies import HELP_WITHOUT_PODS, NO_MODULE_HERE, REMEDIES, Remedy, advice, remedy
from lockstep.plan.pages.why import why
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.reconcile import reconcile
from reference.verbs import commands
from support.checkout import ROOT
from unit.plan.reconcile.test_lost_nodes import lost
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, PROFILE, after, event, fresh, pod, report, running, settled, unplaced, waiting

PLAN = ROOT / "operator" / "lockstep" / "plan"
WARNINGS = {"MoreGPUsThanNodesHave", "NoRails", "Placeholder", "RDMAWithoutGPUs", "VariableIgnored"}
"""Notices of what is allowed and probably not meant: they keep nothing from starting."""


NEEDS_NONE = frozenset({
    Reason.ACCEPTED, Reason.NOT_ACCEPTED, Reason.SUSPENDED, Reason.NOT_SUSPENDED, Reason.STOPPING, Reason.RESIZING, Reason.START_REPLACED,
    Reason.FINISHED, Reason.ALL_SCHEDULED, Reason.PODS_NOT_SCHEDULED, Reason.STARTING, Reason.WAITING_FOR_REPORT, Reason.WAITING_FOR_RANKS,
    Reason.ALL_RANKS_READY, Reason.RUNNING, Reason.READY, Reason.IDLE, Reason.NO_STRAGGLER, Reason.SAVES_WORK, Reason.NODE_EXCLUDED,
    Reason.RESTARTING, Reason.NOT_RESTARTING, Reason.NO_CHECKPOINT, Reason.COMMITTED, Reason.COMPLETE, Reason.FAILED, Reason.NOT_FINISHED,
    Reason.NOT_FAILED, Reason.RETRIED, Reason.ALL_NODES_READY, Reason.NODES_NOT_SEEN, Reason.REPLACING, Reason.HOLDING, Reason.NOT_HELD,
    Reason.HOSTS_REACHED, Reason.UNREACHABLE, Reason.HOST_AWAY, Reason.AGENT_ENDED,
})  # fmt: skip
"""All is well, somebody asked for it, it passes by itself, or another condition's reason has the remedy."""


def stated_reasons() -> set[str]:
    """Of every Notice in the code, by its text or by its name in Reason."""
    texts = [path.read_text() for path in PLAN.rglob("*.py")]
    plain = {name for text in texts for name in re.findall(r'Notice\(\s*"([A-Za-z]+)"', text)}
    troubles = {name for text in texts for name in re.findall(r'Trouble\(\s*"([A-Za-z]+)"', text)}
    return plain | troubles | {str(reason) for reason in Reason}


def test_every_reason_has_a_remedy_or_needs_none() -> None:
    assert stated_reasons() - {str(reason) for reason in (*REMEDIES, *NEEDS_NONE)} - WARNINGS == set()
    assert not REMEDIES.keys() & NEEDS_NONE


@pytest.mark.parametrize("reason", REMEDIES, ids=str)
def test_a_reason_s_last_remedy_needs_nothing_of_the_message(reason: str) -> None:
    *named, last = REMEDIES[reason]
    assert last.takes == "" and all(choice.takes for choice in named)
    step = remedy(reason, "", fresh())
    assert step is not None and step.what and "{" not in step.command.replace('{"spec":{', "")


VERBS = {" ".join(path[1:]) for path, _ in commands(typer.main.get_command(app), ["lockstep"])}


@pytest.mark.parametrize("choice", [choice for choices in REMEDIES.values() for choice in choices], ids=lambda choice: choice.command)
def test_what_is_typed_is_a_command_that_there_is(choice: Remedy) -> None:
    program, verb, *more = (*choice.command.split(), "")
    if program == "lockstep":
        assert verb in VERBS or " ".join((verb, *more[:1])) in VERBS
    elif program == "kubectl":
        assert verb in {"annotate", "create", "delete", "describe", "edit", "exec", "get", "logs", "patch", "scale", "uncordon"}
    else:
        assert program in ("{0}", "{1}")  # one that the message names


IMMUTABLE = (Reason.CLUSTER_NOT_FOUND, Reason.NO_DEFAULT_CLUSTER, Reason.SEVERAL_DEFAULT_CLUSTERS, "WorkspaceClaimPerPod")


@pytest.mark.parametrize(
    "reason", [*IMMUTABLE, Reason.SERVICE_ACCOUNT_NOT_FOUND, Reason.INVALID_CLUSTER, Reason.IMAGE_PULL_FAILED], ids=str
)
def test_nobody_is_sent_to_edit_what_can_not_be_edited_or_is_not_at_fault(reason: str) -> None:
    assert not [choice for choice in REMEDIES[reason] if choice.command.startswith("kubectl edit")]


def kubelet(reason: str, message: str, image: str = "i:1", name: str = "trainer") -> Observed:
    return replace(settled(), pods=(waiting(reason, message, image=image, name=name), pod(1)))


def mount(message: str) -> Observed:
    said = event("pod-0", "FailedMount", message)
    return replace(settled(), pods=(pod(0, status={"phase": "Pending"}), pod(1)), warnings=(said,))


def refused_pods(message: str) -> Observed:
    said = event("uid-StatefulSet-x", "FailedCreate", f"create Pod x-0 in StatefulSet x failed error: {message}")
    return replace(settled(), pods=(), warnings=(said,))


def waits_for_claim(**claims: Object) -> Observed:
    spec = {"containers": [], "volumes": [{"name": "w", "persistentVolumeClaim": {"claimName": "w"}}]}
    made = {**{f"{name}": {"metadata": {"name": name}} for name in ("ml-dev-workspace", "ml-datasets")}, **claims}
    pods = tuple(pod(index, spec=spec, status=unplaced('persistentvolumeclaim "w" not found')) for index in (0, 1))
    return replace(running(), pods=pods, claims=made)


def cordoned() -> Observed:
    told = unplaced("0/1 nodes are available: 1 node(s) were unschedulable.")
    pods = tuple(pod(index, spec={"containers": []}, status=told) for index in (0, 1))
    node = {"metadata": {"name": "a", "labels": {}}, "spec": {"unschedulable": True}, "status": {"allocatable": {}, "conditions": []}}
    return replace(running(), pods=pods, nodes=(node,))


PENDING: Object = {"metadata": {"name": "w", "uid": "w"}, "spec": {"storageClassName": "fast"}, "status": {"phase": "Pending"}}
Q = {**PROFILE, "metadata": {**PROFILE["metadata"], "name": "q"}}
UNMARKED = {**PROFILE, "metadata": {"name": "p"}}
OPENSHIFT = "image-registry.openshift-image-registry.svc:5000/ml/i:1"


@pytest.mark.parametrize(
    ("observed", "command"),
    [
        (replace(fresh(), service_accounts=frozenset()), "kubectl create serviceaccount ml-dev-sa -n ns"),
        (replace(settled(report()), service_accounts=frozenset()), "kubectl create serviceaccount ml-dev-sa -n ns"),
        (fresh(cluster="barcelona"), "lockstep deploy barcelona"),
        (replace(fresh(), profiles=()), "lockstep cluster list"),
        (replace(fresh(), profiles=(UNMARKED,)), "kubectl annotate tc p lockstep.dev/is-default-cluster=true"),
        (replace(fresh(), profiles=(PROFILE, Q)), "kubectl annotate tc q lockstep.dev/is-default-cluster-"),
        (replace(fresh(), profiles=({**PROFILE, "spec": {"shmSize": "much"}},)), "lockstep deploy p"),
        (fresh(nodes="two"), "kubectl edit tj x -n ns"),
        (replace(fresh(), profiles=({**PROFILE, "spec": {"platform": "Kubernetes"}},)),
            """kubectl patch tj x -n ns --type merge -p '{"spec":{"image":"IMAGE"}}'"""),
        (kubelet("ImagePullBackOff", "manifest unknown: not found"),
            """kubectl patch tj x -n ns --type merge -p '{"spec":{"image":"IMAGE"}}'"""),
        (kubelet("ErrImagePull", "pull access denied, unauthorized"), "kubectl create secret docker-registry LOGIN -n ns"),
        (kubelet("ErrImagePull", "unauthorized: authentication required", OPENSHIFT), "oc policy add-role-to-group system:image-puller"),
        (kubelet("ErrImagePull", "not found", name="agent"), "lockstep deploy CLUSTER"),
        (kubelet("CreateContainerConfigError", 'secret "token" not found'),
            "kubectl create secret generic token -n ns --from-literal=KEY=VALUE"),
        (kubelet("CreateContainerConfigError", 'configmap "settings" not found'),
            "kubectl create configmap settings -n ns --from-file=FILE"),
        (kubelet("CreateContainerConfigError", "couldn't find key A in Secret ns/token"), "kubectl get secret,configmap -n ns"),
        (kubelet("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"), "kubectl describe pod x-0 -n ns"),
        (mount('MountVolume.SetUp failed for volume "v" : secret "mine" not found'), "kubectl create secret generic mine -n ns"),
        (mount('MountVolume.SetUp failed for volume "v" : secret "x-agents" not found'), "lockstep describe x -n ns"),
        (mount("Unable to attach or mount volumes: timed out"), "kubectl describe pod x-0 -n ns"),
        (refused_pods("pods \"x-0\" is forbidden: exceeded quota: gpus, requested: a=1, used:"
                      " a=8, limited: a=8"), "kubectl describe quota gpus -n ns"),
        (refused_pods('pods "x-0" is forbidden: error looking up service account ns/s:'
                      ' serviceaccount "s" not found'), "kubectl create serviceaccount s -n ns"),
        (refused_pods('pods "x-0" is forbidden: [maximum memory usage per Container is 64Mi,'
                      ' but limit is 4Gi]'), "kubectl describe limitrange -n ns"),
        (refused_pods('no PriorityClass with name high was found'),
            "kubectl get priorityclass"),
        (cordoned(), "kubectl uncordon a"),
        (lost(), "kubectl delete pod x-1 -n ns --force --grace-period=0"),
        (waits_for_claim(), "kubectl get pvc -n ns"),
        (waits_for_claim(w=PENDING), "kubectl describe pvc w -n ns"),
    ],
)  # fmt: skip
def test_why_begins_with_what_mends_the_cause(observed: Observed, command: str) -> None:
    answer = why(after(observed, reconcile(observed, None, CONTEXT, NOW)), (), NOW)
    assert answer.next[0].command.startswith(command)
    assert not [step for step in answer.next[1:] if step.command.startswith("kubectl edit")]


def test_no_line_of_a_log_becomes_the_next_command() -> None:
    ended = {"exitCode": 1, "message": "clean up first (kubectl delete namespace ns)"}
    observed = replace(settled(), pods=(pod(0, status={"containerStatuses": [{"name": "c", "state": {"terminated": ended}}]}), pod(1)))
    answer = why(after(observed, reconcile(observed, None, CONTEXT, NOW)), (), NOW)
    assert "clean up first" in answer.summary
    assert answer.next[0].command == "kubectl logs x-0 -n ns -c c --previous"
    cut = remedy(Reason.CONTAINER_FAILED, answer.summary.partition("; its log")[0], observed)
    assert cut is not None and cut.command == "kubectl describe pod x-0 -n ns"


@pytest.mark.parametrize("cause", HELP_WITHOUT_PODS)
def test_advice_on_hosts_and_on_this_machine_names_nothing_of_kubernetes(cause: str) -> None:
    words = advice({"cause": cause}, "x", "--cluster lab", in_pods=False)
    assert cause == "Preempted" or not re.search(r"\bpods?\b|kubectl|TrainingCluster|\bimage\b|bundle", words), words


@pytest.mark.parametrize(
    ("place", "options", "line"),
    [
        ("-n ml", {}, "the image or the environment lacks what the message names: add its package to the image"),
        ("--cluster lab", {"in_pods": False},
            "add it to environment.lock, then lockstep hosts setup lab and lockstep run instead of retry"),
        ("--local", {"in_pods": False, "no_module": NO_MODULE_HERE},
            f"the environment lacks what the message names: python3 -m pip --python {sys.executable} install PACKAGE"),
    ],
)  # fmt: skip
def test_advice_for_a_missing_module_has_the_line_of_the_place(place: str, options: dict[str, Any], line: str) -> None:
    words = "No module named 'trl'"
    for failure in ({"message": f"rank 1 exited with 1: ModuleNotFoundError: {words}"}, {"message": "", "lastLines": ["x", words]}):
        assert line in advice({"cause": "Setup", **failure}, "x", place, **options)
        assert "docs/how-to/add-packages.md" in advice({"cause": "Setup", **failure}, "x", place, **options)
    assert "add-packages" not in advice({"cause": "Setup", "message": "no space"}, "x", place, **options)


def test_advice_where_another_folder_s_program_lies_does_not_blame_the_environment() -> None:
    message = (
        "preflight: /workspace/main.py on node 0 is another program than the last attempt ran: that one was sent from a:/x, and this one"
        " from a:/y"
    )
    assert advice({"cause": "Setup", "message": message}, "x", "--cluster lab", in_pods=False).startswith("two projects share a folder")


def test_advice_for_a_killed_rank_names_the_limit_of_pods_and_the_kernel_s_log_of_hosts() -> None:
    assert "the pods' memory limit" in advice({"cause": "Killed"}, "x", "-n ml")
    assert "journalctl -k" in advice({"cause": "Killed"}, "x", "--cluster lab", in_pods=False)
