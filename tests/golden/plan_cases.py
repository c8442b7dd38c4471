"""Jobs and clusters that the tests of plan/ share, and the golden files made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.job import TrainingJob
from lockstep.plan.render.objects import RenderContext, render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import report_target

GOLDEN = Path(__file__).resolve().parent
CHECKOUT = GOLDEN.parents[1]
CONTEXT = RenderContext(
    agent_image="lockstep-operator:0.1.0",
    key="0123456789abcdef" * 4,
    owner_uid="6f1d0c4e-0000-4000-8000-000000000001",
    report=report_target(
        "https://lockstep-operator.lockstep-system.svc/v1/report", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    ),
)
TRAINING = {"model": {"name": "/workspace/models/base"}, "data": {"path": "/datasets/text.jsonl"}}
HOSTILE = [
    "two\nlines\n", "\ttab and trailing space ", "{{ 7 * 7 }}", "{% raw %}", "---\nkind: Pod", "$(HOME)", "$$(HOME)", "$$$", "a$b",
    "'single' \"double\" `back`", "key: value # no comment", "- item", "&anchor *alias !tag", "yes", "null", "2e-4", "0o17", "1_000", "~",
        "=",
    "\\n \\u0041", "naïve – 東京 – 😀", "\x7f\x85\u2028\u2029\ufeff", "<made by the operator>", "%s {0}", "", " ",
]  # fmt: skip
"""Text that some parser, template engine or expansion on the way to a pod would read as something else."""


@dataclass(frozen=True)
class Case:
    """One golden file."""

    cluster: str
    transport: str
    storage: str

    @property
    def name(self) -> str:
        return f"{self.cluster}-{self.transport}-{self.storage}".lower()

    @property
    def path(self) -> Path:
        return GOLDEN / f"{self.name}.yaml"

    def resolved(self) -> Resolved:
        spec = {"fabric": {"mode": self.transport}, "storage": {"mode": self.storage}, "training": TRAINING}
        return resolve(job(**spec), cluster(self.cluster), PlatformDefaults(namespace="team"))

    def objects(self) -> list[dict[str, Any]]:
        return render(self.resolved(), CONTEXT)

    def text(self) -> str:
        return dump_all_yaml(self.objects())


CASES = [
    Case(name, transport, storage)
    for name, transports in (("barcelona", ("RDMA", "TCP")), ("nerc-production", ("TCP",)), ("local", ("TCP",)))
    for transport in transports
    for storage in ("Shared", "PerPod")
]


def cluster(name: str) -> TrainingCluster:
    """The cluster that ships, with the image that the operator would give its jobs where the file names none."""
    path = CHECKOUT / "clusters" / f"{name}.yaml"
    profile = parse_cluster_file(path.read_text(encoding="utf-8"), str(path)).profile
    return profile.model_copy(update={"spec": profile.spec.model_copy(update={"image": profile.spec.image or "lockstep-trainer:0.1.0"})})


def job(*, name: str = "x", **spec: Any) -> TrainingJob:
    """A job with `spec`; one that says nothing of its work trains."""
    if "script" not in spec and spec.get("type") != "Interactive":
        spec.setdefault("training", TRAINING)
    return TrainingJob.model_validate({"metadata": {"name": name}, "spec": spec})


def profile(**spec: Any) -> TrainingCluster:
    return TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {"image": "trainer:1"} | spec})


def rdma_profile(*, spec: dict[str, Any] | None = None, **rdma: Any) -> TrainingCluster:
    given = {"network": {"rdma": {"enabled": True} | rdma}, "security": {"ipcLock": True}, "gpus": {"perNode": 4}}
    return profile(**(given | (spec or {})))


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == kind]


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod spec of the one StatefulSet."""
    (stateful_set,) = of_kind(objects, "StatefulSet")
    return stateful_set["spec"]["template"]["spec"]


def trainer_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(objects)["containers"]
    return dict(container)


def variables_of(objects: list[dict[str, Any]]) -> dict[str, str]:
    """The trainer's variables that have a plain value."""
    return {item["name"]: item["value"] for item in trainer_of(objects)["env"] if "value" in item}


def expanded(value: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of a value: `$(NAME)` is expanded where NAME is known, and two dollars are one.

    The rule of k8s.io/kubernetes third_party/forked/golang/expansion, written again from its documentation.
    """
    result, position = "", 0
    while position < len(value):
        rest = value[position:]
        end = rest.find(")")
        if rest.startswith("$$"):
            result, position = result + "$", position + 2
        elif rest.startswith("$(") and end > 0:
            result, position = result + variables.get(rest[2:end], rest[: end + 1]), position + end + 1
        else:
            result, position = result + rest[0], position + 1
    return result
