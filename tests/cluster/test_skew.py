"""Two versions on one cluster: the operator of either hears the gangs that the other has started, and trains on from the other's commits.

The older version is a commit of this repository. Each runs from a tree of its own: its command line, its operator and its pods, which find
their code in a folder of its own, as they would in an image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, dynamic

from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.cli.clusters.deploy import install_cluster
from lockstep.cli.clusters.deploymentplan import Mode
from lockstep.cli.shared.places import Verb
from lockstep.devcluster.host.layout import default_layout
from support.checkout import ROOT
from support.clusters.cluster_demo import demo_files
from support.clusters.cluster_jobs import API, Jobs, prepare, until
from support.release.upgrades import EVERY, TRAINING, Gang, TinyTraining
from support.release.version_before import tree_before

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
CLUSTER, PATH, LATER = "skew", "PYTHONPATH", "PowerCap"
PUBLISH = "import sys; from lockstep.devcluster import python_volume as its; print(its.publish_code(its.Path(sys.argv[1])).name)"
SIGNAL = 'for p in /proc/[0-9]*; do grep -qz ^RANK= $p/environ && kill -"$0" "${p#/proc/}"; done 2>/dev/null; true'
HOLD, LET_GO = (("sh", "-c", SIGNAL, signal) for signal in ("STOP", "CONT"))
"""All ranks of a container; those of the other nodes wait for them."""
END = "/tmp/end"  # noqa: S108 (in a pod)
FAILS_WHEN_TOLD = f"import pathlib, sys, time\nwhile not pathlib.Path('{END}').exists():\n    time.sleep(0.1)\nsys.exit(3)\n"
STEPS = 50


class Version:
    """A tree of Lockstep, as it is deployed with the jobs' namespace, and its command line."""

    def __init__(self, tree: Path, name: str, jobs: Jobs, folder: Path) -> None:
        self._jobs, self._folder, self._file = jobs, folder, folder / f"{CLUSTER}.yaml"
        kubeconfig = shutil.copy(default_layout().kubeconfig, folder)  # under its own name deploy publishes code for the embedded cluster
        packages = os.pathsep.join(str(tree / part) for part in ("operator", "workspace"))
        self._environment = os.environ | {"KUBECONFIG": str(kubeconfig), PATH: packages, "LOCKSTEP_STATE": str(folder / "state")}
        volume = code_folder() / name
        volume.mkdir(parents=True)
        self.code = f"/opt/lockstep/{code_folder().name}/{name}/{self._python('-c', PUBLISH, str(volume)).strip()}"
        described = yaml.safe_load((tree / "clusters" / "local.yaml").read_text())
        described["cluster"] |= {"name": CLUSTER, "namespace": jobs.namespace}
        (path,) = (variable for variable in described["pod"]["env"] if variable["name"] == PATH)
        path["value"] = f"{self.code}:/opt/lockstep/site"
        self._file.write_text(yaml.safe_dump(described))

    def _python(self, *arguments: str, code: int = 0) -> str:
        run: dict[str, Any] = {"cwd": self._folder, "env": self._environment, "capture_output": True, "text": True, "timeout": 240}
        done = subprocess.run([sys.executable, *arguments], **run, check=False)
        assert done.returncode == code, f"{' '.join(arguments)} → {done.returncode}\n{done.stdout}{done.stderr}"
        return str(done.stdout)

    def lockstep(self, verb: str, job: str, code: int = 0) -> str:
        where = ("-n", self._jobs.namespace, "--cluster", str(self._file))
        return self._python("-m", "lockstep.cli.main", verb, job, *where, code=code)

    def deploy(self) -> None:
        self._python("-m", "lockstep.cli.main", "deploy", str(self._file), "--no-dev", "--mode", "tcp")
        self._until_it_operates()

    def roll_back(self, to: Version) -> None:
        self._python("-m", "lockstep.cli.main", "cluster", "rollback", str(self._file), "--yes")
        to._until_it_operates()

    def _until_it_operates(self) -> None:
        pods = Jobs(self._jobs.api, OPERATOR_NAMESPACE).kind("Pod")
        items = lambda: pods.get(namespace=OPERATOR_NAMESPACE).to_dict()["items"]  # noqa: E731
        until(f"{self.code} operates", lambda: code_of(items()) == {self.code})


def code_of(pods: list[dict[str, Any]]) -> set[str]:
    """Folders where these pods find their code."""
    variables = [variable for pod in pods for container in pod["spec"]["containers"] for variable in container["env"]]
    return {variable["value"].split(":")[0] for variable in variables if variable["name"] == PATH}


def code_folder() -> Path:
    """Folder of all versions' code that pods see."""
    return default_layout().python_volume / f"skew-{default_layout().name}"


@pytest.fixture(scope="module")
def jobs(api: dynamic.DynamicClient) -> Iterator[Jobs]:
    """A namespace of this module's own; the cluster has this checkout's operator again afterwards."""
    core = client.CoreV1Api(api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
    shutil.rmtree(code_folder(), ignore_errors=True)
    try:
        jobs = prepare(api, namespace)
        jobs.patch("ConfigMap", "scripts", {"data": {"fails-when-told.py": FAILS_WHEN_TOLD}})
        yield jobs
    finally:
        core.delete_collection_namespaced_pod(namespace, grace_period_seconds=0)  # (ranks may be held)
        core.delete_namespace(namespace)
        until("its pods are gone", lambda: not core.list_namespaced_pod(namespace).items)
        install_cluster(Verb(), "local", Mode.TCP)
        jobs.delete("TrainingCluster", CLUSTER, API)
        shutil.rmtree(code_folder())


@pytest.fixture(scope="module")
def this(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Version:
    return Version(ROOT, "this", jobs, tmp_path_factory.mktemp("this"))


@pytest.fixture(scope="module")
def base(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Version:
    folder = tmp_path_factory.mktemp("base")
    return Version(tree_before(folder / "tree"), "base", jobs, folder)


class Training(TinyTraining):
    """A job of Lockstep's trainer, which a version's verb stops."""

    def stop(self, version: Version, attempt: int) -> int:
        """Stop it by this version's verb, and return the step that was saved."""
        assert code_of(self.jobs.pods(self.name)) == {version.code}
        version.lockstep("stop", self.name)
        stop = self.jobs.job(self.name)["status"]["stop"]
        assert (stop["attempt"], stop["save"], stop["lostSteps"]) == (attempt, "Saved", 0), stop
        return int(stop["step"])


class Pods(Gang):
    """A gang in whose pods the test types commands."""

    def __init__(self, jobs: Jobs, kubectl: Kubectl, name: str) -> None:
        super().__init__(jobs, name)
        self._kubectl = kubectl

    def run(self, *command: str) -> None:
        """On node 1."""
        done = self._kubectl("exec", "-n", self.jobs.namespace, f"{self.name}-1", "-c", "trainer", "--", *command)
        assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_jobs_of_either_version_go_on_and_end_under_the_other_and_their_commits_are_resumed(
    jobs: Jobs, base: Version, this: Version, kubectl: Kubectl
) -> None:
    base.deploy()
    with demo_files(jobs, {"nodes": 2, "training": TRAINING}):
        pass
    old = Training(jobs, "old", CLUSTER, STEPS)
    old.until_step(1, EVERY)
    old_gang = Pods(jobs, kubectl, "old")
    old_gang.run(*HOLD)
    moved = Training(jobs, "moved", CLUSTER, 5000)
    moved.until_step(1, EVERY)
    first = moved.stop(base, 1)

    this.deploy()
    old_gang.check_untouched()
    held = old.logged()[-1]["step"]
    jobs.start("new", "fails-when-told.py", cluster=CLUSTER)
    this.lockstep("resume", "moved")
    old_gang.run(*LET_GO)
    old.until_step(1, held + EVERY)
    old_gang.run(*HOLD)
    until("the operator hears of it", lambda: jobs.job("old")["status"]["trainer"]["step"] >= held + EVERY)
    moved.until_step(2, first + EVERY)
    second = moved.stop(this, 2)
    jobs.until_running("new")
    new_gang = Pods(jobs, kubectl, "new")
    for verb in ("get", "describe", "why"):
        assert "new" in base.lockstep(verb, "new") and "old" in this.lockstep(verb, "old")

    this.roll_back(base)
    old_gang.check_untouched()
    new_gang.check_untouched()
    base.lockstep("resume", "moved")
    new_gang.run("touch", END)
    failed = jobs.until_condition("new", "Failed", "True", "RanksFailed")
    assert (jobs.job("new")["status"]["failure"]["cause"], failed["message"]) == ("UserCode", "rank 1 on node 1 exited with 3")
    assert failed["message"] in base.lockstep("why", "new", code=1)
    old_gang.run(*LET_GO)
    moved.until_step(3, second + EVERY)
    third = moved.stop(base, 3)
    jobs.until_condition("old", "Complete", "True", "Complete")
    assert jobs.job("old")["status"]["checkpoint"]["lastCommittedStep"] == STEPS and jobs.job("old")["status"]["attempts"] == 1

    learned = moved.logged()
    attempts = [1] * first + [2] * (second - first) + [3] * (third - second)
    assert [(entry["step"], entry["attempt"]) for entry in learned] == list(enumerate(attempts, 1))
    losses, undisturbed = [entry["loss"] for entry in learned[:STEPS]], [entry["loss"] for entry in old.logged()]
    assert losses == undisturbed[: len(losses)] and len(undisturbed) == STEPS


@pytest.fixture
def later(jobs: Jobs, tmp_path: Path) -> Version:
    """A version that isn't written yet: this one, but for a cause that this one doesn't know."""
    tree = tmp_path / "tree"
    for part in ("operator", "workspace", "manifests", "clusters"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    contract = tree / "workspace/lockstep_gang/contract/report.py"
    contract.write_text(contract.read_text().replace('"UserCode"', f'"{LATER}"'))
    return Version(tree, "later", jobs, tmp_path)


@pytest.mark.long
def test_a_cause_of_a_version_that_is_not_written_yet_is_heard(jobs: Jobs, this: Version, later: Version, kubectl: Kubectl) -> None:
    this.deploy()
    later.deploy()
    jobs.start("later", "fails-when-told.py", cluster=CLUSTER)
    jobs.until_running("later")
    gang = Pods(jobs, kubectl, "later")
    later.roll_back(this)
    gang.check_untouched()
    gang.run("touch", END)
    failed = jobs.until_condition("later", "Failed", "True", "RanksFailed")
    assert (jobs.job("later")["status"]["failure"]["cause"], failed["message"]) == (LATER, "rank 1 on node 1 exited with 3")
    assert f"{LATER} (exit code 3)" in this.lockstep("why", "later", code=1)
