"""Every verb, whatever goes wrong around it: one sentence, a documented exit code, never a traceback.

New verbs are found by themselves; what they need as arguments is made up from what they say of them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from api_stub import ApiStub, kubeconfig, served
from lockstep.cli import main as entry

FAILED, USAGE, INTERRUPTED = 1, 2, 130
ON_THIS_MACHINE = (
    "quickstart", "init", "validate", "render", "clusters", "devcluster", "checkpoint", "adapter export", "adapter merge", "build",
)  # fmt: skip
"""Verbs, and groups of them, that talk to no cluster, or make one."""
GIVEN = {
    "job": "x",
    "nodes": "2",
    "script": "a.py",
    "fault": "kill-rank",
    "source": "job.yaml",
    "target": "x:/datasets/",
    "cluster": "local",
    "clusters": "local",
    "name": "local",
}
"""Argument → what it is given; any other gets `x`."""
ANSWERS_WHATEVER_IS_HIDDEN = ("plan", "version", "cluster discover", "cluster lint")
MORE = {"run": ["--in-namespace", "-f", "job.yaml"], "retry": ["x"], "cluster gpus": ["barcelona"]}
"""What some verbs want besides, though no option of theirs is required."""


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, command


VERBS = {" ".join(path): command for path, command in leaves(typer.main.get_command(entry.app))}
REMOTE = sorted(name for name in VERBS if not any(name == own or name.startswith(f"{own} ") for own in ON_THIS_MACHINE))


def arguments(name: str, folder: Path) -> list[str]:
    """The least that the verb can be typed with, and the namespace of the stub's person where it takes one."""
    given = name.split(" ")
    for parameter in VERBS[name].params:
        if not parameter.required:
            continue
        value = str(folder / "job.yaml") if parameter.name == "file" else GIVEN.get(str(parameter.name), "x")
        given += [parameter.opts[0], value] if parameter.opts[0].startswith("-") else [value]
    flags = {option for parameter in VERBS[name].params for option in parameter.opts}
    given += MORE.get(name, [])
    if name == "cluster discover":
        given += ["-o", str(folder / "found.yaml")]
    given += ["--cluster", "local"] if "--cluster" in flags and "--cluster" not in given else []
    given += ["--yes"] if "--yes" in flags else []
    return [*given, "-n", "team"] if "--namespace" in flags else given


def write_job_file(folder: Path) -> None:
    document: dict[str, Any] = {
        "apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": {"script": {"path": "/workspace/a.py"}},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(document))


@pytest.fixture(autouse=True)
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job_file(tmp_path)
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
    assert code in ((0, FAILED) if name in ANSWERS_WHATEVER_IS_HIDDEN else (FAILED, USAGE)), told
    assert name in ANSWERS_WHATEVER_IS_HIDDEN or " cannot " in told.err or "you may not" in told.err + told.out, told


@pytest.mark.parametrize("name", REMOTE)
def test_ctrl_c_ends_it_with_130_and_no_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub, ended = ApiStub(), threading.Event()
    answer = stub.answer

    def interrupt(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """The first request is left without an answer; those that tidy up get theirs."""
        if len(stub.asked) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(30)
        return answer(method, path, body)

    stub.answer = interrupt  # type: ignore[method-assign]
    with served(stub, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        code = run(monkeypatch, arguments(name, tmp_path))
        ended.set()
    told = capsys.readouterr()
    assert code == INTERRUPTED, told
    assert "Traceback" not in told.err + told.out


OF_A_JOB = [name for name in REMOTE if any(parameter.name == "job" and parameter.required for parameter in VERBS[name].params)]


@pytest.mark.parametrize("name", OF_A_JOB)
def test_a_job_that_is_not_there_is_told_with_the_namespace_that_was_looked_in(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(ApiStub(), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        code = run(monkeypatch, arguments(name, tmp_path))
    told = capsys.readouterr()
    assert code == USAGE, told
    assert "there is no TrainingJob x in namespace team: there is none at all; -n names another namespace" in told.err
