"""The budget of the project's sizes: lint refuses growth and gives the reason, format lowers a limit that is no longer reached."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import yaml

from support.checkout import ROOT, script


@pytest.fixture
def budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, in a small project of two functions, a verb with two parameters and a field."""
    module = script("scripts/budget.py")
    files = {
        "operator/lockstep/cli/jobs.py": (
            "LIMIT = 3\n_HIDDEN = 4\n\n\ndef stop(hosts):\n    if hosts:\n        return LIMIT if wide else isinstance(x, HostJob)\n"
        ),
        "workspace/one.py": "class Gang:\n    x: int = 3\n",
        "tests/test_one.py": "assert True\n",
        "docs/page.md": "# Three words\n",
        "manifests/crds/jobs.yaml": "properties: {a: {properties: {b: {}, properties: {type: string}}}}\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "verbs_and_parameters", lambda: (1, 2))
    return module


NOW = {
    "product lines": 9, "test lines": 1, "statements": 7, "public names": 3, "modules of the largest folder": 1,
        "platform branches of the command line": 1,
    "verbs": 1, "parameters": 2, "fields of the CRDs": 3, "words of the docs": 3,
}  # fmt: skip


def write(path: Path, limits: dict[str, int]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("# Why.\n" + "".join(f"{name}: {{most: {most}, why: because}}\n" for name, most in limits.items()))


def test_each_size_is_counted(budget: ModuleType) -> None:
    assert budget.measured() == NOW


@pytest.mark.parametrize("name", NOW)
def test_one_more_of_anything_is_refused_with_its_reason(name: str, budget: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    path = budget.ROOT / budget.BUDGET
    write(path, {**NOW, name: NOW[name] - 1})
    assert budget.main([]) == 1
    assert capsys.readouterr().err == f"scripts/budget.yaml: {name}: {NOW[name]}, and at most {NOW[name] - 1} are allowed: because\n"
    write(path, NOW)
    assert budget.main([]) == 0


def test_what_has_fallen_is_lowered_and_what_has_risen_is_not_raised(budget: ModuleType) -> None:
    path = budget.ROOT / budget.BUDGET
    write(path, {**NOW, "verbs": 100, "product lines": 8})
    assert budget.main(["--lower"]) == 1
    text = path.read_text()
    assert yaml.safe_load(text) == {name: {"most": most, "why": "because"} for name, most in {**NOW, "product lines": 8}.items()}
    assert text.startswith("# Why.\n")


def test_a_whole_run_that_took_too_long_is_refused_and_a_fast_one_lowers_nothing(
    budget: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    path, seconds = budget.ROOT / budget.BUDGET, budget.ROOT / budget.SECONDS_FILE
    seconds.parent.mkdir(parents=True)
    write(path, {**NOW, budget.SECONDS: 1440})
    for taken, code in (("1441\n", 1), ("900\n", 0)):
        seconds.write_text(taken)
        assert budget.main(["--lower"]) == code
    assert "seconds of make test: 1441, and at most 1440 are allowed" in capsys.readouterr().err
    assert yaml.safe_load(path.read_text())[budget.SECONDS]["most"] == 1440


def test_this_project_has_verbs_with_parameters() -> None:
    module = script("scripts/budget.py")
    verbs, parameters = module.verbs_and_parameters()
    limits = yaml.safe_load((ROOT / module.BUDGET).read_text())
    assert 0 < verbs <= limits["verbs"]["most"] and verbs < parameters <= limits["parameters"]["most"]
