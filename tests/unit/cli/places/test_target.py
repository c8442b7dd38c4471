"""Which namespace a verb means: as kubectl's, unless a cluster file is named."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.cli.jobs.get import get
from lockstep.cli.main import explanation, main
from lockstep.cli.shared import folders
from lockstep.cli.shared.clusterfiles import cluster_names, peek
from lockstep.cli.shared.jobargs import ListForm, TargetOptions, known_names
from lockstep.cli.shared.places import Verb
from lockstep.kube.cluster import ApiError
from lockstep.platforms.kubernetes.backend import KubernetesBackend, no_such_job
from lockstep.platforms.local.backend import LocalBackend
from support.api_stub import ALWAYS, ApiStub, served
from support.checkout import ROOT
from support.in_process import lockstep

CLUSTERS = ROOT / "clusters"


def in_context(context: str | None, cluster: str | None = None, namespace: str | None = None) -> TargetOptions:
    """What was typed with --context, about a kubeconfig that may be another cluster's."""
    return TargetOptions(cluster, namespace, context, Verb(forced=True))


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig with two contexts: the current one names a namespace."""
    named = {"cluster": "c", "namespace": "team"}
    content = {
        "current-context": "work",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "work", "context": named}, {"name": "bare", "context": {"cluster": "c"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


@pytest.mark.usefixtures("contexts")
@pytest.mark.parametrize(
    ("cluster", "asked", "context", "meant"),
    [
        ("local", None, None, "team"),
        ("local", "mine", None, "mine"),
        ("local", None, "bare", "lockstep"),
        ("barcelona", None, None, peek("barcelona")),
        ("barcelona", "mine", None, "mine"),
    ],
)
def test_the_namespace_is_the_one_asked_for_else_the_named_cluster_s_else_the_context_s(
    cluster: str, asked: str | None, context: str | None, meant: str | tuple[str, str]
) -> None:
    expected = meant if isinstance(meant, str) else meant[1]
    assert in_context(context, cluster, asked).chosen_namespace() == expected
    assert in_context(context, cluster, asked).target().namespace == expected


@pytest.mark.usefixtures("contexts")
def test_a_context_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="has no context nowhere; there are bare, work"):
        in_context("nowhere", "local").target()


@pytest.mark.parametrize("text", ["- a\n", "cluster: {name: other, namespace: x}\n", "cluster: {name: mine}\n", "a: [\n"])
def test_what_is_not_plain_is_left_to_the_models(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert peek(str(tmp_path / "mine.yaml")) is None or text.startswith("cluster: {name: other")
    assert peek(str(tmp_path / "nothing.yaml")) is None


@pytest.mark.parametrize("name", cluster_names())
def test_a_short_look_at_a_cluster_file_finds_what_the_models_find(name: str) -> None:
    from lockstep.cli.shared.clusterfiles import load_cluster

    found = load_cluster(name).cluster
    assert peek(name) == (found.name, found.namespace, found.api, False)


@pytest.fixture
def nothing_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No KUBECONFIG, no embedded cluster, nothing deployed from here; the home folder of somebody without a kubeconfig."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))
    return tmp_path


def test_where_no_cluster_is_named_the_one_in_use_is_meant_and_one_that_is_gone_is_named(nothing_said: Path) -> None:
    assert TargetOptions().named == "local"
    folders.remember("barcelona")
    assert TargetOptions().named == "barcelona"
    assert in_context("another-context").named == "local"
    of_hosts = nothing_said / "hosts.yaml"
    for gone in ("of-a-file-elsewhere", str(of_hosts)):
        folders.remember(gone)
        with pytest.raises(ConfigError, match=f"^there is no {gone}, which lockstep use names: "):
            str(TargetOptions().named)
    of_hosts.write_text("")
    assert TargetOptions().named == str(of_hosts), "quickstart --hosts"


def test_a_run_of_quickstart_is_found_where_no_workspace_is_named(nothing_said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nothing_said)
    gang = nothing_said / "quickstart/workspace/runs/demo/gang"
    gang.mkdir(parents=True)
    (gang / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "jobUid": "u", "restarts": 0, "started": "2026-01-01T00:00:00Z"}))
    found = TargetOptions(".lockstep/workspace").backend().job("demo")
    assert found.at == f"demo --cluster {nothing_said}/quickstart"
    assert [job.name for job in TargetOptions(".lockstep/workspace").backend().jobs()] == ["demo"] and LocalBackend(
        nothing_said
    ).jobs() == []


@pytest.mark.parametrize("verb", ["validate", "render", "cp -f job.yaml model demo:/workspace/models/"])
def test_a_job_file_that_names_no_cluster_is_about_the_one_in_use_and_you_read_so_once(
    verb: str, nothing_said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(nothing_said)
    Path("job.yaml").write_text(
        "kind: TrainingJob\napiVersion: lockstep.dev/v1alpha1\nmetadata: {name: demo}\nspec: {script: {path: /a.py}}\n"
    )
    Path("model").touch()
    words = [*verb.split(), *([] if "-f" in verb else ["-f", "job.yaml"])]
    nowhere = lockstep(*words)
    refused = "lockstep: job.yaml: spec.cluster is not set, and none is in use (lockstep use): set it or use --cluster; "
    without = "note: job.yaml names no cluster, and none is in use: it is checked without one (--cluster names one)\n"
    assert nowhere.returncode == (2 if verb.startswith("cp") else 0) and nowhere.stderr.startswith(
        refused if verb.startswith("cp") else without
    )
    folders.remember("barcelona")
    if verb.startswith("cp"):
        named = lockstep(*words, "--context", "other").stderr
        assert named.startswith(
            "lockstep: job.yaml: spec.cluster is not set, and --context names no cluster file: set it or use --cluster; "
        )
    told = lockstep(*words).stderr
    note = "note: job.yaml names no cluster: this is about barcelona, which lockstep use names (--cluster names another)\n"
    assert told.count("names no cluster") == 1 and told.startswith(note)


def test_a_cluster_that_was_removed_is_meant_no_more(nothing_said: Path) -> None:
    folders.remember("barcelona")
    folders.forget("local")
    assert [choice.cluster for choice in folders.remembered()] == ["barcelona"]
    folders.forget("barcelona")
    assert folders.remembered() == []


def test_with_nothing_but_a_kubeconfig_in_the_home_folder_verbs_ask_its_cluster(
    nothing_said: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "get"])
    assert main() == 2
    assert "the embedded cluster is not up" in capsys.readouterr().err
    stub = ApiStub()
    with served(stub, nothing_said) as path:
        (nothing_said / ".kube").mkdir()
        path.rename(nothing_said / ".kube" / "config")
        with suppress(SystemExit):
            main()
        assert "there is no TrainingJob in namespace" in capsys.readouterr().out
        seen = len(stub.asked)
        assert seen > 0
        assert "KUBECONFIG" not in os.environ, "a name was resolved, and nothing else changed"
        for words in (["get", "--cluster", "local"], ["deploy", "local"]):
            monkeypatch.setattr("sys.argv", ["lockstep", *words])
            assert main() == 2, "whoever names the embedded cluster means it"
        assert len(stub.asked) == seen


def test_names_of_no_jobs_are_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served(ApiStub(), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        get(TargetOptions(), output=ListForm.NAME)
    assert capsys.readouterr().out == ""


class Asked:
    """What `Client.request` answers, by the end of the path."""

    def __init__(self, elsewhere: list[str] | None = None, **lists: list[str]) -> None:
        self.lists, self.elsewhere = lists, elsewhere or []

    def request(self, method: str, path: str, body: object = None, query: object = None) -> dict[str, object]:
        names = self.lists.get(path.rpartition("/")[2], []) if "/namespaces/" in path else self.elsewhere
        return {"items": [{"metadata": {"name": name, "namespace": "other"}} for name in names]}


def test_a_job_of_another_name_or_namespace_is_named() -> None:
    other: Any = SimpleNamespace(client=Asked(trainingjobs=["y"]), namespace="ns")
    assert no_such_job(other, "x").startswith("there is no TrainingJob x in namespace ns: it has y; -n names another namespace")
    there: Any = SimpleNamespace(client=Asked(trainingjobs=["y"], elsewhere=["x"]), namespace="ns")
    assert no_such_job(there, "x") == "there is no TrainingJob x in namespace ns, but namespace other has one: add -n other"


def test_a_shell_completes_the_names_of_jobs_and_nothing_where_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(client=Asked(trainingjobs=["demo", "dev", "x"]), namespace="ns")
    typed: Any = SimpleNamespace(meta={})
    Verb.of(typed).places["namespace"] = "ns"
    monkeypatch.setattr(TargetOptions, "target", lambda _: found)
    assert known_names(typed, "de") == ["demo", "dev"]
    monkeypatch.undo()
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert known_names(typed, "de") == []


def test_a_run_without_an_operator_is_found_where_nobody_may_read_training_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CRDs no role names TrainingJobs, and the API server refuses before it finds that there are none."""
    maps = "/api/v1/namespaces/team/configmaps"
    metadata = {"name": "x-run-0123", "namespace": "team", "labels": {"lockstep.dev/job": "x"}}
    run = {"metadata": metadata, "data": {"run.json": json.dumps({"job": {"uid": "u1"}})}}
    stub = ApiStub({maps: {"metadata": {}, "items": [run]}, f"{maps}/x-run-0123": run}, forbidden={"trainingjobs"})
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        site = KubernetesBackend(TargetOptions("local", "team").target())
        assert site.job("x").uid == "u1"
        stub.objects.clear()
        with pytest.raises(ApiError, match="cannot get resource"):
            site.job("x")
        monkeypatch.delitem(ALWAYS, "/apis/lockstep.dev/v1alpha1")  # (without the CRDs)
        with pytest.raises(ConfigError, match="there is no TrainingJob x in namespace team: it has none"):
            site.job("x")


@pytest.mark.parametrize(
    ("where", "who"),
    [
        ('in the namespace "ml"', "administrator of the namespace"),
        ("at the cluster scope", "of the cluster can grant it, by a ClusterRoleBinding"),
    ],
)
def test_a_missing_right_comes_with_who_can_grant_it(where: str, who: str) -> None:
    refused = ApiError(403, "Forbidden", f'User "jane" cannot list resource "trainingjobs" in API group "lockstep.dev" {where}')
    code, text = explanation(refused) or (0, "")
    assert code == 1 and who in text
