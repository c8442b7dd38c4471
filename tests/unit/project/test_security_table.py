"""The table of docs/reliability.md, Security: what no other test of the unit tests shows, and that the tests it names are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import yaml

from support.checkout import ROOT

SOURCES = [path for folder in ("operator", "workspace", "scripts", "images") for path in (ROOT / folder).rglob("*.py")]


def test_the_tests_that_the_table_names_are_there() -> None:
    table = (ROOT / "docs" / "reliability.md").read_text().partition("\n## Security\n")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^\| S(\d+) \|", table, re.MULTILINE)] == list(range(1, 26))
    assert not [path for path in re.findall(r"`(tests/[\w/]+\.py)`", table) if not (ROOT / path).is_file()]


def test_s1_the_operator_runs_without_rights_on_its_node() -> None:
    [deployment] = yaml.safe_load_all((ROOT / "manifests/operator/base/deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_s10_and_s12_nothing_unpickles_nothing_is_a_shell_s_and_no_model_brings_code() -> None:
    assert len(SOURCES) > 450
    assert {path.relative_to(ROOT).parts[1] for path in SOURCES} >= {
        "lockstep",
        "lockstep_gang",
        "lockstep_machine",
        "lockstep_spec",
        "lockstep_train",
        "setup.py",
    }
    assert [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in dangers(path.read_text())] == []


@pytest.mark.parametrize(
    "code", ["import pickle", "from marshal import loads", "run('x', shell=True)", "load('x', trust_remote_code=True)", "torch.load('x')",
        "os.system('x')", "AutoModel.from_pretrained('x')", "AutoModel.from_config(c, local_files_only=True)"]
)  # fmt: skip
def test_what_is_looked_for_is_seen(code: str) -> None:
    assert list(dangers(code)) == [1]


def dangers(source: str) -> Iterator[int]:
    """Lines that import what unpickles, give text to a shell, or let a model's repository bring code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & (
                {alias.name for alias in node.names} | {getattr(node, "module", None)}
            ):
                yield node.lineno
        elif isinstance(node, ast.Call):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if (
                given.get("shell", "False") != "False"
                or given.get("trust_remote_code", "False") != "False"
                or (re.search(r"(?<!PeftModel)\.from_(pretrained|config)$", called) and not _says_no_code(node))
                or called in ("os.system", "os.popen", "torch.load")
                or called.endswith("create_subprocess_shell")
            ):
                yield node.lineno


def _says_no_code(load: ast.Call) -> bool:
    """Return True if the call says itself that no code of the folder may run: where it isn't said, transformers asks at a terminal."""
    return not {"trust_remote_code=False", "**OF_FOLDER"}.isdisjoint(map(ast.unparse, load.keywords))
