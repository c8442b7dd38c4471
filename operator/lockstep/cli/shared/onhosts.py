"""Verbs on a cluster of hosts, which has no Kubernetes: those that work there, and what the others say instead of asking some API
server.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from lockstep.api.errors import ConfigError
from lockstep.kube.aim import Kubeconfig

REFUSED: Mapping[str, str] = {
    "scale": "lockstep stop JOB --cluster {name}, then lockstep run -f job.yaml --cluster {name} --set nodes=N goes on with N hosts",
    "doctor": "lockstep hosts check {name} checks its hosts, and lockstep cluster lint {name} its file",
    "deploy": "hosts run no operator; lockstep run -f job.yaml --cluster {name} starts a job there",
    "cluster status": "lockstep get --cluster {name} lists its jobs",
    "cluster rollback": "hosts run no operator; lockstep hosts setup {name} with the earlier environment.lock brings its packages back",
    "cluster clean": "lockstep delete JOB --cluster {name} removes a job",
    "cluster uninstall": "hosts run no operator; lockstep delete JOB --cluster {name} removes a job",
    "build": "hosts run no image; lockstep hosts setup {name} makes their packages of environment.lock",
    "version": "hosts run no operator; lockstep version --client prints this command's version",
    "cluster discover": "lockstep init hosts NAME writes such a file",
}
"""Verbs about Kubernetes' own objects → what to use on hosts; {name} is the cluster as a word of a command line."""
WORKING = frozenset({
    "validate", "render", "plan", "preflight", "run", "launch", "bench scaling", "logs", "top", "get", "describe", "why",
    "stacks", "wait", "resume", "stop", "retry", "sync", "cp", "generate", "shell", "jupyter", "tensorboard", "vscode", "debug", "delete",
    "checkpoint list", "checkpoint verify", "drill", "adapter get", "model get", "cluster lint", "cluster calibrate", "hosts check",
    "hosts setup",
})  # fmt: skip
"""Verbs about a job, its files or its network, which work on hosts, too."""
WITHOUT_CLUSTER = frozenset({
    "quickstart", "init cluster", "init hosts", "init job", "init script", "join", "adapter export", "adapter merge", "cluster list",
    "use", "help", "devcluster up", "devcluster down", "devcluster status",
})  # fmt: skip
"""Verbs that take no cluster, or make one of their own."""


def refuse_on_hosts(verb: str, name: str, named: str) -> None:
    """Raise ConfigError if the verb is about Kubernetes' objects: the cluster has none. `named`: the cluster as it was typed."""
    if verb in REFUSED:
        instead = REFUSED[verb].format(name=shlex.quote(named))
        raise ConfigError(f"lockstep {verb} is about Kubernetes, and {name} is a cluster of hosts: {instead}")


class HostsAim:
    """A cluster of hosts as an aim of connections to Kubernetes (`kube.aim.Aim`): none leads there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubeconfig(self, context: str | None) -> Kubeconfig:
        """Raise ConfigError: a verb without a part for hosts must not ask the kubeconfig's cluster for a job there."""
        raise ConfigError(f"{self.name} is a cluster of hosts (platform: hosts in its file), and this needs a Kubernetes cluster: name one")

    def check(self, server: str, context: str | None) -> None:
        self.kubeconfig(context)
