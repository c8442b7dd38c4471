"""The version before and this one, each from its dist/ alone: installed, upgraded while a gang trains, taken back, and uninstalled.

The forms are this checkout's: the version before has no chart of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lockstep.api.files.yamltext import load_all_yaml
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.devcluster.host.layout import default_layout
from lockstep.environments import cache_root, installer
from release import chart, installyaml, parts
from release.parts import Images
from release.programs import program
from support.checkout import ROOT
from support.clusters.cluster_demo import demo_files
from support.clusters.cluster_jobs import Jobs
from support.release.files import Kubectl, done
from support.release.upgrades import EVERY, TRAINING, Gang, KillingProxy, Leaders, TinyTraining
from support.release.version_before import tree_before

pytestmark = pytest.mark.long
CLUSTER, RELEASE = "upgraded", "lockstep"
MOUNT = "/opt/python"
"""Where pods see this machine's packages: beside the place from which an operator would take its own code."""
BUILD = """
import sys, pathlib
from support.clusters.built_image import built
from supply import wheel
print(built("operator")[1], wheel(pathlib.Path(sys.argv[1])), sep="\\n")
"""


@dataclass(frozen=True)
class Version:
    """Files of one version. `code` is what its wheel installs."""

    folder: Path
    image: str
    code: Path

    def lockstep(self, *arguments: str) -> str:
        """Run its command line in a folder without a checkout."""
        environment = os.environ | {"PYTHONPATH": str(self.code), "LOCKSTEP_STATE": str(self.folder / "state")}
        return run([sys.executable, "-m", "lockstep.cli.main", *arguments], self.folder, environment)


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, f"{' '.join(command)} → {ended.returncode}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def make_version(tree: Path, folder: Path, registry: str, forms: list[Callable[[Path, Images], object]]) -> Version:
    """Write the dist/ of a tree in `forms`, which are this checkout's, and push its operator's image to `registry`."""
    folder.mkdir()
    paths = os.pathsep.join(str(tree / part) for part in ("operator", "workspace", "scripts", "tests"))
    archive, wheel = run([sys.executable, "-c", BUILD, str(folder)], tree, os.environ | {"PYTHONPATH": paths}).splitlines()[-2:]
    target, digest = f"{registry}/{folder.name}/lockstep-operator:{parts.version()}", folder / "digest"
    copy = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", "--digestfile", str(digest)]
    run([*copy, f"docker-archive:{archive}", f"docker://{target}"], folder)
    image = f"{target}@{digest.read_text().strip()}"
    code = folder / "code"
    run([installer(cache_root()), "pip", "install", "--quiet", "--offline", "--no-deps", "--target", str(code), wheel], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROOT", tree)
        for write in forms:
            write(folder, Images(image, image))
    return Version(folder, image, code)


def describe_cluster(version: Version, path: Path, namespace: str) -> None:
    """Write a cluster file like the embedded cluster's, whose ranks run the version's code and whose operator runs its image's."""
    volume = default_layout().python_volume / f"{CLUSTER}-{default_layout().name}"
    shutil.rmtree(volume, ignore_errors=True)
    shutil.copytree(version.code, volume)
    described = yaml.safe_load((Path(parts.ROOT) / "clusters" / "local.yaml").read_text())
    described["cluster"] |= {"name": CLUSTER, "namespace": namespace}
    described["pod"]["volumes"][0]["mount_path"] = MOUNT
    described["pod"]["env"][0] = {"name": "PYTHONPATH", "value": f"{MOUNT}/{volume.name}:{MOUNT}/site"}
    path.write_text(yaml.safe_dump(described))


@dataclass
class Form:
    """One form of the installation, as its administrator handles it."""

    kubectl: Kubectl
    file: Path
    """The cluster file."""
    jobs: Jobs
    keeps_jobs = True
    """Uninstalling leaves TrainingJobs, their CRDs and pods."""
    tells = ""
    """Words by which it says what stays."""

    def install(self, version: Version) -> None:
        """Install a version, or upgrade to it."""
        raise NotImplementedError

    def go_back(self, there: Version, to: Version) -> None:
        raise NotImplementedError

    def uninstall(self, there: Version) -> str:
        """Return what was said."""
        raise NotImplementedError

    def until_operates(self) -> None:
        done(self.kubectl, "rollout", "status", f"deployment/{OPERATOR_NAME}", "-n", OPERATOR_NAMESPACE, "--timeout=300s")

    def send_cluster(self, version: Version) -> None:
        """Send what jobs need beside the operator, which `deploy` sends with it."""
        text = version.lockstep("deploy", str(self.file), "--no-dev", "--mode", "tcp", "--dry-run")
        own = [item for item in load_all_yaml(text) if item["kind"] in ("TrainingCluster", "PersistentVolumeClaim", "ServiceAccount")]
        mine = [item for item in own if item["metadata"].get("namespace", self.jobs.namespace) == self.jobs.namespace]
        done(self.kubectl, "apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(mine))


class Deploy(Form):
    keeps_jobs = False
    tells = "claims stay"

    def install(self, version: Version) -> None:
        version.lockstep("deploy", str(self.file), "--no-dev", "--mode", "tcp", "--image", version.image)

    def go_back(self, there: Version, to: Version) -> None:
        there.lockstep("cluster", "rollback", str(self.file), "--yes")

    def uninstall(self, there: Version) -> str:
        return there.lockstep("cluster", "uninstall", str(self.file), "--jobs", "--yes")


class InstallYaml(Form):
    tells = "TrainingJobs and claims stay"

    def _apply(self, version: Version, *names: str) -> None:
        files = [word for name in names for word in ("-f", str(version.folder / name))]
        done(self.kubectl, "apply", *files)
        self.until_operates()

    def install(self, version: Version) -> None:
        self._apply(version, installyaml.CRDS, installyaml.FILES["kubernetes"])
        self.send_cluster(version)

    def go_back(self, there: Version, to: Version) -> None:
        self._apply(to, installyaml.FILES["kubernetes"])

    def uninstall(self, there: Version) -> str:
        file = there.folder / installyaml.FILES["kubernetes"]
        return file.read_text() + done(self.kubectl, "delete", "-f", str(file))


class Chart(Form):
    tells = "trainingjobs.lockstep.dev"

    @property
    def homes(self) -> dict[str, str]:
        """Environment in which helm keeps nothing of this machine's user."""
        return {f"HELM_{name}_HOME": str(self.file.parent) for name in ("CACHE", "CONFIG", "DATA")}

    def command(self, *arguments: str) -> list[str]:
        return [str(program("helm")), *arguments, "-n", OPERATOR_NAMESPACE]

    def helm(self, *arguments: str) -> str:
        return run(self.command(*arguments), self.file.parent, os.environ | self.homes)

    def upgrade_arguments(self, version: Version) -> list[str]:
        """Arguments that also install it."""
        (chart,) = version.folder.glob("*.tgz")
        return [
            "upgrade",
            "--install",
            RELEASE,
            str(chart),
            "--create-namespace",
            "--reset-then-reuse-values",
            "--wait",
            "--timeout",
            "300s",
        ]

    def install(self, version: Version) -> None:
        self.helm(*self.upgrade_arguments(version))
        self.send_cluster(version)

    def go_back(self, there: Version, to: Version) -> None:
        self.helm(*self.upgrade_arguments(to))

    def uninstall(self, there: Version) -> str:
        return self.helm("uninstall", RELEASE, "--wait")


FORMS = {"deploy": Deploy, "install.yaml": InstallYaml, "chart": Chart}
WRITERS = [installyaml.write, chart.write]
STAGES = ("install", "upgrade", "back", "uninstall")
HEAD = f"| form | {' | '.join(STAGES)} | restarted pods | lost steps |\n|---|{'---|' * (len(STAGES) + 2)}"


@pytest.fixture(scope="module")
def versions(registry: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Version, Version]:
    """The version before, and this one."""
    folder = tmp_path_factory.mktemp("versions")
    trees = {"before": tree_before(folder / "tree"), "this": ROOT}
    before, this = (make_version(tree, folder / name, registry, WRITERS) for name, tree in trees.items())
    return before, this


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Rows of the table in docs/upgrades.md, which is printed at the end."""
    rows: list[str] = []
    yield rows
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", HEAD, *rows, sep="\n")


@pytest.fixture
def form(request: pytest.FixtureRequest, versions: tuple[Version, Version], kubectl: Kubectl, jobs: Jobs, tmp_path: Path) -> Iterator[Form]:
    """The form of this name on a cluster without Lockstep, which is without it afterwards, too."""
    path = tmp_path / f"{CLUSTER}.yaml"
    describe_cluster(versions[0], path, jobs.namespace)
    yield FORMS[request.param](kubectl, path, jobs)
    for kind in ("trainingjob", "trainingcluster"):
        kubectl("delete", kind, "--all", "--all-namespaces")
    for kind in ("trainingjobs", "trainingclusters"):
        kubectl("delete", "crd", f"{kind}.lockstep.dev", "--ignore-not-found")
    kubectl("delete", "namespace", OPERATOR_NAMESPACE, "--ignore-not-found")
    shutil.rmtree(default_layout().python_volume / f"{CLUSTER}-{default_layout().name}")


def claims_of(jobs: Jobs) -> set[str]:
    return {item["metadata"]["name"] for item in jobs.kind("PersistentVolumeClaim").get(namespace=jobs.namespace).to_dict()["items"]}


def images_of_operator(jobs: Jobs) -> set[str]:
    """Images of the operator's pods."""
    pods = jobs.kind("Pod").get(namespace=OPERATOR_NAMESPACE, label_selector="app.kubernetes.io/component=operator").to_dict()["items"]
    return {pod["spec"]["containers"][0]["image"] for pod in pods}


def timed(act: Callable[[], object]) -> str:
    start = time.monotonic()
    act()
    return f"{time.monotonic() - start:.0f} s"


@pytest.mark.parametrize("form", FORMS, indirect=True, ids=str)
def test_an_upgrade_and_the_way_back_restart_no_pod_and_lose_no_step_and_uninstalling_leaves_claims(
    form: Form, versions: tuple[Version, Version], jobs: Jobs, cluster: Path, table: list[str], request: pytest.FixtureRequest
) -> None:
    before, this = versions
    took = [timed(lambda: form.install(before))]
    with demo_files(jobs, {"nodes": 2, "training": TRAINING}):
        pass
    training = TinyTraining(jobs, "trains", CLUSTER, 100_000)
    training.until_step(1, EVERY)
    gang = Gang(jobs, "trains")
    with Leaders(cluster):
        for step in (lambda: form.install(this), lambda: form.go_back(this, before)):
            gang.until_heard()
            took.append(timed(step))
        gang.until_heard()
    restarted, claims = gang.restarted, claims_of(jobs)
    said: list[str] = []
    took.append(timed(lambda: said.append(form.uninstall(before))))
    assert form.tells in said[0]
    assert claims_of(jobs) == claims and "ml-dev-workspace" in claims
    assert bool(jobs.job("trains")) == form.keeps_jobs
    if form.keeps_jobs:
        training.until_step(1, training.logged()[-1]["step"] + EVERY)
        gang.check_untouched()
    steps = [(entry["attempt"], entry["step"]) for entry in training.logged()]
    once = [(1, number) for number in range(1, len(steps) + 1)]
    table.append(f"| {request.node.callspec.id} | {' | '.join(took)} | {restarted} | {len(set(once) - set(steps))} |")
    assert (restarted, steps) == (0, once)


@pytest.mark.parametrize("form", ["chart"], indirect=True)
def test_an_upgrade_by_helm_that_was_killed_leaves_one_operator_leading_and_is_repeated_once_its_record_is_gone(
    form: Chart, versions: tuple[Version, Version], jobs: Jobs, cluster: Path, kubectl: Kubectl, tmp_path: Path
) -> None:
    before, this = versions
    form.install(before)
    jobs.start("trains", "steps.py", cluster=CLUSTER)
    jobs.until_running("trains")
    gang = Gang(jobs, "trains")
    again = form.command(*form.upgrade_arguments(this))
    with Leaders(cluster) as leaders:
        gang.until_heard()
        KillingProxy(cluster).kill(again, tmp_path, **form.homes)
        gang.until_heard()
        assert len(leaders.holders) == 1
        refused = subprocess.run(again, env=os.environ | form.homes, capture_output=True, text=True, check=False)
        assert refused.returncode != 0 and "another operation (install/upgrade/rollback) is in progress" in refused.stderr
        done(kubectl, "delete", "secret", "-n", OPERATOR_NAMESPACE, "-l", f"owner=helm,name={RELEASE},status=pending-upgrade")
        form.install(this)
        gang.until_heard()
    assert images_of_operator(jobs) == {this.image}
    form.uninstall(this)
