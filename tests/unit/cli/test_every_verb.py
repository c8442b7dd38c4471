"""Every verb, whatever goes wrong around it: one sentence, a documented exit code, never a traceback.

New verbs are found by themselves; what they need as arguments is made up from what they say of them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lockstep.cli import main as entry
from lockstep.cli.shared.places import PLACES
from lockstep.kube.kinds import KINDS
from reference.verbs import commands
from support.api_stub import ALWAYS, ApiStub, kubeconfig, served
from support.places.verb_words import UNDISTURBED

FAILED, USAGE, MAY_WAIT, INTERRUPTED = 1, 2, 3, 130
ON_THIS_MACHINE = (
    "quickstart", "init", "validate", "render", "cluster list", "use", "help", "devcluster", "adapter export", "build",
        "launch",
    "join", "hosts",
)  # fmt: skip
"""Verbs, and groups of them, that talk to no cluster, or make one."""
GIVEN = {
    "job": "x",
    "goal": "2",
    "script": "a.py",
    "fault": "kill-rank",
    "sources": "job.yaml",
    "target": "x:/datasets/",
    "cluster": "local",
    "clusters": "local",
    "name": "local",
}
"""Argument → what it is given; any other gets `x`."""
ANSWERS_WHATEVER_IS_HIDDEN = ("plan", "version", "cluster discover", "cluster lint")
MORE = {
    "run": ["--in-namespace", "-f", "job.yaml"], "retry": ["x"], "delete": ["x"],
    "model get": ["org/name", "--job", "x"], "debug": ["a.py"],
}  # fmt: skip
"""What some verbs want besides, though no option of theirs is required."""
FILES = {"bench scaling": "training.yaml"}
"""Job files of those that take no script's."""


VERBS = {" ".join(path): command for path, command in commands(typer.main.get_command(entry.app), [])}
REMOTE = sorted(name for name in VERBS if not any(name == own or name.startswith(f"{own} ") for own in ON_THIS_MACHINE))


def arguments(name: str, folder: Path) -> list[str]:
    """The least that the verb can be typed with, and the namespace of the stub's person where it takes one."""
    given = name.split(" ")
    for parameter in VERBS[name].params:
        if not parameter.required:
            continue
        value = str(folder / FILES.get(name, "job.yaml")) if parameter.name == "file" else GIVEN.get(str(parameter.name), "x")
        given += [parameter.opts[0], value] if parameter.opts[0].startswith("-") else [value]
    flags = {option for parameter in VERBS[name].params for option in parameter.opts} | {PLACES[name] for name in VERBS[name].takes}
    given += MORE.get(name, [])
    if name == "cluster discover":
        given += ["-o", str(folder / "found.yaml")]
    given += ["--cluster", "local"] if "--cluster" in flags and "--cluster" not in given else []
    given += ["--yes"] if "--yes" in flags else []
    return [*given, "-n", "team"] if "-n" in flags else given


def write_cluster_file(folder: Path, name: str, *lines: str) -> Path:
    """A cluster with GPUs; `lines`: more keys of its section `cluster`."""
    path = folder / f"{name}.yaml"
    more = "".join(f"  {line}\n" for line in lines)
    path.write_text(f"cluster:\n  name: {name}\n  namespace: team\n{more}gpus: {{type: H100, per_node: 4}}\n")
    return path


def write_job_file(folder: Path) -> None:
    document: dict[str, Any] = {
        "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"},
            "spec": {"script": {"path": "/workspace/a.py"}},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(document))
    training = {"model": {"name": "/workspace/models/x"}, "data": {"path": "/datasets/x.jsonl"}}
    (folder / "training.yaml").write_text(json.dumps({**document, "spec": {"nodes": 1, "training": training}}))


@pytest.fixture(autouse=True)
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job_file(tmp_path)
    write_cluster_file(tmp_path, "gpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def run(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    try:
        return entry.main()
    except SystemExit as ended:
        return 0 if ended.code is None else int(ended.code)


@pytest.mark.parametrize("name", REMOTE)
def test_a_cluster_that_does_not_answer_is_told_in_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"http://127.0.0.1:{port}")))
    code = run(monkeypatch, arguments(name, tmp_path))
    told = capsys.readouterr()
    assert code == FAILED, told
    assert f"http://127.0.0.1:{port} doesn't answer" in told.err + told.out
    assert "KUBECONFIG" in told.err + told.out or "--offline" in told.err, told


@pytest.mark.parametrize("name", REMOTE)
def test_without_a_kubeconfig_it_is_said_how_to_name_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code = run(monkeypatch, arguments(name, tmp_path))
    told = capsys.readouterr()
    assert code == USAGE, told
    assert f"KUBECONFIG names {tmp_path / 'none'}, which is not there" in told.err + told.out


@pytest.mark.parametrize("name", REMOTE)
def test_without_rights_it_is_said_which_are_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(ApiStub(forbidden={"*"}), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        code = run(monkeypatch, arguments(name, tmp_path))
    told = capsys.readouterr()
    assert code in ((0, FAILED, MAY_WAIT) if name in ANSWERS_WHATEVER_IS_HIDDEN else (FAILED, USAGE)), told
    assert name in ANSWERS_WHATEVER_IS_HIDDEN or " cannot " in told.err or "you may not" in told.err + told.out, told


@pytest.mark.parametrize("name", REMOTE)
def test_ctrl_c_ends_it_with_130_and_no_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = ApiStub()
    late = interrupted(stub, 1, monkeypatch, tmp_path, arguments(name, tmp_path))
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out
    assert late == [], "it waited for an answer"


def interrupted(stub: ApiStub, number: int, monkeypatch: pytest.MonkeyPatch, folder: Path, words: list[str]) -> list[str]:
    """Type a verb, and Ctrl-C at this request, which is left without an answer; those that tidy up get theirs. Return the paths whose
    answer was waited for.
    """
    ended, answer, late = threading.Event(), stub.answer, list[str]()

    def interrupt(method: str, path: str, body: Any) -> tuple[int, dict[str, Any] | str]:
        if len(stub.asked) == number:
            os.kill(os.getpid(), signal.SIGINT)
            if not ended.wait(30):
                late.append(path)
        return answer(method, path, body)

    stub.answer = interrupt  # type: ignore[method-assign]
    with served(stub, folder) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        code = run(monkeypatch, words)
        ended.set()
    assert code == INTERRUPTED, (code, stub.asked)
    return late


def running_job() -> ApiStub:
    """Return an API server with job x of two nodes, whose pods run."""
    progress = {"type": "Progressing", "status": "True", "reason": "Running", "message": "all ranks run"}
    job = {"metadata": {"name": "x", "namespace": "team", "uid": "u"}, "spec": {"nodes": 2}, "status": {"conditions": [progress]}}
    pods = [
        {
            "metadata": {"name": f"x-{node}", "namespace": "team", "uid": f"{node}"},
            "spec": {"containers": []},
            "status": {"phase": "Running"},
        }
        for node in range(2)
    ]
    core, own = "/api/v1/namespaces/team/pods", "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs/x"
    return ApiStub({
        own: job, core: {"metadata": {}, "items": pods}, f"{core}/x-0": pods[0], f"{core}/x-0/log": "2026-01-01T00:00:00Z a line\n",
        "/apis/apps/v1/namespaces/team/statefulsets/x": {"metadata": {"name": "x"}, "spec": {"replicas": 2}},
    })  # fmt: skip


REQUESTS = {"top x": 5, "logs x -f": 4, "describe x": 4, "why x": 8, "stop x": 3, "wait x": 2, "shell x": 2, "checkpoint x": 2}
"""Verb about a job that runs → how many of its requests are interrupted."""


@pytest.mark.parametrize(("verb", "number"), [(verb, number) for verb, last in REQUESTS.items() for number in range(2, last + 1)])
def test_ctrl_c_ends_a_verb_about_a_job_at_each_request(
    verb: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interrupted(running_job(), number, monkeypatch, tmp_path, [*verb.split(), "-n", "team"]) == [], "it waited for an answer"
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out


OF_A_JOB = [name for name in REMOTE if any(parameter.name == "job" and parameter.required for parameter in VERBS[name].params)]


def test_every_verb_about_a_job_is_asked_of_one_that_no_place_has() -> None:
    asked = {row.typed for row in UNDISTURBED if "nosuch" in row.typed}
    assert [name for name in OF_A_JOB if not any(typed.startswith(f"{name} ") for typed in asked)] == []


HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\u200f\u061c\u2028\x9b1;1H\x7f\r\nINJECTED: the job is Complete\nINJECTED too"
ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
OUTPUTS = {
    "": ["get", "describe", "why", "top", "logs"],
    "json": ["get", "why", "top"],
    "yaml": ["get"],
    "wide": ["get"],
    "name": ["get"],
}
MOMENT = "2026-01-01T00:00:00Z"


def hostile_job(name: str = "x") -> dict[str, Any]:
    """All that its owner, its script, its pods or a forger may have written there."""
    conditions = [
        {"type": kind, "status": status, "reason": HOSTILE if kind == "Progressing" else "RanksFailed", "message": HOSTILE,
            "lastTransitionTime": MOMENT}
        for kind, status in (("Accepted", "False"), ("PodsScheduled", "False"), ("RanksReady", "False"), ("FabricVerified", "False"),
            ("Progressing", "False"), ("Suspended", "True"), ("Failed", "True"))
    ]  # fmt: skip
    failure = {
        "cause": HOSTILE,
        "message": HOSTILE,
        "rank": 0,
        "node": 0,
        "nodeName": HOSTILE,
        "exception": HOSTILE,
        "lastLines": [HOSTILE],
        "stacks": HOSTILE,
    }
    restart = {"attempt": 1, "time": MOMENT, "cause": HOSTILE, "message": HOSTILE, "lostSteps": 1, "downtimeSeconds": 2, "counts": True}
    trainer = {
        "activity": HOSTILE,
        "step": 1,
        "totalSteps": 2,
        "metrics": [{"name": HOSTILE, "value": HOSTILE}, {"name": "loss", "value": HOSTILE}],
    }
    return {
        "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": "team", "uid": "u", "resourceVersion": "1", "creationTimestamp": MOMENT,
            "annotations": {"a": HOSTILE}},
        "spec": {"cluster": HOSTILE, "nodes": 1, "script": {"path": HOSTILE, "args": [HOSTILE]}},
        "status": {
            "conditions": conditions, "failure": failure, "restartHistory": [restart], "restarts": 1, "attempts": 2, "trainer": trainer,
                "nodes": 1,
            "ranks": {"desired": 1, "ready": 0}, "cluster": {"name": HOSTILE, "transport": HOSTILE},
                "result": {"adapter": HOSTILE, "evalLossBefore": HOSTILE},
            "checkpoint": {"lastCommittedStep": 1, "lastCommitTime": MOMENT, "path": HOSTILE}, "startTime": MOMENT,
            "fabric": {"transport": HOSTILE, "uses": HOSTILE}, "excludedNodes": [{"name": HOSTILE, "time": MOMENT, "message": HOSTILE}],
            "stop": {"attempt": 2, "message": HOSTILE, "reason": HOSTILE},
        },
    }  # fmt: skip


def hostile_objects() -> dict[str, list[dict[str, Any]]]:
    waiting = {
        "name": "trainer",
        "ready": False,
        "restartCount": 1,
        "state": {"waiting": {"reason": HOSTILE, "message": HOSTILE}},
        "lastState": {"terminated": {"exitCode": 1, "reason": HOSTILE, "message": HOSTILE}},
    }
    pod = {
        "metadata": {"name": "x-0", "namespace": "team", "uid": "p", "labels": {"lockstep.dev/job": "x"}},
        "spec": {"nodeName": HOSTILE, "containers": [{"name": "trainer", "image": HOSTILE}], "volumes": []},
        "status": {
            "phase": "Pending",
            "containerStatuses": [waiting],
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": HOSTILE}],
        },
    }
    event = {
        "metadata": {"name": "e", "namespace": "team", "uid": "e"},
        "involvedObject": {"kind": "Pod", "name": "x-0", "uid": "p"},
        "type": "Warning",
        "reason": HOSTILE,
        "message": HOSTILE,
        "lastTimestamp": MOMENT,
    }
    node = {
        "metadata": {"name": HOSTILE, "uid": "n", "labels": {HOSTILE: HOSTILE}},
        "spec": {"taints": [{"key": HOSTILE, "value": HOSTILE, "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": "False", "reason": HOSTILE, "message": HOSTILE}],
            "nodeInfo": {"kubeletVersion": HOSTILE},
        },
    }
    claim = {
        "metadata": {"name": HOSTILE, "namespace": "team", "uid": "c"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": HOSTILE},
        "status": {"phase": HOSTILE},
    }
    storage = {"metadata": {"name": HOSTILE, "uid": "s"}, "provisioner": HOSTILE, "volumeBindingMode": "Immediate"}
    template = {"spec": {"containers": [{"name": "trainer", "image": HOSTILE, "volumeMounts": []}], "volumes": []}}
    stateful_set = {"metadata": {"name": "x", "namespace": "team", "uid": "t"}, "spec": {"template": template, "volumeClaimTemplates": []}}
    profile = {"metadata": {"name": "local", "uid": "f", "annotations": {"a": HOSTILE}}, "spec": {"notes": HOSTILE}}
    return {"trainingjobs": [hostile_job()], "statefulsets": [stateful_set], "pods": [pod], "events": [event], "nodes": [node],
        "persistentvolumeclaims": [claim], "storageclasses": [storage], "trainingclusters": [profile]}  # fmt: skip


class HostileStub(ApiStub):
    """A cluster in which every text that somebody else may write is hostile, and so are its refusals."""

    refuses = False
    often = 0
    """Whoever asks for the same so many times waits for what never comes, and gets a Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.ended, self.interrupted = threading.Event(), threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:  # noqa: PLR0911 (one return a kind of answer)
        plural, parts = self.plural(path), path.strip("/").split("/")
        refusal = {"kind": "Status", "status": "Failure", "reason": "Invalid", "message": HOSTILE, "code": 422}
        asked_again = plural != "selfsubjectaccessreviews" and [asked[:2] for asked in self.asked].count((method, path)) == self.often
        if asked_again and self.interrupted.acquire(blocking=False):  # once: two requests may be counted at the same time
            os.kill(os.getpid(), signal.SIGINT)
            self.ended.wait(30)
        if path in ALWAYS:
            return 200, ALWAYS[path]
        if self.refuses or (method in ("POST", "PATCH") and plural not in ("selfsubjectaccessreviews", "trainingjobs")):
            return 422, refusal
        if plural == "selfsubjectaccessreviews":
            return 201, {"status": {"allowed": True, "reason": HOSTILE}}
        known = hostile_objects().get(plural)
        if path.endswith("/log"):
            return 200, f"{MOMENT} [rank 0] {HOSTILE}\n[lockstep] rank 0 on node 0 exited with 1\n"
        if known is None or method == "DELETE":
            return super().answer(method, path, body)
        if parts[-1] == plural:
            return 200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": known}
        named = [item for item in known if item["metadata"]["name"] == parts[-1]]
        kind = next(kind for kind, known in KINDS.items() if known.plural == plural)
        return (200, {"kind": kind, **named[0]}) if named else (404, refusal | {"code": 404, "reason": "NotFound"})


def check_harmless(told: Any, *, lines: bool = True) -> None:
    for text in (told.out, told.err):
        assert ACTS.search(text) is None, text
        assert not lines or not any(line.lstrip().startswith("INJECTED") for line in text.splitlines()), text


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("name", REMOTE)
def test_no_text_of_a_cluster_acts_on_the_terminal(
    name: str, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = HostileStub()
    stub.refuses, stub.often = refuses, 4
    with served(stub, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        run(monkeypatch, arguments(name, tmp_path))
        stub.ended.set()
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    check_harmless(told)


@pytest.mark.parametrize(("output", "name"), [(output, name) for output, names in OUTPUTS.items() for name in names])
def test_every_form_of_what_is_known_of_a_job_is_harmless_and_can_be_read(
    output: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(HostileStub(), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        run(monkeypatch, [name, "x", "-n", "team", *(["-o", output] if output else []), *(["--context", "c"])])
    told = capsys.readouterr()
    check_harmless(told)
    if output in ("json", "yaml"):
        document = yaml.safe_load(told.out) if output == "yaml" else json.loads(told.out)
        assert name != "get" or document == hostile_job(), "the values are as they were"
    elif output != "name":
        assert "evil\\x1b]0;owned\\x07" in told.out, "it is seen that there was something"


LOCAL = [
    ["validate", "-f", "job.yaml"], ["render", "-f", "job.yaml"], ["render", "-f", "job.yaml", "--explain"],
        ["render", "-f", "job.yaml", "-o", "json"],
    ["render", "-f", "job.yaml", "--explain", "-o", "json"], ["plan", "-f", "job.yaml", "--offline"], ["run", "-f", "job.yaml", "--local"],
        ["logs", "x", "--local"],
    ["why", "x", "--local"], ["top", "x", "--local"],
]  # fmt: skip
OF_FOLDERS = [["checkpoint", "runs"], ["checkpoint", "runs", "--verify"]]
JOBS: list[Any] = [
    {HOSTILE: 1},
    {"kind": HOSTILE, "apiVersion": HOSTILE},
    {"spec": {HOSTILE: HOSTILE}},
    {"spec": {"script": {"path": HOSTILE, "args": [HOSTILE]}, "env": [{"name": "A", "value": HOSTILE}]}},
    {"spec": {"script": {"path": "/workspace/a.py"}, "type": HOSTILE, "nodes": HOSTILE}},
    {"metadata": {"name": HOSTILE}},
    {"metadata": {"name": "x", "labels": {HOSTILE: HOSTILE}, "annotations": {"a": HOSTILE}}},
    HOSTILE,
]


@pytest.mark.parametrize(
    ("words", "number"), [*((words, number) for words in LOCAL for number in range(len(JOBS))), *((words, 0) for words in OF_FOLDERS)]
)
def test_no_text_of_a_file_acts_on_the_terminal(
    words: list[str], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads((tmp_path / "job.yaml").read_text())
    job = JOBS[number]
    for name in ("job.yaml", "other.yaml"):
        (tmp_path / name).write_text(json.dumps({**whole, **job} if isinstance(job, dict) else job, ensure_ascii=number % 2 == 0))
    commit = tmp_path / "runs/checkpoints/step-1.a1"
    commit.mkdir(parents=True)
    (commit / "manifest.json").write_text(json.dumps(job))
    workspace = tmp_path / ".lockstep/workspace/workspace/runs/x/logs/output"
    workspace.mkdir(parents=True)
    (workspace / "node-0.log").write_text(f"{MOMENT} 1 [rank 0] {HOSTILE}\n")
    monkeypatch.setattr(sys, "argv", ["lockstep", *words])
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run(monkeypatch, words)
    told = capsys.readouterr()
    assert told.out + told.err
    assert "Traceback" not in told.err, told
    check_harmless(told, lines=words[0] != "render")
