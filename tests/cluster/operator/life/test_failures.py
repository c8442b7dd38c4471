"""Every verb on a real cluster where it can't do what it is asked: who types it has no rights at all, or names a job that nobody has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.operator.verbs.test_verbs import lockstep
from support.clusters.cluster_jobs import Jobs, kubeconfig_of
from unit.cli.test_every_verb import ANSWERS_WHATEVER_IS_HIDDEN, OF_A_JOB, REMOTE, VERBS, arguments, write_cluster_file, write_job_file

NO_ROLE = "lockstep-nobody-has-such-a-role"
"""A binding to a role that isn't there grants nothing."""


@pytest.fixture(scope="module")
def stranger(jobs: Jobs, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of somebody whom the API server knows, and who may do nothing."""
    return kubeconfig_of(NO_ROLE, jobs, cluster, tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def typed(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with job.yaml in it, from which verbs are typed."""
    write_job_file(tmp_path)
    write_cluster_file(tmp_path, "gpus")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def words(name: str, folder: Path) -> list[str]:
    """`lockstep` of test_verbs names the namespace itself, where the verb takes one."""
    given = arguments(name, folder)
    return given[:-2] if given[-2:] == ["-n", "team"] else given


def takes_a_namespace(name: str) -> bool:
    return "namespace" in {*VERBS[name].takes, *(parameter.name for parameter in VERBS[name].params)}


@pytest.mark.parametrize("name", REMOTE)
def test_who_has_no_rights_is_told_which_are_missing(
    jobs: Jobs, stranger: Path, typed: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(stranger))
    told = lockstep(jobs, *words(name, typed), namespaced=takes_a_namespace(name))
    said = told.stdout + told.stderr
    assert "Traceback" not in said
    if name in ANSWERS_WHATEVER_IS_HIDDEN:
        assert told.returncode in (0, 1, 3), told  # 3: a plan of a cluster that tells nothing
        return
    assert told.returncode in (1, 2), told
    assert " cannot " in said or "you may not" in said, told


@pytest.mark.parametrize("name", OF_A_JOB)
def test_a_job_that_nobody_has_is_told_with_its_namespace(jobs: Jobs, operator: None, typed: Path, name: str) -> None:
    told = lockstep(jobs, *words(name, typed))
    assert told.returncode == 2, told
    assert f"there is no TrainingJob x in namespace {jobs.namespace}" in told.stderr, told
