"""Objects of a run without an operator: those that the operator would make, owned by the run's ConfigMap, with the agent in a ConfigMap."""

from __future__ import annotations

import json
import secrets
import uuid
from base64 import b64encode
from dataclasses import dataclass, replace

from lockstep.api import names
from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object
from lockstep.plan.reconcile.clocks import Earlier, retried
from lockstep.plan.render.objects import Frozen, RenderContext, children, freeze
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.platforms.agentfile import build_agent
from lockstep_gang.build import build_id
from lockstep_gang.contract.run import WhenDone, run_text


@dataclass(frozen=True)
class Run:
    """A job as it is sent."""

    resolved: Resolved
    frozen: Frozen
    key: str
    agent: bytes

    @property
    def name(self) -> str:
        return self.frozen.job

    @property
    def namespace(self) -> str:
        return self.frozen.namespace

    @property
    def as_job(self) -> Object:
        """The run in the shape of a TrainingJob, as `runs_without_operator` finds it."""
        metadata = {"name": self.name, "namespace": self.namespace, "uid": self.frozen.parsed.job.uid}
        return {"kind": "ConfigMap", "metadata": metadata, "spec": {}, "status": {"run": {"name": self.frozen.name}}}


def prepare(job: TrainingJob, profile: TrainingCluster, namespace: str, earlier: Earlier | None = None) -> Run:
    """Decide everything and build the agent. `earlier`: the failed run to go on from. Raises ConfigError."""
    if earlier is not None:
        job = retried(job, earlier)
    resolved = resolve(job, profile, PlatformDefaults(namespace=namespace, uid=earlier.uid if earlier is not None else str(uuid.uuid4())))
    frozen = freeze(resolved, RenderContext(agent_image="", key="", owner_uid=None, report=None, build=build_id()))
    return Run(resolved, _without_operator(frozen), secrets.token_hex(32), build_agent())


def agent_name(job: str) -> str:
    return f"{job}-agent"


def _without_operator(frozen: Frozen) -> Frozen:
    """Replace the init container by a ConfigMap with the agent, and let agents exit at the end."""
    template = json.loads(frozen.template)
    spec = template["pod"]["spec"]
    spec.pop("initContainers", None)
    volume = {"name": names.AGENT_VOLUME, "configMap": {"name": agent_name(frozen.job)}}
    spec["volumes"] = [volume if v["name"] == names.AGENT_VOLUME else v for v in spec["volumes"]]
    run = replace(frozen.parsed, when_done=WhenDone.EXIT)
    return replace(frozen, run=run_text(run), template=json.dumps(template, sort_keys=True))


def objects(run: Run) -> list[Object]:
    """Objects of the run. Its ConfigMap comes first: it owns the others once it has a uid."""
    secret, config_map, *others = children(run.frozen, owner_uid=None, key=run.key, replicas=run.frozen.nodes)
    config_map["metadata"]["labels"][names.LABEL_RUN] = run.name
    metadata = {"name": agent_name(run.name), "namespace": run.namespace, "labels": names.job_labels(run.name)}
    agent: Object = {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": {"agent.pyz": b64encode(run.agent).decode()},
    }  # fmt: skip
    return [config_map, agent, secret, *others]
