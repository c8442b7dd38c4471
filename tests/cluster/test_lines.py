"""Every kubectl line that the pages, the files and the programs of this project tell people to type is one that kubectl understands, with
kinds that exist.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.devcluster import binary
from lockstep.environments import cache_root
from support.checkout import ROOT
from support.kubectl.lines import ALONE, OC_ONLY, PROSE, Line, all_lines, all_texts, alone, commands
from support.kubectl.parser import OF_KINDS, Parser, different

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
KUBECTL = (str(binary.folder(cache_root()) / binary.MULTI_CALL), "kubectl")
ORIGINS = {"docs/": 140, "operator/": 145, "README.md": 2, "manifests/": 4, "SubmittedAs": 2}
"""Lines that there are at least, by the beginning of the place where they stand."""


OF_NO_NAMESPACE = {
    "namespace", "node", "nodes", "priorityclass", "priorityclasses", "runtimeclass", "storageclass", "tc",
    "validatingwebhookconfigurations,mutatingwebhookconfigurations",
}  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    return all_lines()


@pytest.mark.parametrize(("origin", "least"), ORIGINS.items())
def test_the_lines_of_every_origin_are_found(lines: list[Line], origin: str, least: int) -> None:
    assert len([line for line in lines if line.place.startswith(origin)]) >= least


def test_every_text_that_is_listed_as_no_command_is_there() -> None:
    assert set(PROSE) - {line.text for line in all_texts()} == set()


def test_no_other_program_has_one_of_the_words_alone_to_join_a_line_with() -> None:
    assert alone() == set(ALONE)


def test_a_printed_line_about_objects_of_a_namespace_names_it(lines: list[Line]) -> None:
    """It may be typed where another namespace is the context's."""
    printed = [
        line.text.split() for line in lines if ".py:" in line.place and not line.is_named and line.command in {*OF_KINDS, "exec", "logs"}
    ]
    assert len(printed) > 80
    assert [words for words in printed if words[2] not in OF_NO_NAMESPACE and not {"-n", "-A"} & {*words}] == []


def test_kubectl_understands_every_line_that_is_not_of_oc_alone(lines: list[Line], cluster: Path, kubectl: Kubectl, tmp_path: Path) -> None:
    applied = kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "manifests/crds"))
    assert applied.returncode == 0, applied.stderr
    assert kubectl("wait", "--for=condition=Established", "-f", str(ROOT / "manifests/crds")).returncode == 0
    typed = [Line(f"kubectl {line.text.partition(' ')[2]}", line.place, line.is_named) for line in lines if line.command not in OC_ONLY]
    assert (
        Parser((str(binary.folder(cache_root()) / binary.MULTI_CALL), "kubectl"), tmp_path, cluster).complaints([*different(typed)]) == []
    )


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("kubectl gett pods", 'unknown command "gett"'), ("kubectl get pods --name-space x", "unknown flag: --name-space"),
            ("kubectl get podz", 'resource type "podz"'),
        ("kubectl delete pod -n x", "no name was specified"), ("kubectl create configmap", "exactly one NAME is required"),
            ("kubectl wait --for", "needs an argument"),
    ],
)  # fmt: skip
def test_kubectl_says_what_is_wrong_with_a_line(cluster: Path, tmp_path: Path, wrong: str, why: str) -> None:
    (complaint,) = Parser(KUBECTL, tmp_path, cluster).complaints([Line(wrong, "here")])
    assert complaint.startswith(f"here: {wrong}: ") and why in complaint


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("type `kubectl exec -it x -- sh`, or else", "kubectl exec -it x -- sh"),
            ("look (kubectl get pods -n x), then", "kubectl get pods -n x"),
        ("TOKEN=$(kubectl create token x)", "kubectl create token x"),
            ("oc get x -o jsonpath='{.a[?(@.b)]}' | jq", "oc get x -o jsonpath='{.a[?(@.b)]}'"),
        ("the server's: kubectl describe pvc x says why; or", "kubectl describe pvc x"),
            ("oc --kubeconfig $(a b) get tj   # of it", "oc --kubeconfig $(a b) get tj"),
        ("kubectl edit tj {job} -p '{{{{}}}}'", "kubectl edit tj x -p '{{}}'"),
    ],
)  # fmt: skip
def test_a_line_ends_where_the_command_does(text: str, command: str) -> None:
    assert [line.text for line in commands(text, "here")] == [command]


def test_lockstep_is_a_plugin_of_kubectl(tmp_path: Path) -> None:
    assert "Usage: kubectl-lockstep version " in Parser(KUBECTL, tmp_path).run("lockstep", "version", "--help").stdout
