"""A user without a home, as of a pod's random user id: what needs none goes on, the rest is one sentence."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.training import BaseModelSource
from lockstep.cli.clusters import build
from lockstep.cli.clusters.hosts import _local
from lockstep.kube.aim import environment_kubeconfig
from lockstep.kube.connection import _no_cluster
from lockstep.kube.kubeconfig import read_server
from lockstep.platforms.hosts.remembered import Remembered, remember, remembered
from lockstep.platforms.jobs.planfacts import _in_hub_cache
from lockstep.platforms.local.joined.token import default_file
from unit.plan.hosts.test_leftovers import FIRST

NAMELESS = "import pwd, sys; pwd.getpwuid = {}.__getitem__; from lockstep.cli.main import main; sys.exit(main())"
KUBECONFIG = (
    "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n"
)
LAB = "cluster: {name: lab, namespace: team, platform: kubernetes, api: '127.0.0.1:9'}\nstorage: {mode: rwx}\n"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HOME", "LOCKSTEP_CACHE", "KUBECONFIG", "HF_HOME", "HF_HUB_CACHE", *(f"XDG_{kind}_HOME" for kind in ("CACHE", "STATE"))):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(pwd, "getpwuid", {}.__getitem__)
        yield


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("cluster list", 0, ""),
        ("get", 1, "http://127.0.0.1:9 doesn't answer"),
        ("get --cluster lab.yaml", 1, "http://127.0.0.1:9 doesn't answer"),
        ("get --everywhere", 0, ""),
        ("deploy lab.yaml --dry-run", 0, ""),
    ],
)
def test_verbs_about_one_s_own_cluster_need_no_cache(words: str, code: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    (tmp_path / "lab.yaml").write_text(LAB)
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": str(tmp_path / "config")}
    command = [sys.executable, "-c", NAMELESS, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "home" not in done.stderr


def test_without_a_kubeconfig_there_is_no_embedded_cluster() -> None:
    command, environment = [sys.executable, "-c", NAMELESS, "get"], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "the embedded cluster is not up" in done.stderr


def test_pip_s_settings_of_a_home_are_none(no_home: None) -> None:
    with build.machine_settings() as secrets:
        assert secrets.keys() <= {"pip", "ca"}


def test_jobs_on_hosts_are_not_remembered(no_home: None) -> None:
    remember("lab", {"x": Remembered(FIRST, "step 5")})
    assert remembered("lab") == {}


def test_a_launch_asks_for_a_file(no_home: None) -> None:
    with pytest.raises(ConfigError, match="no home folder for the token's file: name a file by --token-file"):
        default_file("x", 1)


def test_paths_in_a_home_are_not_there(no_home: None) -> None:
    assert not _in_hub_cache(BaseModelSource(name="a/b")).exists()
    assert _local("~/train.lock") == Path("~/train.lock")
    assert "there is no ~/.kube/config and KUBECONFIG is not set" in str(_no_cluster(environment_kubeconfig(), Exception()))
    with pytest.raises(ConfigError, match="there is no kubeconfig at ~/x"):
        read_server("~/x", None)
