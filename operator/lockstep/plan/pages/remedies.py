"""The next command to type: by the reason of a condition, by where a job stands, and by what it failed of (pure).

Every reason that can keep a job from what was asked of it has a remedy of its own here; those of hosts are in `plan.hosts.status`. A
pattern takes the names that a command needs from the condition's message; the last remedy of a reason needs none.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.api.names import AGENT_CONTAINER, FIXED_FIELDS, LABEL_JOB, pod_name
from lockstep.api.objects import Object, condition, go_on_words
from lockstep.plan.observed import Observed
from lockstep.plan.reasons import Reason
from lockstep.plan.reconcile.interactive import is_interactive, run_command


@dataclass(frozen=True)
class Step:
    """A command, and what it is for."""

    command: str
    what: str


@dataclass(frozen=True)
class Remedy:
    """`command` and `what` may name {job}, {namespace}, {pod} (that of node 0), and as {0}, {1} … what `takes` found in the message."""

    command: str
    what: str
    takes: str = ""


_EDIT = "kubectl edit tj {job} -n {namespace}"
_DESCRIBE_POD = "kubectl describe pod {pod} -n {namespace}"
_DESCRIBE_SET = "kubectl describe statefulset {job} -n {namespace}"
_EVENTS = "lockstep describe {job} -n {namespace}"
_ANEW = "lockstep delete {job} -n {namespace}"
_START_ANEW = "and then lockstep resume {job} -n {namespace}, to {go_on}"
_CORRECT = "change what the message names; the job then starts by itself"
_INODES = (
    "kubectl exec {pod} -n {namespace} -- df -i /workspace",
    "shows how many inodes the volume has left: remove files, of small ones many",
)
_SAID = Remedy("{1}", "{0}", r"(?s)^.*(?:^|[;:] )([^;:()]+) \(`?((?:kubectl|oc|lockstep) [^()`]+)`?\)")
"""Clause of a message in which its author names what helps: `…: create it (kubectl create serviceaccount s -n ns)`; the last counts."""
_MAKE_LOGIN = (
    "kubectl create secret docker-registry {0} -n {namespace} --docker-server=REGISTRY --docker-username=USER --docker-password=TOKEN"
)
_IMAGE = """kubectl patch tj {job} -n {namespace} --type merge -p '{{"spec":{{"image":"IMAGE"}}}}'"""
_CLUSTER_FILES = Remedy("lockstep cluster list", "the cluster files; lockstep deploy NAME sends one")

NOT_AS_ASKED = ("FellBackToTCP", "HCASubset", "GPUDirectDisabled", "RanksDiffer", "OtherTransport")
"""Reasons of condition FabricVerified where it is False."""

REMEDIES: Mapping[str, tuple[Remedy, ...]] = {
    # Accepted
    Reason.INVALID_SPEC: (Remedy(_EDIT, _CORRECT),),
    Reason.CLUSTER_NOT_FOUND: (_SAID, _CLUSTER_FILES),
    Reason.NO_DEFAULT_CLUSTER: (_SAID, _CLUSTER_FILES),
    Reason.SEVERAL_DEFAULT_CLUSTERS: (_SAID, Remedy("kubectl get tc", "lists them")),
    Reason.INVALID_CLUSTER: (_SAID, _CLUSTER_FILES),
    Reason.SERVICE_ACCOUNT_NOT_FOUND: (_SAID, Remedy("kubectl get serviceaccount -n {namespace}", "lists them")),
    Reason.CLAIM_DELETED: (_SAID, Remedy("kubectl get pvc -n {namespace}", "shows if it is gone; the job then starts by itself")),
    Reason.NAME_TAKEN: (_SAID, Remedy(f"kubectl get all -n {{namespace}} -l {LABEL_JOB}={{job}}", "shows what has the job's name")),
    Reason.PREVIOUS_JOB_REMAINS: (
        Remedy(f"kubectl get statefulset,pod -n {{namespace}} -l {LABEL_JOB}={{job}}",
            "shows what is left of it; the job starts by itself when that is gone"),
    ),
    Reason.FROZEN_RUN_LOST: (Remedy("lockstep stop {job} -n {namespace}", _START_ANEW),),
    Reason.CHANGE_PENDING: (Remedy("lockstep stop {job} -n {namespace}",
        "and then lockstep resume {job} -n {namespace}: starts with what was changed"),),
    Reason.WRITE_REFUSED: (
        Remedy("kubectl describe quota {0} -n {namespace}", "shows what is used: free some, or ask for more",
            r"exceeded quota: ([^,:\s]+)"),
        Remedy("lockstep deploy CLUSTER", "restores the operator's rights", "has lost this right"),
        Remedy("kubectl describe tj {job} -n {namespace}",
            "shows the API server's words: ask the person who set the rule; Lockstep tries again by itself"),
    ),
    "RDMAUnavailable": (Remedy(_EDIT, "another spec.fabric.mode; the job then starts by itself"),),
    "RailResourceInvalid": (Remedy("lockstep deploy CLUSTER",
        "once network.rdma.rails of its file is corrected; the job then starts by itself"),),
    "ClaimSizeInvalid": (Remedy("lockstep deploy CLUSTER",
        "once the claim's size in its file is corrected; the job then starts by itself"),),
    "NoImage": (Remedy(_IMAGE, "names one; the job then starts by itself"),),
    "NoGPUs": (Remedy(_EDIT,
        "gpusPerNode: 0 trains on CPUs; a cluster that has GPUs says so in gpus.per_node of its file, sent with lockstep deploy CLUSTER"),),
    "NotEnoughNodes": (Remedy("lockstep scale {job} N -n {namespace}", "fewer nodes; the job then starts by itself"),),
    "TooManyRanks": (Remedy("lockstep scale {job} N -n {namespace}", "fewer nodes; the job then starts by itself"),),
    "NodeSelectorConflict": (Remedy(_EDIT, "another podTemplate.nodeSelector; the job then starts by itself"),),
    "VolumeConflict": (Remedy(_EDIT, "another name or path in podTemplate.volumes; the job then starts by itself"),),
    "AnnotationReserved": (Remedy(_EDIT, "remove it from podTemplate.annotations; the job then starts by itself"),),
    "WorkspaceClaimPerPod": (Remedy(_ANEW,
        "and create it again without storage.workspaceClaimName, which can't be changed in an existing job"),),
    "ResourcesNotPossible": (Remedy(_EDIT, "another spec.resources, as the message says; the job then starts by itself"),),
    "RunTooLarge": (Remedy(_EDIT, "shorter env, arguments, training settings or pod template; the job then starts by itself"),),
    # PodsScheduled
    Reason.PODS_NOT_CREATED: (_SAID, Remedy(_DESCRIBE_SET, "shows what Kubernetes says about creating its pods")),
    Reason.PODS_REFUSED: (_SAID, Remedy(_DESCRIBE_SET, "shows why its pods are refused")),
    Reason.SCHEDULING: (Remedy(_EVENTS, "shows what the scheduler says"),),
    Reason.QUEUED: (_SAID, Remedy(_DESCRIBE_POD, "shows its scheduling gates: the controller that set them lifts them")),
    Reason.NODES_RELEASED: (Remedy("lockstep get -n {namespace}", "shows which jobs want the same nodes; this one tries again by itself"),),
    Reason.UNSCHEDULABLE: (
        Remedy("lockstep scale {job} N -n {namespace}", "a job needs one node per pod: ask for as many as there are",
            r"needs one node per pod"),
        Remedy(_EDIT,
            "correct podTemplate.nodeSelector, or let an administrator label Nodes so: kubectl label node NODE KEY=VALUE; "
            "pods start by themselves", r"no node of the cluster matches"),
        Remedy("kubectl uncordon {0}", "lets pods start there again, if the work for which it was cordoned is done",
            r"nodes? ([^\s,]+)[^;]* (?:is|are) cordoned"),
        # Never the command that frees what others hold: that is for whoever asks to decide, and the message has it.
        Remedy(_EVENTS, "shows what the scheduler says; the job starts by itself when enough nodes have room"),
    ),
    Reason.CLAIM_NOT_BOUND: (_SAID, Remedy("kubectl get pvc -n {namespace}", "shows which are bound")),
    # RanksReady
    Reason.IMAGE_PULL_FAILED: (
        Remedy("lockstep deploy CLUSTER", "with an operator's image that the nodes can pull: its pods start anew by themselves",
            rf"of container {AGENT_CONTAINER}:"),
        Remedy(_MAKE_LOGIN, "the pull is tried again by itself", r"Secret ([^\s,]+)[^;]* of imagePullSecrets is not"),
        Remedy("{0}", "an administrator of the image's namespace allows the pull; it is tried again by itself",
            r"(oc policy add-role-to-group [^;]+)"),
        Remedy(_MAKE_LOGIN.replace("{0}", "LOGIN"), "a login that spec.imagePullSecrets then names: the job starts anew by itself",
            r"(?i)unauthorized|authentication|denied|\b40[13]\b"),
        Remedy(_IMAGE,
            "corrects it (or correct the cluster's image and send it with lockstep deploy CLUSTER): the job starts anew by itself"),
    ),
    Reason.CONTAINER_FAILED: (  # (its message has lines of a log, and may be cut off behind them)
        Remedy("{0} --previous", "shows what it said before it ended", r"its log says more \((kubectl logs \S+ -n \S+ -c \S+)\)"),
        Remedy(_DESCRIBE_POD, "shows how its containers ended"),
    ),
    Reason.CONTAINER_NOT_STARTED: (_SAID, Remedy(_DESCRIBE_POD, "shows what the kubelet says about its container")),
    Reason.VOLUME_NOT_MOUNTED: (_SAID, Remedy(_DESCRIBE_POD, "shows what the kubelet says about its volumes")),
    Reason.NETWORK_NOT_READY: (Remedy(_DESCRIBE_POD, "shows what its node's network plugin says"),),
    Reason.POD_NOT_ENDED: (_SAID, Remedy(_DESCRIBE_POD, "shows what keeps it")),
    Reason.POD_FAILED: (Remedy(_DESCRIBE_POD, "shows why the kubelet gave it up"),),
    Reason.PREFLIGHT_FAILED: (Remedy("lockstep describe {job} -n {namespace}",
        "shows every finding and its fix; the job checks again by itself"),),
    Reason.DNS_UNAVAILABLE: (Remedy("kubectl get pods -n kube-system -l k8s-app=kube-dns",
        "shows if the cluster's DNS runs (OpenShift: oc get pods -n openshift-dns); the job starts by itself when it answers"),),
    Reason.NAME_NOT_FOUND: (Remedy("lockstep deploy CLUSTER", "creates the operator's Service again; the job then starts by itself"),),
    Reason.NETWORK_BLOCKED: (Remedy("kubectl get networkpolicy -n {namespace}",
        "shows what keeps its pods apart; the job starts by itself when they reach each other"),),
    Reason.REPORT_REFUSED: (Remedy("lockstep stop {job} -n {namespace}", _START_ANEW),),
    # NodesHealthy
    Reason.NODE_LOST: (_SAID, Remedy("kubectl get nodes", "shows which are not ready")),
    Reason.NODE_BOUND_VOLUME: (Remedy("kubectl get nodes,pvc -n {namespace}",
        "bring the Node back, or give up what only its claim holds"),),
    Reason.NO_NODE_FREE: (_SAID, Remedy("kubectl get nodes", "shows which are not ready: bring one back, or add one")),
    Reason.AGENT_CONNECTED: (_SAID, Remedy("kubectl get nodes", "shows which are not ready")),
    # Progressing
    Reason.NO_REPORT: (Remedy("kubectl logs {pod} -n {namespace} --tail 50", "shows what node 0 says; it runs on without the operator"),),
    Reason.NODE_NOT_HEARD: (Remedy(f"kubectl get pods -n {{namespace}} -l {LABEL_JOB}={{job}} -o wide",
        "shows the Nodes of the pods that can't talk to each other"),),
    Reason.RECORD_UNWRITTEN: (
        Remedy(*_INODES, r"^[^;]*no inodes"),
        Remedy("kubectl get events -n {namespace} --field-selector involvedObject.name={pod}",
            "shows what the cluster says about the volume; if it is lost, mend it, and delete the pod to mount it anew",
            r"^[^;]*(?:Input/output|Stale|No such device|not connected|Read-only|doesn't answer)"),
        Remedy("kubectl exec {pod} -n {namespace} -- df -h /workspace", "shows what room the volume has: make room, or enlarge its claim"),
    ),
    # Others
    Reason.SLOW_RANK: (Remedy("lockstep top {job} -n {namespace}", "shows each rank beside the others"),),
    Reason.SAVE_FAILED: (
        Remedy(*_INODES, r"no inodes"),
        Remedy("kubectl exec {pod} -n {namespace} -- df -h /workspace", "shows what room the volume has"),
    ),
    # FabricVerified
    **dict.fromkeys(NOT_AS_ASKED, (Remedy("lockstep describe {job} -n {namespace}",
        "shows the fabric of each node that isn't as asked; docs/how-to/fabric.md has what each reason needs"),)),
    # Failed
    Reason.RANKS_FAILED: (Remedy("lockstep retry {job} -n {namespace}", "to {go_on}"),),
    Reason.START_TIMEOUT: (Remedy("lockstep retry {job} -n {namespace}",
        "once what kept node 0 from starting is fixed; it takes what spec says then"),),
    Reason.DEADLINE_EXCEEDED: (
        Remedy("lockstep retry {job} -n {namespace}", "to {go_on}; raise spec.activeDeadlineSeconds first, or it ends as early again"),
    ),
}  # fmt: skip


def remedy(reason: str, message: str, observed: Observed) -> Step | None:
    """The next command for a job whose condition says so; None: nothing is to be done, or the reason is of another version."""
    fields = {"job": observed.name, "namespace": observed.namespace, "pod": pod_name(observed.name, 0), "go_on": go_on_words(observed.job)}
    for choice in REMEDIES.get(reason, ()):
        match = re.search(choice.takes, message)
        if match is not None:
            return Step(choice.command.format(*match.groups(), **fields), choice.what.format(*match.groups(), **fields))
    return None


HOST_MEMORY, SHARED_MEMORY = "HostMemory", "SharedMemory"
"""Stand for OutOfMemory in HELP_BY_CAUSE where no GPU's memory was short: the node's own, and shared memory that was found full."""
NO_MODULE, NO_MODULE_HERE, ANOTHER_PROGRAM = "NoModule", "NoModuleHere", "AnotherProgram"
"""Stand for Setup where Python found no module, in pods or on hosts and on this machine, and where another folder's program is in the place
of the job's.
"""
HELP_BY_CAUSE = {
    "UserCode": "the script failed: correct it first",
    "Configuration": "the job asks for something impossible: change what the message names",
    "OutOfMemory": "use less memory: a smaller microBatchSize (the global batch stays), a shorter maxLength, or more nodes",
    HOST_MEMORY: (
        "the node's own memory, not the GPU's: raise spec.resources.memory, or without it resources.limits.memory of the TrainingCluster,"
        " or take fewer ranks a node, fewer data loader workers or a smaller offload"
    ),
    SHARED_MEMORY: "shared memory was full: do what the message says",
    "Fabric": "ranks lost their connections: check the fabric and the node that is named",
    "Storage": (
        "the volume, or another file system, is full, failed, or may not be written: first make room where the message says, or fix what it"
        " names"
    ),
    "NodeLost": "a node was lost: make another one available",
    "Preempted": "the pods were preempted: they start again when there is room",
    "Hang": "the stacks of all ranks: lockstep cp {job}:runs/{job}/logs stacks {place}, or the bundle below",
    "NonFinite": "the loss became NaN or infinite: change what the message names, else lower learningRate or use another precision",
    "Setup": "the image or the environment lacks what the message names",
    NO_MODULE: (
        "the image or the environment lacks what the message names: add its package to the image, or in /workspace/packages"
        " (docs/how-to/add-packages.md)"
    ),
    ANOTHER_PROGRAM: "two projects share a folder: send the job's own again, as the message says, and the other one to a folder of its own",
    "Killed": "no process of the job sent that signal: find out who did, and check the pods' memory limit",
    "Hardware": "a GPU of that node failed: kubectl cordon NODE, so that the job starts on another one",
    "Internal": "this is a defect of Lockstep: please report it with the bundle",
}
HELP_WITHOUT_PODS = {
    **HELP_BY_CAUSE,
    HOST_MEMORY: "that machine's own memory, not its GPU's: take fewer ranks on it, fewer data loader workers or a smaller offload",
    "NodeLost": "a host was lost: bring it back, or leave it out with --without",
    "Hang": "the stacks of all ranks: lockstep cp {job}:runs/{job}/logs stacks {place}",
    "Setup": "the environment lacks what the message names",
    NO_MODULE: (
        "the environment lacks what the message names: put its package in /workspace/packages, with PYTHONPATH; or add it to"
        " environment.lock, then lockstep hosts setup {cluster} and lockstep run instead of retry (docs/how-to/add-packages.md)"
    ),
    NO_MODULE_HERE: (
        "the environment lacks what the message names: python3 -m pip --python {python} install PACKAGE adds its package"
        " (docs/how-to/add-packages.md)"
    ),
    "Killed": "no process of the job sent that signal: find out who did; on that machine, journalctl -k shows whether its memory ran out",
    "Hardware": "a GPU of that host failed: leave the host out with --without until it is mended",
    "Internal": "this is a defect of Lockstep: please report it with the job's log",
}
"""The same on hosts and on this machine, which have no pods, no limits of a cluster and no Kubernetes."""

_HOST_WORDS = (
    "host memory",
    "low on resource: memory",
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "DataLoader worker",
    "shm_size",
    "emory allocation",
    "runtime: out of memory",
    "/dev/shm",  # noqa: S108 (a word in a message)
    "SIGBUS",
)


def leave_namespace(observed: Observed, home: str) -> tuple[Step, ...]:
    """Steps for a job that was created in another namespace than it was meant for."""
    return (
        Step(f"lockstep delete {observed.name} -n {observed.namespace}", "removes it from there"),
        Step(f"lockstep run -f FILE -n {home}", f"creates it in namespace {home}"),
    )


def next_steps(observed: Observed, state: str, *, held: bool, message: str = "", stale: bool = False) -> tuple[Step, ...]:
    """The most useful one first. `message`: what is said of where the job stands, if more is seen than its status says. `stale`: nobody
    keeps the status up to date.
    """
    look = (Step(f"lockstep doctor -n {observed.namespace}", "shows what the operator lacks"),) if stale else ()
    steps = (*look, *_steps(observed, state, held=held))
    if state in ("Suspended", "Complete", "Failed", "Unseen"):
        return steps
    return tuple(dict.fromkeys((*_remedies(observed, state, message), *steps)))


def _remedies(observed: Observed, state: str, message: str) -> list[Step]:
    """Steps that its conditions ask for; first of the one that keeps it from running."""
    accepted, progressing = condition(observed.status, "Accepted"), condition(observed.status, "Progressing")
    facts = []
    if state in ("Waiting", "NodeNotHeard", "RecordUnwritten") or (state == "Restarting" and progressing.get("status") == "False"):
        facts.append({**progressing, **({"message": message} if message else {})})
    if accepted.get("status") == "False" or accepted.get("reason") == Reason.CHANGE_PENDING:
        facts.append({**accepted, **({"message": message} if message and state == "Refused" else {})})
    elif "`lockstep stop" in accepted.get("message", ""):  # a key of the operator was made anew
        facts.append({"reason": Reason.FROZEN_RUN_LOST})
    for kind, unwell in (("NodesHealthy", "False"), ("SavesFailing", "True"), ("Straggling", "True"), ("FabricVerified", "False")):
        if (fact := condition(observed.status, kind)).get("status") == unwell:
            facts.append(fact)
    steps = (remedy(fact.get("reason", ""), fact.get("message", ""), observed) for fact in facts)
    known = [step for step in steps if step is not None]
    return known or ([Step(_EDIT.format(job=observed.name, namespace=observed.namespace), _CORRECT)] if state == "Refused" else [])


def _steps(observed: Observed, state: str, *, held: bool) -> tuple[Step, ...]:
    job, place = observed.name, f"-n {observed.namespace}"
    bundle = Step(f"lockstep why {job} {place} --bundle {job}.tar.gz", "all that a helper needs, without secrets")
    if state == "Failed":
        return _after_failure(observed, place, bundle, held=held)
    # A detached script has no terminal in which Ctrl-C would end it.
    stop = (Step(f"lockstep stop {job} --run {place}", "end the script; the environment stays"),) if is_interactive(observed.job) else ()
    steps = {
        "Unseen": (Step(f"lockstep doctor {place}", "shows if an operator works there"),),
        "Waiting": (Step(f"lockstep describe {job} {place}", "shows what the cluster says about its pods"), bundle),
        "Starting": (Step(f"lockstep logs {job} {place} -f", "follow the start"),),
        "Ready": (Step(run_command(observed), "start a script of /workspace on all its nodes"),),
        "Running": (Step(f"lockstep logs {job} {place} -f", "follow it"), *ask_ranks(observed, place), *stop),
        "Restarting": (Step(f"lockstep logs {job} {place} -f", "follow the restart"), bundle),
        "NodeNotHeard": (bundle,),
        "RecordUnwritten": (bundle,),
        "Silent": (
            Step(f"kubectl logs {pod_name(job, 0)} {place} --tail 50", "shows what node 0 says; it runs on without the operator"),
            bundle,
        ),
        "Suspended": (Step(f"lockstep resume {job} {place}", go_on_words(observed.job)),),
        "Complete": (Step(f"lockstep describe {job} {place}", "shows where its results are"),),
    }
    return steps.get(state, ())


def ask_ranks(observed: Observed, place: str) -> tuple[Step, ...]:
    """Step for ranks that report no step: nobody can say whether they hang."""
    if "step" in observed.status_part("trainer"):
        return ()
    return (Step(f"lockstep stacks {observed.name} {place}", "shows where each rank is, should nothing come; they go on"),)


def _after_failure(observed: Observed, place: str, bundle: Step, *, held: bool) -> tuple[Step, ...]:
    job, failure = observed.name, observed.status_part("failure")
    again = Step(f"lockstep retry {job} {place}", f"{go_on_words(observed.job)}; {advice(failure, job, place)}")
    failed = condition(observed.status, "Failed")
    reason = str(failed.get("reason", ""))
    if reason in (Reason.START_TIMEOUT, Reason.DEADLINE_EXCEEDED):
        again = remedy(reason, str(failed.get("message", "")), observed) or again
    look = Step(f"kubectl exec -it {pod_name(job, failure.get('node', 0))} {place} -- sh", "look into the pod while it is held")
    fixed = _fixed_field(failure, str(failed.get("message", "")))
    anew = (
        Step(f"lockstep delete {job} {place}", f"spec.{fixed} can't be changed in this job: correct the file, and delete the job"),
        Step(f"lockstep run -f FILE {place}", "creates it again from the corrected file"),
        Step(f"lockstep retry {job} {place}", "only if the file is right, and what the message names is there now"),
    )
    return (*((look,) if held else ()), *(anew if fixed else (again,)), bundle)


def _fixed_field(failure: Object, message: str) -> str:
    """Field that the failure names, as one whose value is wrong, where nobody may change it after creation; '' if it names none."""
    if failure.get("cause") != "Configuration":
        return ""
    words = f"{message} {failure.get('message', '')}"
    return next(
        (field for field in FIXED_FIELDS if re.search(rf"(?:spec|training)\.{re.escape(field.removeprefix('training.'))}\b", words)), ""
    )


def advice(failure: Object, job: str, place: str, *, in_pods: bool = True, no_module: str = NO_MODULE) -> str:
    """Advice for what to do before the job is started again. `no_module`: the row about a missing module."""
    kind = str(failure.get("cause", ""))
    if kind == "Setup" and "No module named" in " ".join((str(failure.get("message", "")), *(failure.get("lastLines") or [])[-1:])):
        kind = no_module
    if kind == "Setup" and "is another program than the last attempt ran" in failure.get("message", ""):
        kind = ANOTHER_PROGRAM
    if kind == "OutOfMemory" and is_of_the_host(failure):
        kind = SHARED_MEMORY if "the file system /dev/shm" in failure.get("message", "") else HOST_MEMORY
    words = (HELP_BY_CAUSE if in_pods else HELP_WITHOUT_PODS).get(kind, "remove the cause first")
    return words.format(job=job, place=place, cluster=place.removeprefix("--cluster "), python=shlex.quote(sys.executable))


def is_of_the_host(failure: Object) -> bool:
    """True if the memory that was short is the node's: no GPU's library says so otherwise."""
    words = " ".join((str(failure.get("message", "")), *map(str, failure.get("lastLines") or [])))
    exception = str(failure.get("exception", ""))
    of_the_host = exception == "bad_alloc" or (exception.endswith("MemoryError") and exception != "OutOfMemoryError")
    return of_the_host or any(word in words for word in _HOST_WORDS)
