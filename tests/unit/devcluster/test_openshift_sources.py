"""Folders that `make test-openshift` is given: clones and unpacked archives of OpenShift's repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lockstep.api.errors import ConfigError
from openshift.control_plane import Source

SOURCE = Source("openshift/oc", "OC", ("go.mod", "Makefile"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has what the build needs."""
    (tmp_path / "go.mod").write_text("module github.com/openshift/oc\n")
    (tmp_path / "Makefile").write_text('KUBE_GIT_MINOR_VERSION := "35"\nKUBE_GIT_VERSION := "v1.35.2"\n')
    monkeypatch.setenv("LOCKSTEP_OPENSHIFT_OC", str(tmp_path))
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_folder_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_OPENSHIFT_OC", raising=False)
    with pytest.raises(
        ConfigError, match=r"OC= must name a clone or an unpacked archive of openshift/oc: make test-openshift SOURCE=… OC=…"
    ):
        SOURCE.state()


def test_a_folder_that_lacks_something_is_refused_with_what(folder: Path) -> None:
    (folder / "go.mod").unlink()
    with pytest.raises(ConfigError, match=r"OC= must name .* of openshift/oc, and \S+ has no go\.mod: clone it whole, and not bare"):
        SOURCE.state()


def test_the_commit_is_the_state_of_a_clone_and_the_content_that_of_an_archive(folder: Path) -> None:
    archive = SOURCE.state()
    (folder / "go.mod").write_text("module github.com/openshift/oc\n\ngo 1.26\n")
    assert SOURCE.state() != archive and archive.startswith("content-")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "all of it")
    assert SOURCE.state() == f"commit-{git(folder, 'rev-parse', '--short=12', 'HEAD').strip()}"


def test_the_release_of_kubernetes_is_read_from_its_makefile(folder: Path) -> None:
    assert SOURCE.kubernetes() == "v1.35.2"
    (folder / "Makefile").write_text("all:\n")
    with pytest.raises(ConfigError, match="no Makefile states KUBE_GIT_VERSION"):
        SOURCE.kubernetes()
