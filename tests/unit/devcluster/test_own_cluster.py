"""The tests' own clusters: a person's is neither used nor removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.shared.folders import state_folder
from lockstep.devcluster.host.layout import NUMBER, default_layout
from support.clusters import own_cluster
from support.clusters.own_cluster import NOBODYS, own_number


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the embedded clusters' states. A cluster is up while its state has daemons."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setattr("lockstep.devcluster.cluster.down", lambda layout, say: layout.daemons.rmdir())
    return tmp_path / "devcluster"


def taken() -> str:
    with own_number():
        return os.environ[NUMBER]


def test_two_runs_at_a_time_have_two_numbers(clusters: Path) -> None:
    with own_number():
        assert (os.environ[NUMBER], taken()) == ("8", "7")
    assert os.environ[NUMBER] == str(NOBODYS)
    assert taken() == "8"


@pytest.mark.parametrize("has", ["daemons", "volumes"])
def test_a_cluster_that_tests_have_not_made_keeps_its_number_and_its_state(clusters: Path, has: str) -> None:
    """Also one that is down: `up` finds the data of its claims again."""
    (clusters / "lockstep8" / has).mkdir(parents=True)
    assert taken() == "7"
    assert (clusters / "lockstep8" / has).is_dir()


def bring_up() -> None:
    """What `up` leaves in the state: a daemon, a claim's data, an image in a node."""
    for name in ("daemons", "volumes", "nodes"):
        (default_layout().state / name).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("left", [("daemons", "volumes", "nodes"), ("daemons", "nodes")], ids=["a cluster", "a start without volumes"])
def test_what_a_killed_run_has_left_is_removed_by_the_next_but_for_the_images_in_its_nodes(clusters: Path, left: tuple[str, ...]) -> None:
    program = (
        "import os\nfrom support.clusters.own_cluster import own_number\nfrom lockstep.devcluster.host.layout import default_layout\n"
        f"with own_number():\n    for name in {left}: (default_layout().state / name).mkdir(parents=True)\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(Path(own_cluster.__file__).parents[2])}, check=False
    )
    assert (clusters / "lockstep8" / "daemons").is_dir()
    with own_number():
        assert os.environ[NUMBER] == "8" and [path.name for path in default_layout().state.iterdir()] == ["nodes"]
        bring_up()
    assert [path.name for path in (clusters / "lockstep8").iterdir()] == ["nodes"], "and what a run has made goes with it"
    assert taken() == "8"


def test_a_run_without_a_number_that_is_free_ends_and_says_so(clusters: Path) -> None:
    for number in range(1, 9):
        (clusters / f"lockstep{number}" / "daemons").mkdir(parents=True)
    with pytest.raises(pytest.exit.Exception, match="embedded clusters 1 to 8 are all in use"):
        taken()


def test_tests_see_neither_a_kubeconfig_nor_the_checkout_s_memory_nor_a_cluster_of_the_person_who_runs_them() -> None:
    assert "KUBECONFIG" not in os.environ
    assert os.environ[NUMBER] == str(NOBODYS)
    assert state_folder() != Path(own_cluster.__file__).resolve().parents[1] / ".lockstep"
