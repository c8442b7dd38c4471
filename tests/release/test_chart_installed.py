"""The chart on the embedded cluster, by helm itself: install, a job, upgrades with other CRDs, removal, and what is there already."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config, dynamic

from lockstep.api.files.yamltext import dump_all_yaml, dump_yaml
from lockstep.api.objects import Object
from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster.cluster import status
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.node import ctr, import_image
from release import chart, parts
from release.programs import program
from support.checkout import ROOT
from support.clusters.built_image import built
from support.clusters.cluster_jobs import API, Jobs, prepare, until
from support.clusters.own_cluster import GIVEN, GO, own_number

pytestmark = pytest.mark.long
HOME, OPERATOR = "lockstep-system", "lockstep-operator"
NAME = f"registry.example.com/team/{OPERATOR}"
CRD = "trainingjobs.lockstep.dev"
OWNED = "exists and cannot be imported into the current release: invalid ownership metadata"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """The administrator's kubeconfig of an embedded cluster without anything of Lockstep's on it."""
    given = os.environ.get(GIVEN)
    with pytest.MonkeyPatch.context() as patch, nullcontext() if given else own_number():
        for name, value in GO.items():
            patch.setenv(name, value)
        path = Path(given) if given else bring_up()
        patch.setenv("KUBECONFIG", str(path))
        yield path


@pytest.fixture(scope="module")
def image(cluster: Path) -> Iterator[str]:
    """The operator's image by the digest under which every node has it: no registry is asked."""
    reference, archive = built("operator")
    digest, nodes = "", [default_layout().node(number) for number in range(len(status(default_layout())["nodes"]))]
    for node in nodes:
        import_image(node, archive)
        listed = subprocess.run([*ctr(node), "images", "ls", f"name=={reference}"], capture_output=True, text=True, check=True).stdout
        digest = listed.splitlines()[1].split()[2]
        subprocess.run([*ctr(node), "images", "tag", "--force", reference, f"{NAME}@{digest}"], capture_output=True, check=True)
    yield f"{NAME}:{parts.version()}@{digest}"
    for node in nodes:
        names = (reference, f"{NAME}@{digest}")
        subprocess.run([*ctr(node), "images", "remove", "--sync", *names], capture_output=True, check=False)


@dataclass
class Site:
    """An administrator with helm, kubectl and the command line, and the jobs of one namespace."""

    jobs: Jobs
    folder: Path
    image: str

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"LOCKSTEP_STATE": str(self.folder / "state")}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=400)

    def helm(self, *words: object, namespace: str = HOME) -> subprocess.CompletedProcess[str]:
        return self.run(program("helm"), *words, "-n", namespace)

    def lockstep(self, *words: object) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "lockstep.cli.main", *words)

    def chart(self, name: str = "chart") -> Path:
        [path] = chart.write(self.folder / name, parts.Images(self.image, self.image))
        return path

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.helm("install", "lockstep", self.chart(), "--create-namespace", "--wait", "--timeout", "5m", *options)

    def deploy(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`lockstep deploy` of a cluster whose pods mount nothing, so that they need the agent of the operator's image."""
        described: Any = yaml.safe_load((ROOT / "clusters/local.yaml").read_text())
        described["cluster"] |= {"name": "mine", "namespace": self.jobs.namespace}
        described["pod"] = {}
        (self.folder / "mine.yaml").write_text(yaml.safe_dump(described))
        return self.lockstep("deploy", "mine.yaml", "--no-dev", "--mode", "tcp", *options)

    def operators(self) -> list[tuple[str, str]]:
        """Namespace and uid of every operator of the cluster."""
        found = client.AppsV1Api(self.jobs.api.client).list_deployment_for_all_namespaces(field_selector=f"metadata.name={OPERATOR}")
        return [(item.metadata.namespace, item.metadata.uid) for item in found.items]

    def crd_fields(self) -> set[str]:
        definition = self.jobs.kind("CustomResourceDefinition", "apiextensions.k8s.io/v1").get(name=CRD).to_dict()
        return {*definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]}

    def pods(self, job: str) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.jobs.pods(job)}

    def remove(self) -> None:
        """Everything of Lockstep's, jobs included."""
        for job in (item["metadata"]["name"] for item in self.listed("TrainingJob")):
            self.jobs.end(job)
        until(
            "all jobs' pods are gone",
            lambda: not self.jobs.kind("Pod").get(namespace=self.jobs.namespace, label_selector="lockstep.dev/job").items,
        )
        self.run("kubectl", "delete", "deployment", "--all", "--wait", "-n", self.jobs.namespace)
        self.helm("uninstall", "lockstep", "--ignore-not-found", "--wait")
        whole = dump_all_yaml([*parts.operator_objects(), *parts.crds()])
        (self.folder / "all.yaml").write_text(whole)
        done = self.run("kubectl", "delete", "--ignore-not-found", "--wait", "-f", "all.yaml")
        assert done.returncode == 0, done.stderr

    def listed(self, kind: str) -> list[Object]:
        try:
            return list(self.jobs.kind(kind, API).get(namespace=self.jobs.namespace).to_dict()["items"])
        except dynamic.exceptions.ResourceNotFoundError:
            return []


@pytest.fixture
def site(cluster: Path, image: str, tmp_path: Path) -> Iterator[Site]:
    with config.new_client_from_config(str(cluster)) as connection:
        api = dynamic.DynamicClient(connection)
        core = client.CoreV1Api(connection)
        namespace = core.create_namespace({"metadata": {"generateName": "lockstep-test-"}}).metadata.name
        site = Site(prepare(api, namespace), tmp_path, image)
        try:
            yield site
        finally:
            site.remove()
            core.delete_namespace(namespace)


def words(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart of the next version has one more field of jobs."""
    crds = copy.deepcopy(parts.crds())
    definition = next(item for item in crds if item["metadata"]["name"] == CRD)
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["novelty"] = {"type": "string"}
    monkeypatch.setattr(chart, "crds", lambda: crds)
    monkeypatch.setattr(chart, "version", lambda: "9.0.0")


def test_an_installation_trains_takes_new_crds_and_leaves_jobs_claims_and_crds_to_the_next(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, old = site.jobs, site.chart("old")
    installed = site.install()
    assert installed.returncode == 0, words(installed)
    deployed = site.deploy()
    assert deployed.returncode == 0, words(deployed)
    assert "the operator among them, stay as helm's release lockstep has them" in deployed.stderr
    [operator] = site.operators()
    jobs.start("ok", "ok.py", cluster="mine", nodes=1)
    jobs.until_condition("ok", "Complete", "True", "Complete")
    jobs.start("long", cluster="mine", nodes=1)
    jobs.until_running("long")
    pods = site.pods("long")

    assert "novelty" not in site.crd_fields()
    with monkeypatch.context() as patch:
        newer(patch)
        upgraded = site.helm("upgrade", "lockstep", site.chart("new"), "--wait", "--set", "image.tag=next")
    assert upgraded.returncode == 0, words(upgraded)
    assert "novelty" in site.crd_fields()
    back = site.helm("upgrade", "lockstep", old, "--wait")
    assert back.returncode == 0, words(back)
    sentence = f"CustomResourceDefinition {CRD} stays as it is: a newer version made it, and this one's would drop v1alpha1.spec.novelty."
    assert sentence in back.stdout and "novelty" in site.crd_fields()

    claims = {item["metadata"]["uid"] for item in jobs.kind("PersistentVolumeClaim").get(namespace=jobs.namespace).to_dict()["items"]}
    refused = site.lockstep("cluster", "uninstall", "mine.yaml", "--yes", "--jobs")
    assert refused.returncode == 1 and f"helm uninstall lockstep -n {HOME}" in refused.stderr
    removed = site.helm("uninstall", "lockstep", "--wait")
    assert removed.returncode == 0, words(removed)
    assert f"[CustomResourceDefinition] {CRD}" in words(removed), "helm says what it keeps"
    assert site.operators() == [] and {item["metadata"]["name"] for item in site.listed("TrainingJob")} == {"ok", "long"}
    assert {
        item["metadata"]["uid"] for item in jobs.kind("PersistentVolumeClaim").get(namespace=jobs.namespace).to_dict()["items"]
    } == claims
    again = site.install()
    assert again.returncode == 0, words(again)
    assert site.operators() != [operator] and len(site.operators()) == 1
    jobs.change("ok", ttlSecondsAfterFinished=0)
    until("the new operator deletes what asks for it", lambda: jobs.get("TrainingJob", "ok", API) is None)
    assert site.pods("long") == pods, "nothing has restarted the job meanwhile"
    jobs.until_running("long")


def test_a_second_release_is_refused_in_words_and_one_operator_leads(site: Site) -> None:
    assert site.install().returncode == 0
    before = site.operators()
    second = site.helm("install", "second", site.chart())
    assert second.returncode != 0 and OWNED in second.stderr
    elsewhere = site.helm("install", "second", site.chart(), "--create-namespace", namespace="elsewhere")
    assert elsewhere.returncode != 0 and "namespace elsewhere: Lockstep's operator lives in lockstep-system" in elsewhere.stderr
    assert site.operators() == before and len(before) == 1


def test_an_operator_that_kustomize_moves_to_another_namespace_says_what_it_lacks_and_never_leads(site: Site) -> None:
    assert site.install().returncode == 0
    name, _, digest = site.image.partition("@")
    moved = {
        "namespace": site.jobs.namespace,
        "resources": ["base"],
        "images": [{"name": OPERATOR, "newName": name.partition(":")[0], "digest": digest}],
    }
    shutil.copytree(ROOT / "manifests/operator/base", site.folder / "base")
    (site.folder / "kustomization.yaml").write_text(dump_yaml(moved))
    applied = site.run("kubectl", "apply", "-k", ".")
    assert applied.returncode == 0, words(applied)

    def said() -> bool:
        log = site.run("kubectl", "logs", f"deployment/{OPERATOR}", "-n", site.jobs.namespace).stdout
        return f'User "system:serviceaccount:{site.jobs.namespace}:{OPERATOR}" cannot get resource "secrets"' in log

    until("it says which right it lacks", said)
    lease = site.jobs.get("Lease", OPERATOR, "coordination.k8s.io/v1") or {}
    assert not (lease.get("spec") or {}).get("holderIdentity")
    restored = site.helm("upgrade", "lockstep", site.chart(), "--force-conflicts", "--wait")
    assert restored.returncode == 0, words(restored)
    (subject,) = site.jobs.kind("ClusterRoleBinding", "rbac.authorization.k8s.io/v1").get(name=OPERATOR).to_dict()["subjects"]
    assert subject["namespace"] == HOME, "the release has its rights again"


@pytest.mark.parametrize("way", ["lockstep deploy", "kubectl apply"])
def test_a_release_over_another_way_is_refused_until_it_is_to_take_it_over(way: str, site: Site) -> None:
    if way == "lockstep deploy":
        done = site.deploy("--image", site.image)
    else:
        made = dump_all_yaml([*parts.crds(), *parts.operator_objects()]).replace(
            f": {OPERATOR}\n        command", f": {site.image}\n        command"
        )
        made = made.replace(f"value: {OPERATOR}\n", f"value: {site.image}\n")
        (site.folder / "install.yaml").write_text(made)
        done = site.run("kubectl", "apply", "--server-side", "-f", "install.yaml")
    assert done.returncode == 0, words(done)
    before = site.operators()
    refused = site.install()
    assert refused.returncode != 0 and OWNED in refused.stderr and site.operators() == before
    taken = site.install("--take-ownership", "--force-conflicts")
    assert taken.returncode == 0, words(taken)
    assert site.operators() == before and len(before) == 1
