"""Which namespace a verb means: as kubectl's, unless a cluster file is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters import peek
from lockstep.cli.jobargs import known_names, no_such_job
from lockstep.cli.target import namespace_of, target_of

CLUSTERS = Path(__file__).resolve().parents[2] / "clusters"


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
        ("barcelona", None, None, peek("barcelona", CLUSTERS)),
        ("barcelona", "mine", None, "mine"),
    ],
)
def test_the_namespace_is_the_one_asked_for_else_the_named_cluster_s_else_the_context_s(
    cluster: str, asked: str | None, context: str | None, meant: str | tuple[str, str]
) -> None:
    expected = meant if isinstance(meant, str) else meant[1]
    assert namespace_of(cluster, asked, context) == expected
    assert target_of(cluster, asked, context).namespace == expected


@pytest.mark.usefixtures("contexts")
def test_a_context_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="has no context nowhere; there are bare, work"):
        target_of("local", None, "nowhere")


@pytest.mark.parametrize("text", ["- a\n", "cluster: {name: other, namespace: x}\n", "cluster: {name: mine}\n", "a: [\n"])
def test_what_is_not_plain_is_left_to_the_models(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert peek("mine", tmp_path) is None
    assert peek("nothing", tmp_path) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in CLUSTERS.glob("*.yaml") if path.stem != "template"))
def test_a_short_look_at_a_cluster_file_finds_what_the_models_find(name: str) -> None:
    from lockstep.cli.clusters import load_cluster

    found = load_cluster(name, CLUSTERS).cluster
    assert peek(name, CLUSTERS) == (found.name, found.namespace)


class Asked:
    """What `Client.request` answers, by the end of the path."""

    def __init__(self, **lists: list[str]) -> None:
        self.lists = lists

    def request(self, method: str, path: str, body: object = None, query: object = None) -> dict[str, object]:
        return {"items": [{"metadata": {"name": name}} for name in self.lists.get(path.rpartition("/")[2], [])]}


def test_a_job_without_the_operator_is_no_unknown_one() -> None:
    target: Any = SimpleNamespace(client=Asked(configmaps=["x-agent", "x-run-1a2b"]), namespace="ns")
    said = no_such_job(target, "x")
    assert "kubectl delete configmap x-run-1a2b -n ns stops it" in said
    other: Any = SimpleNamespace(client=Asked(trainingjobs=["y"]), namespace="ns")
    assert no_such_job(other, "x").startswith("there is no TrainingJob x in namespace ns: there are y")


def test_a_shell_completes_the_names_of_jobs_and_nothing_where_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(client=Asked(trainingjobs=["demo", "dev", "x"]), namespace="ns")
    typed: Any = SimpleNamespace(params={"namespace": "ns"})
    monkeypatch.setattr("lockstep.cli.target.target_of", lambda cluster, namespace, context: found)
    assert known_names(typed, "de") == ["demo", "dev"]
    monkeypatch.undo()
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    assert known_names(typed, "de") == []
