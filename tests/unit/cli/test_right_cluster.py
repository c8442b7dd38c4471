"""A verb acts on the cluster that it was told, or not at all: every verb, by every way in which it is told one, with the kubeconfig of
another.

The verbs are those of the command line itself, so that a new one is tried without being named here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import yaml

from lockstep.cli.main import app
from lockstep.cli.shared import folders
from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.devcluster.certificates import Authority
from support.api_stub import ApiStub, kubeconfig, served
from unit.cli.test_every_verb import FILES, REMOTE, VERBS, arguments, run, write_cluster_file, write_job_file

USAGE = 2
OF_NO_CLUSTER = {"quickstart", "cluster discover"}
"""They take no cluster file: the kubeconfig alone says where."""
TOLD = [name for name in REMOTE if name not in OF_NO_CLUSTER]
BY_FILE = [name for name in TOLD if any(parameter.name in ("file", "files") for parameter in VERBS[name].params)]
MORE = {"retry": ["retry", "--in-namespace"], "delete": ["delete", "--yes"], "model get": ["model", "get", "org/name"]}
"""What a verb of a job file is typed with, where it isn't what it is typed with for a job."""
BY_DEFAULT = [
    name for name in TOLD
    if (name in MORE or name not in BY_FILE)
    and ("cluster" in VERBS[name].takes or any(one.name == "cluster" and not one.required for one in VERBS[name].params))
]  # fmt: skip
OTHER_HOST = "api.other.example.com"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job_file(tmp_path)
    with write_cluster_file(tmp_path, "other", f"api: {OTHER_HOST}").open("a") as file:
        file.write("image: trainer:1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    """The cluster that the kubeconfig talks to, and that nobody means."""
    stub = ApiStub()
    with served(stub, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield stub


Refuses = Callable[[list[str], str], None]


@pytest.fixture
def refuses(wrong: ApiStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuses:
    """Type words, which must be refused and ask nothing: they mean another cluster than the kubeconfig."""

    def typed(words: list[str], meant: str) -> None:
        assert run(monkeypatch, words) != 0
        told = capsys.readouterr()
        assert wrong.asked == []
        assert f"your kubeconfig talks to {wrong.url}, but cluster {meant}" in told.out + told.err

    return typed


def without_cluster(words: list[str]) -> list[str]:
    at = words.index("--cluster") if "--cluster" in words else None
    return words if at is None else [*words[:at], *words[at + 2 :]]


def test_every_verb_that_asks_a_cluster_can_be_told_which() -> None:
    untold = {name for name in REMOTE if "cluster" not in {*VERBS[name].takes, *(one.name for one in VERBS[name].params)}}
    assert untold <= OF_NO_CLUSTER


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("deployed", [False, True])
def test_a_verb_asks_nothing_of_another_cluster_than_the_one_it_was_told(
    name: str, deployed: bool, refuses: Refuses, tmp_path: Path
) -> None:
    """`deployed`: its file doesn't say where it is, so it stays where it was deployed."""
    if deployed:
        with write_cluster_file(tmp_path, "other").open("a") as file:
            file.write("image: trainer:1\n")
        folders.remember_server("other", f"https://{OTHER_HOST}:6443")
    words = ["other.yaml" if word == "local" else word for word in arguments(name, tmp_path)]
    words += [] if "other.yaml" in words else ["other.yaml"]  # an argument that may be left out
    refuses(
        words, f"other was deployed to https://{OTHER_HOST}:6443" if deployed else f"other is at {OTHER_HOST} (cluster.api in its file)"
    )


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_the_cluster_in_use_is_meant_whatever_the_kubeconfig_says_since(name: str, refuses: Refuses, tmp_path: Path) -> None:
    folders.remember("barcelona")
    refuses([word for word in without_cluster(arguments(name, tmp_path)) if word != "local"], "barcelona is at ")


def test_a_script_of_a_dev_environment_and_a_pair_of_runs_are_of_the_cluster_that_was_told(
    wrong: ApiStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, ["run", "--cluster", "other.yaml", "a.py"]) == USAGE
    folders.remember("barcelona")
    assert run(monkeypatch, ["run", "a.py"]) == USAGE
    assert capsys.readouterr().err.count(f"your kubeconfig talks to {wrong.url}, but cluster ") == 2
    assert wrong.asked == []


@pytest.mark.parametrize("name", BY_FILE)
def test_a_job_file_names_the_cluster_too(name: str, refuses: Refuses, tmp_path: Path) -> None:
    for file in {"job.yaml", FILES.get(name, "job.yaml")}:
        document = yaml.safe_load((tmp_path / file).read_text())
        document["spec"] |= {"cluster": "barcelona", "image": "trainer:1", "storage": {"mode": "Shared"}}
        (tmp_path / file).write_text(json.dumps(document))
    words = MORE.get(name) or without_cluster(arguments(name, tmp_path))
    refuses(words if "-f" in words or "--file" in words else [*words, "-f", "job.yaml"], "barcelona is at ")


def test_a_context_that_is_named_must_be_the_cluster_s_too(
    wrong: ApiStub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, ["delete", "x", "--yes", "--cluster", "other.yaml", "--context", "c"]) == USAGE
    assert f"context c of your kubeconfig talks to {wrong.url}, but cluster other" in capsys.readouterr().err
    assert wrong.asked == []


def test_a_pod_s_own_cluster_must_be_the_one_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Authority(tmp_path)
    (tmp_path / "token").write_text("t")
    monkeypatch.setattr("lockstep.kube.kubeconfig.ACCOUNT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    assert run(monkeypatch, ["get", "--cluster", "other.yaml"]) == USAGE
    assert "this pod's service account talks to https://192.0.2.1:443, but cluster other is at" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["delete", "x", "--yes"], ["get"], ["cluster", "status"], ["stop", "x", "--no-wait"]])
def test_local_is_not_a_cluster_that_another_file_describes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = load_cluster("barcelona").cluster.api
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"https://api.{host}:6443")))
    named = ["local"] if words == ["cluster", "status"] else ["--cluster", "local"]
    assert run(monkeypatch, [*words, *named]) == USAGE
    assert "or name the cluster of this one: barcelona" in capsys.readouterr().err


def test_a_second_file_of_one_cluster_is_told_the_line_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = load_cluster("barcelona").cluster.api
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"https://api.{host}:6443")))
    write_cluster_file(tmp_path, "team")
    assert run(monkeypatch, ["get", "--cluster", "team.yaml"]) == USAGE
    line = f"if both files describe this one, write `api: {host}` below `cluster:` in that of team"
    assert (
        "you named cluster team, whose file states no cluster.api: choose its context with --context, or name the cluster of this one:"
        f" barcelona; {line}" in (capsys.readouterr().err.replace("\n", " "))
    )


def test_local_is_the_embedded_cluster_while_that_is_up(
    wrong: ApiStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lockstep.devcluster.host.layout import default_layout

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    layout = default_layout()
    layout.kubeconfig.parent.mkdir(parents=True)
    layout.kubeconfig.write_text("{}")
    assert run(monkeypatch, ["delete", "x", "--yes", "--cluster", "local"]) == USAGE
    assert f"cluster local is the embedded one at {layout.server} (unset KUBECONFIG)" in capsys.readouterr().err
    assert wrong.asked == []
    run(monkeypatch, ["get"])
    assert wrong.asked, "whoever names no cluster means the kubeconfig's"


@dataclass
class Meeting(ApiStub):
    """A cluster that answers once both clusters were asked."""

    both: Barrier = field(default_factory=lambda: Barrier(2))

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/trainingjobs"):
            self.both.wait(60)
        return super().answer(method, path, body)


def test_two_verbs_of_a_process_act_each_on_its_own_cluster_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Meeting()
    second = Meeting(both=first.both)
    ended: dict[str, Any] = {}

    def type_at(name: str) -> None:
        try:
            ended[name] = app(["get", "--cluster", f"{name}.yaml", "--context", name, "-n", name], standalone_mode=False)
        except Exception as error:
            ended[name] = error

    with served(first, tmp_path), served(second, tmp_path):
        servers = {"one": first, "two": second}
        for name, stub in servers.items():
            write_cluster_file(tmp_path, name, f"api: {stub.url}")
        (tmp_path / "both.yaml").write_text(yaml.safe_dump({
            "current-context": "one",
            "clusters": [{"name": name, "cluster": {"server": stub.url}} for name, stub in servers.items()],
            "contexts": [{"name": name, "context": {"cluster": name}} for name in servers],
        }))  # fmt: skip
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "both.yaml"))
        typed = [Thread(target=type_at, args=(name,)) for name in servers]
        for thread in typed:
            thread.start()
        for thread in typed:
            thread.join(120)
    assert ended == {"one": None, "two": None}
    for name, stub in servers.items():
        asked = {path.partition("/namespaces/")[2].partition("/")[0] for _, path, _ in stub.asked if "/namespaces/" in path}
        assert asked == {name}


def test_where_a_deployment_was_forced_later_verbs_follow_it(wrong: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.remember_forced("other", wrong.url)
    run(monkeypatch, ["get", "--cluster", "other.yaml"])
    assert wrong.asked
    folders.forget("other")
    wrong.asked.clear()
    assert run(monkeypatch, ["get", "--cluster", "other.yaml"]) == USAGE
    assert wrong.asked == []
