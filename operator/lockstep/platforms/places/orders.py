"""Orders that people give a place where jobs run, and which of what they ask for a place hasn't got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.api.errors import ConfigError
from lockstep.api.names import HOSTS, KUBERNETES
from lockstep_spec.words import listed

if TYPE_CHECKING:
    from lockstep.api.files.clusterfile import ClusterFile
    from lockstep.api.job import TrainingJob
    from lockstep.api.objects import Typed
    from lockstep.plan.ahead.standin import NamedGpus

IN_NAMESPACE, LOCAL = "in-namespace", "local"


@dataclass(frozen=True)
class HostOptions:
    """Choice among the hosts of a cluster file."""

    first: str | None = None
    """The host that is node 0; None: the first of the file."""
    without: tuple[str, ...] = ()
    """Hosts to leave out."""


@dataclass(frozen=True)
class Door:
    """Place of a launch, where the machines of the other nodes join the job."""

    at: tuple[str, int]
    """This machine's address as it was given, and the first of the launch's ports."""
    version: str
    """Lockstep's, which all machines must have."""
    token_file: Path | None = None
    signals_all: bool = False
    """True if what started this process signals its agent, too."""


@dataclass(frozen=True)
class Order:
    """A job to run, and how a person has asked for that."""

    job: TrainingJob
    cluster: ClusterFile
    typed: Typed
    detach: bool = False
    """True: return once the job runs, or is accepted."""
    retry: bool = False
    """Go on from a start that failed."""
    anyway: bool = False
    """Accept a network that is too slow for the weights that the job sends."""
    samples: int | None = None
    """Train nothing, and show so many of its samples."""
    hosts: HostOptions = HostOptions()
    door: Door | None = None
    """Place where other machines join; None: all nodes are here."""


@dataclass(frozen=True)
class PlanWishes:
    """Statements of a person about a job that is planned."""

    model_config: Path | None
    """The base model's config.json, or its folder."""
    samples: str | None
    """Their number, or a file to count them in."""
    tokens_per_second: str | None
    """Speed of all ranks together, or a log that has it."""
    hardware: NamedGpus | None
    """Nodes that stand in for a cluster's."""
    offline: bool
    """True: no place and no hub is asked."""


TAKEN_BY = {
    "--detach": (KUBERNETES, HOSTS),
    "--hosts": (HOSTS,),
    "--first": (HOSTS,),
    "--without": (HOSTS,),
    "--anyway": (HOSTS,),
    "--preview": (LOCAL,),
}
"""Option → places that take it."""
PLACES = {
    KUBERNETES: ("on a cluster", "name the cluster file of hosts with --cluster, or add --local"),
    HOSTS: ("on hosts", "leave it out"),
    LOCAL: ("on this machine", "leave out --local, and name a cluster with --cluster"),
    IN_NAMESPACE: ("without the operator", "leave out --in-namespace"),
}
ELSEWHERE = "elsewhere"
"""All places without an operator that aren't named."""
LACKS: Mapping[str, Mapping[str, str]] = {
    "scale": {
        HOSTS: "lockstep stop JOB --cluster {name}, then lockstep run -f job.yaml --cluster {name} --set nodes=N goes on with N hosts",
    },
    "deploy": {HOSTS: "hosts run no operator; lockstep run -f job.yaml --cluster {name} starts a job there"},
    "cluster status": {HOSTS: "lockstep get --cluster {name} lists its jobs"},
    "cluster rollback": {
        HOSTS: "hosts run no operator; lockstep hosts setup {name} with the earlier environment.lock brings its packages back",
    },
    "cluster clean": {HOSTS: "lockstep delete JOB --cluster {name} removes a job"},
    "cluster uninstall": {HOSTS: "hosts run no operator; lockstep delete JOB --cluster {name} removes a job"},
    "build": {HOSTS: "hosts run no image; lockstep hosts setup {name} makes their packages of environment.lock"},
    "version": {HOSTS: "hosts run no operator; lockstep --version prints this command's version"},
    "cluster discover": {HOSTS: "lockstep init hosts NAME writes such a file"},
    "objects": {
        HOSTS: "{name} is a cluster of hosts, where a job becomes no objects: --explain shows where each value comes from, -o job the job"
               " itself",
    },
    "cp": {ELSEWHERE: "{name} is a workspace of this machine, and this is about a cluster: name one by --cluster"},
    "shell": {ELSEWHERE: "job {job} {where} has neither a pod nor a host to open: it runs on this machine"},
    "resume": {ELSEWHERE: "a run on this machine goes on when it is started again: {command}"},
    "retry": {
        ELSEWHERE: "a run on this machine is retried as it was started: {command}",
        IN_NAMESPACE: "{job} runs without the operator: lockstep retry -f FILE --in-namespace {again}",
    },
    "cluster calibrate --pairs": {LOCAL: "this machine has no pair of nodes: name a cluster or hosts by --cluster"},
    "kill-operator": {ELSEWHERE: "{what} needs an operator, and a job {where} has none: choose another fault"},
    "lose-node": {
        LOCAL: "{what} ends an agent, and nothing on this machine would start it again: choose another fault, or a job on a cluster",
    },
    "Interactive": {
        ELSEWHERE: "a job of type Interactive needs the operator of a cluster: lockstep run -f FILE --cluster CLUSTER; for one run without"
                   " it, name the script in spec.script",
    },
    "--from": {KUBERNETES: "--from names a host, which only a cluster file with platform: hosts has: name that file with --cluster"},
    "--now": {
        KUBERNETES: "--now is for hosts: on a cluster, kubectl delete pod {job}-0 {again} --grace-period=0 ends a pod without a save",
    },
    "--run": {
        ELSEWHERE: "--run is about the script of a dev environment, which only a cluster has: lockstep stop {at} stops the job",
    },
    "--bundle": {
        HOSTS: "--bundle collects Kubernetes objects: on hosts, lockstep cp {job}:runs/{job}/logs FOLDER {again} copies the logs",
        LOCAL: "--bundle collects Kubernetes objects: all that is known of {job} is in {name}/workspace/runs/{job}",
    },
    "-A and -l": {LOCAL: "-A and -l choose among jobs of a cluster: a workspace has neither namespaces nor labels"},
    "-l": {HOSTS: "-l selects by labels, which a cluster has: name the jobs {where}"},
    "-n": {
        LOCAL: "{name} is a workspace of this machine, which has no namespaces: leave out -n, or name a cluster by --cluster",
        HOSTS: "{name} is a cluster of hosts: they have no namespace and no kubeconfig, so leave out -n and --context",
    },
}  # fmt: skip
"""Verb, option or other thing → places that haven't got it, and what to do instead there."""


def lack(place: str, what: str, /, **words: object) -> ConfigError:
    """Return the error about what this place hasn't got. `words`: those that stand in braces there."""
    return ConfigError((LACKS[what].get(place) or LACKS[what][ELSEWHERE]).format(what=what, **words))


def refuse(place: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError for options that are stated and mean nothing in this place, with the places where they do."""
    wrong = [name for name, value in options.items() if value and place not in TAKEN_BY[name]]
    if wrong:
        taken = [words for name, (words, _) in PLACES.items() if all(name in TAKEN_BY[option] for option in wrong)]
        where = f" {' or '.join(taken)}" if taken else ""
        raise ConfigError(
            f"{listed(wrong)} {'is' if len(wrong) == 1 else 'are'} for a job{where}, and this one runs {': '.join(PLACES[place])}"
        )
