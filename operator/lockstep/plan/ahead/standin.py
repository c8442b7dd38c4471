"""Cluster files that stand in where there is no cluster: of GPUs that are named, or of none in particular (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.files.problems import nearest
from lockstep.api.job import TrainingJob
from lockstep.api.shared import FabricMode
from lockstep.plan.cluster.finding import Finding, refused
from lockstep.plan.render.resolved import Resolved
from lockstep_spec.gpus import GPUS
from lockstep_spec.words import listed

NO_CLUSTER = "no-cluster"
"""Name of a cluster file that stands in."""
_SHAPE = re.compile(r"\s*(\d{1,4})\s*[x*]\s*(\d{1,2})\s*[x*]\s*(\S.*)", re.IGNORECASE)
_SIZES = (re.compile(r"[\s_-](\d+)\s*gi?b?\b", re.IGNORECASE), re.compile(r"[\s_-](\d+)$"))
"""Size of the memory in a card's name: with its unit, else at the end without."""
_FILLERS = re.compile(r"nvidia|geforce|tesla|generation|sxm\d?|hbm\d?e?|[^a-z0-9]")
_SOMETIMES = re.compile(r"pcie|blackwell|(server|workstation)edition")
"""Parts of a card's full name that tell no kinds in the list apart, and parts that tell only some apart."""


class NamedGpus(NamedTuple):
    """Nodes with GPUs that a plan is made for."""

    typed: str
    """Value of --on."""
    nodes: int
    gpus: int
    card: str
    """Name in the list."""
    gigabytes: int

    @property
    def gpu_type(self) -> str:
        """The card in words, with the other sizes that it comes in."""
        others = [size for size in GPUS[self.card].gigabytes if size != self.gigabytes]
        return f"{self.card} with {self.gigabytes} GB{f', some have {listed(others)}' if others else ''}"

    def refusals(self, resolved: Resolved) -> Iterator[Finding]:
        """Yield what the job asks for and these nodes don't have."""
        for field, asked, there in (("nodes", resolved.nodes, self.nodes), ("gpusPerNode", resolved.gpus_per_node, self.gpus)):
            if asked > there:
                message = f"the job's {field} is {asked}, and --on {self.typed} has {there}"
                yield refused("nodes", message, f"--set {field}={there}, or a larger --on")


def parse_hardware(word: str) -> NamedGpus:
    """Return what `--on 2x4xH100` means. Raises ConfigError for another form, and for a card that isn't in the list."""
    match = _SHAPE.fullmatch(word)
    if match is None or not int(match[1]) or not int(match[2]):
        raise ConfigError(f"--on {word}: it must be NODESxGPUSxCARD, for example 2x4xH100: two nodes with four H100 each")
    by_key = {_FILLERS.sub("", name.lower()): name for name in GPUS}
    full = [(_FILLERS.sub("", form.sub(" ", match[3]).lower()), form.search(match[3])) for form in _SIZES]
    keys = [(key, sized) for name, sized in full for short in (name, _SOMETIMES.sub("", name)) for key in (short, f"rtx{short}")]
    card, sized = next(((by_key[key], sized) for key, sized in keys if key in by_key), (None, None))
    planned = {key: name for key, name in by_key.items() if GPUS[name].gigabytes}
    if card is None:
        near = nearest(keys[0][0], planned) or nearest(keys[1][0], planned)
        hint = f"did you mean {planned[near]}?" if near else f"it has {', '.join(planned.values())}"
        raise ConfigError(f"--on {word}: the list has no card {match[3]}; {hint}")
    sizes = GPUS[card].gigabytes
    if not sizes:
        raise ConfigError(f"--on {word}: memory isn't planned for {card}; it is for {', '.join(planned.values())}")
    size = next((size for size in sizes if sized is None or size <= int(sized[1]) <= size + 1), None)  # (what ECC takes)
    if size is None:
        raise ConfigError(f"--on {word}: there is no {card} with {sized and sized[1]} GB; it has {' or '.join(map(str, sizes))} GB")
    return NamedGpus(word, int(match[1]), int(match[2]), card, size)


def stand_in(job: TrainingJob | None = None, hardware: NamedGpus | None = None) -> ClusterFile:
    """Return a cluster file in which everything has its default, except for GPUs: the job's, else those of `hardware`, else one a node. It
    has RDMA if the job demands it.
    """
    stated = job.spec.gpus_per_node if job is not None else None
    gpus = stated if stated is not None else hardware.gpus if hardware is not None else 1
    rdma = job is not None and job.spec.fabric.mode is FabricMode.RDMA
    content = {
        "cluster": {"name": NO_CLUSTER, "namespace": "default", "platform": "kubernetes"},
        "storage": {"mode": "rwx", "class_rwx": "standard", "class_rwo": "standard"},
        "network": {"rdma": {"enabled": rdma}},
        "security": {"ipc_lock": rdma},
        "gpus": {"per_node": gpus, **({"default_nodes": hardware.nodes, "type": hardware.gpu_type} if hardware is not None else {})},
    }
    return parse_cluster_file(json.dumps(content), NO_CLUSTER)


def is_stand_in(resolved: Resolved) -> bool:
    """Return True for a job that was resolved without a cluster."""
    return resolved.profile.metadata.name == NO_CLUSTER
