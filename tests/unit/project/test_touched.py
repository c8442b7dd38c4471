"""Tests that a change chooses: in a small project, by each of the rules, and in this one, for what must never be left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import touched
from lanes import main, parts_since
from support.checkout import ROOT
from touched import FEW, Tree

Chosen = Callable[..., set[str]]
FILES = {
    "operator/lockstep/cli/main.py": "from lockstep.kube import client\n",
    "operator/lockstep/cli/verbs.py": (
        'MODULES: Mapping[str, str] = {\n    "why": "jobs.why.why",\n    "stop": ("Stop.", {"now": "jobs.stop.stop"}),\n}\n'
    ),
    "operator/lockstep/cli/jobs/why.py": "from lockstep.plan import pages\n",
    "operator/lockstep/cli/jobs/stop.py": "from lockstep import halt\n",
    "operator/lockstep/halt.py": "",
    "operator/lockstep/kube/client.py": "",
    "operator/lockstep/plan/pages.py": 'TEMPLATES = ("page.j2", "leaf")\n',
    "operator/lockstep/plan/templates/page.j2": "",
    "operator/lockstep/plan/templates/leaf.yaml.j2": "",
    "operator/lockstep/sent.py": "",
    "operator/lockstep/send.py": 'PROGRAM = "lockstep.sent"\n',
    "workspace/lockstep_train/loss.py": "",
    "workspace/lockstep_train/rare.py": "",
    "workspace/lockstep_train/common.py": "",
    "tests/conftest.py": "from lockstep.kube import client\n",
    "tests/support/typed.py": 'MAIN = "lockstep.cli.main"\n',
    "tests/unit/test_pages.py": "def test_it():\n    from lockstep.plan import pages\n",
    "tests/unit/test_send.py": "import lockstep.send\n",
    "tests/unit/test_other.py": "from lockstep.plan import pages, ships\n",
    "tests/unit/project/test_house.py": "",
    "tests/train/conftest.py": "",
    "tests/train/ranks/cases_loss.py": "from lockstep_train import common, rare\n\ndef lose(): ...\n",
    "tests/train/ranks/cases_many.py": "from lockstep_train import common\n\ndef many(): ...\n",
    "tests/train/test_loss.py": 'CASE = "lose"\n',
    **{f"tests/train/many/test_{number}.py": 'CASE = "many"\nVERB = "why"\nfrom support.typed import MAIN\n' for number in range(FEW + 1)},
    "tests/train/test_data.py": "",
    "tests/train/test_slow.py": "pytestmark = pytest.mark.long\n",
    "tests/hosts/test_typed.py": 'from support.typed import MAIN\n\nVERB = "stop"\n',
    "tests/cluster/test_stop.py": "",
}
MANY = {file.removeprefix("tests/") for file in FILES if file.startswith("tests/train/many/")}
ROOMS = """
requirements/: all
operator/(lockstep|other)/: []
operator/lockstep/plan/(other|templates/leaf): [cluster/test_stop]
workspace/lockstep_train/: [train/test_data]
tests/: []
"""


@pytest.fixture
def chosen(tmp_path: Path) -> Chosen:
    """Files of tests that changes of these paths choose, without what is always chosen."""
    for name, text in {**FILES, "scripts/touched.yaml": ROOMS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tree = Tree(tmp_path)

    def choose(*changed: str) -> set[str]:
        found = tree.chosen(changed)
        assert "tests/unit/project/test_house.py" in found
        return {file.removeprefix("tests/") for file in found} - {"unit/project/test_house.py"}

    return choose


@pytest.mark.parametrize(
    "changed, tests",
    [
        ("operator/lockstep/plan/pages.py", {"unit/test_pages.py", "unit/test_other.py"}),  # imported, within a function
        ("operator/lockstep/plan/templates/page.j2", {"unit/test_pages.py", "unit/test_other.py"}),  # by the module that names it
        (
            "operator/lockstep/plan/templates/leaf.yaml.j2",
            {"unit/test_pages.py", "unit/test_other.py", "cluster/test_stop.py"},
        ),  # and by its room
        ("operator/lockstep/sent.py", {"unit/test_send.py"}),  # a program that is sent as text
        ("operator/lockstep/cli/jobs/stop.py", {"hosts/test_typed.py", "cluster/test_stop.py"}),  # typed as a verb; and by its name
        ("operator/lockstep/halt.py", {"hosts/test_typed.py"}),  # by the only verb that reaches it
        ("operator/lockstep/cli/jobs/why.py", set()),  # too many name it
        ("workspace/lockstep_train/loss.py", {"train/test_data.py", "train/test_loss.py"}),  # by its room, and by its name
        ("workspace/lockstep_train/rare.py", {"train/test_data.py", "train/test_loss.py"}),  # imported by what few ask ranks for
        ("workspace/lockstep_train/common.py", {"train/test_data.py"}),
        ("tests/train/ranks/cases_loss.py", {"train/test_loss.py"}),  # asked of forked ranks by a function's name
        ("tests/train/conftest.py", {"train/test_loss.py", "train/test_data.py", *MANY}),
        ("tests/support/typed.py", {"hosts/test_typed.py", *MANY}),
        ("tests/unit/test_other.py", {"unit/test_other.py"}),
        ("operator/lockstep/plan/ships.py", {"unit/test_other.py"}),  # it is gone, and is imported all the same
        ("CHANGELOG.md", set()),
    ],
)
def test_a_change_chooses_what_uses_it(changed: str, tests: set[str], chosen: Chosen) -> None:
    assert chosen(changed) == tests


@pytest.mark.parametrize("changed", ["requirements/dev.lock", "something/new.py"])
def test_what_all_depends_on_and_what_has_no_room_choose_every_test(changed: str, chosen: Chosen) -> None:
    every = {name.removeprefix("tests/") for name in FILES if Path(name).name.startswith("test_")}
    assert chosen(changed) == every - {"unit/project/test_house.py", "train/test_slow.py"}


@cache
def whole() -> Tree:
    return Tree()


def test_every_folder_of_the_product_has_a_room_and_every_room_has_tests() -> None:
    folders = {file for file in whole().text if file.startswith(("operator/", "workspace/"))}
    assert all("all" not in whole()._room(file) for file in folders)
    assert {verb for verb, _ in whole().verbs} > {"run", "why", "hosts"}
    for tests in whole().rooms.values():
        for test in tests if isinstance(tests, list) else []:
            assert (ROOT / "tests" / test).is_dir() or (ROOT / "tests" / f"{test}.py").exists(), test


def test_every_module_that_tests_share_chooses_a_test() -> None:
    shared = [
        file
        for file in whole().text
        if file.startswith(("tests/support/", "tests/train/ranks/", "tests/faults/", "tests/golden/")) and "/test_" not in file
    ]
    assert len(shared) > 40
    idle = {file for file in shared if not {test for test in whole().chosen([file]) if not test.startswith("tests/unit/project/")}}
    assert idle == {"tests/faults/peer_saves.py"}, "the bench of other savers alone has it"


def test_parts_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ["tests/cluster/operator/life/test_drills.py", "tests/hosts/test_jobs.py"]
    monkeypatch.setattr(touched, "Tree", whole)
    monkeypatch.setattr(touched, "changed_since", lambda commit: changed)
    parts = parts_since("HEAD")
    assert list(parts) == ["lint", "test-unit", "test-cluster", "test-hosts"]
    assert (parts["test-cluster"].tests, parts["test-hosts"].tests) == (changed[:1], changed[1:])


def test_a_commit_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--since", "no-such-commit"]) == 2
    assert "no-such-commit" in capsys.readouterr().err
