"""run.json: one resolved run, written by the control plane, read by agents and the trainer. It holds no secret."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from lockstep_gang.contract.fabric import FabricAsked
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.layout import RankLayout, equal_layout
from lockstep_gang.contract.preflight import Expected
from lockstep_spec.choices import Choice, StorageMode, Timeouts
from lockstep_spec.codec import ContractError, Must, at_least, from_json, to_json

RUN_FORMAT = "lockstep-run/1"
POD_IPS = "LOCKSTEP_POD_IPS"
"""Variable of a pod: its own addresses, one of each family that the cluster has, with commas in between."""


Port = Annotated[int, Must("a port, 1 to 65535", lambda port: 1 <= port <= 65535)]


class WhenDone(Choice):
    """An agent's behavior after the end of the job."""

    WAIT = "Wait"  # idle until SIGTERM: a pod whose first process ended would be started again
    EXIT = "Exit"  # exit with 0 (Complete) or 1 (Failed)


@dataclass(frozen=True)
class JobIdentity:
    name: str
    namespace: str
    uid: str


@dataclass(frozen=True)
class RestartPolicy:
    """Number of times that all ranks are started again together, and the wait before the first time, in seconds."""

    max_restarts: int
    backoff_seconds: int
    retry: int = 0
    """Raised by `lockstep retry`: an end recorded under a lower one doesn't count any more."""


@dataclass(frozen=True)
class ReportTarget:
    """Endpoint that the coordinator reports to: URL, certificate authority (PEM), file of the projected token."""

    url: str
    ca_pem: str
    token_file: str


_UNIT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9:_.@-]{0,200}\.service)?")
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,79}")
UnitName = Annotated[
    str, Must("the name of a systemd unit, such as lockstep-demo.service, or empty", lambda name: bool(_UNIT.fullmatch(name)))
]


@dataclass(frozen=True)
class HostPlace:
    """Duties of an agent on a machine without Kubernetes. Its messages then speak of hosts, and it listens on its stated address alone."""

    unit: UnitName = ""
    """systemd unit of the user that starts this node's agent, which the agent disables when the job has ended; empty: there is none."""
    claims: tuple[str, ...] = ()
    """UUIDs of this node's GPUs, which the agent claims on its machine for its life."""

    def __post_init__(self) -> None:
        wrong = next((uuid for uuid in self.claims if not _GPU.fullmatch(uuid)), None)
        _require(wrong is None, "host.claims", repr(wrong), "a list of UUIDs of GPUs, such as GPU-5f3c…")


@dataclass(frozen=True)
class Run:
    """Everything that an agent needs to know, the same on every node but for where things are on a host of one's own."""

    job: JobIdentity
    nodes: Annotated[int, at_least(1)]
    ranks_per_node: Annotated[int, at_least(1)]
    """Ranks of every node; the most of any, where `node_ranks` says that they differ."""
    gpus_per_node: Annotated[int, at_least(0)]
    """GPUs of every node, one a rank; the most of any, where `node_ranks` says that they differ."""
    addresses: tuple[str, ...]
    """Address of node i, a name or a number; node 0 has the coordinator."""
    coordinator_port: Port
    master_port: Port
    """First port of the ranks' rendezvous; an attempt takes a free one from here on."""
    run_dir: str
    key_file: str
    command: tuple[str, ...]
    """argv of every rank; empty in a dev environment, where every run has its own."""
    working_directory: str
    restart: RestartPolicy
    when_done: WhenDone
    timeouts: Timeouts = field(default_factory=Timeouts)
    environment: dict[str, str] = field(default_factory=dict)
    local_rank: bool | None = False
    """True: each rank gets --local_rank=N, as from DeepSpeed's launcher; null: if the text of its Python program takes it."""
    storage: StorageMode | None = None
    """Null: nobody says."""
    report: ReportTarget | None = None
    save_grace_seconds: Annotated[int, at_least(0)] = 120
    """Seconds that ranks that were asked to save and stop may take before they are killed."""
    rack_grouped: bool = False
    """The operator knows the nodes' racks, so its answer is worth a short wait before a start."""
    node_ranks: tuple[int, ...] = ()
    """Number of ranks of each node, where they differ; empty: every node has `ranks_per_node`."""
    order: tuple[int, ...] = ()
    """Nodes in the order of their ranks; empty: by their numbers. Of one attempt, so run.json never has it."""
    node_micro_batches: tuple[Annotated[int, at_least(0)], ...] = ()
    """Samples that each rank of node i computes at once, read by Lockstep's trainer only; 0: by the job's settings, which empty means for
    all.
    """
    training: dict[str, Any] | None = None
    """Read by Lockstep's trainer only; null for a user's script."""
    base_model: str = ""
    """The base model as the job names it, wherever it lies here; read by Lockstep's trainer only."""
    fabric: FabricAsked | None = None
    """Null: nobody says, and nothing is verified."""
    preflight: Expected | None = None
    """Null: nodes are not looked at before an attempt."""
    attempts_before: Annotated[int, at_least(0)] = 0
    """Highest attempt that any node's volume has of this job. Node 0's own volume may have none, where another node was node 0 before."""
    host: HostPlace | None = None
    """Null: nodes are pods."""
    interactive: Interactive | None = None
    """A dev environment: ranks start when somebody asks for them. Null: there is one run, and it starts by itself."""
    build: str = ""
    """`build_id` of what wrote this; empty: not known."""
    format: str = RUN_FORMAT

    def __post_init__(self) -> None:
        _require(self.format == RUN_FORMAT, "format", self.format, f"{RUN_FORMAT}: use an agent of the version that wrote this file")
        _require(len(self.addresses) == self.nodes, "addresses", len(self.addresses), f"a list of {self.nodes}, one for every node")
        _require(not self.order or sorted(self.order) == list(range(self.nodes)), "order", self.order, "empty, or every node once")
        counts = self.node_ranks
        _require(
            not counts or len(counts) == self.nodes, "nodeRanks", list(counts), f"empty, or a list of {self.nodes}, one for every node"
        )
        is_right = not counts or (min(counts) >= 1 and max(counts) == self.ranks_per_node)
        _require(is_right, "nodeRanks", list(counts), f"1 to ranksPerNode each, and {self.ranks_per_node} the largest")
        sizes = self.node_micro_batches
        _require(len(sizes) in (0, self.nodes), "nodeMicroBatches", list(sizes), f"empty, or a list of {self.nodes}, one for every node")
        _require(bool(self.command) or self.interactive is not None, "command", "empty", "the argument list of a rank")

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @cached_property
    def layout(self) -> RankLayout:
        """Places of the ranks."""
        return RankLayout(self.node_ranks, self.order) if self.node_ranks else equal_layout(self.nodes, self.ranks_per_node, self.order)

    def node_of(self, rank: int) -> int:
        return self.layout.node_of(rank)

    def ranks_of(self, node: int) -> range:
        return self.layout.ranks_of(node)

    def gpus_of(self, node: int) -> int:
        return len(self.ranks_of(node)) if self.node_ranks and self.gpus_per_node else self.gpus_per_node

    @property
    def gpus(self) -> int:
        """GPUs of all nodes together."""
        return self.world_size if self.node_ranks and self.gpus_per_node else self.nodes * self.gpus_per_node

    def pod_name(self, node: int) -> str:
        """First label of the node's address, which is its pod's name; empty where it is a number."""
        first = self.addresses[node].split(".")[0]
        return "" if first.isdecimal() or ":" in first else first

    def node_name(self, node: int) -> str:
        """`node 1 (x-1)`: its index, and its pod's name if that is known."""
        name = self.pod_name(node)
        return f"node {node} ({name})" if name else f"node {node}"


def _require(holds: bool, name: str, value: object, valid: str) -> None:
    if not holds:
        raise ContractError(f"run.json: {name} is {value}, but must be {valid}")


def parse_run(text: str) -> Run:
    """The text of run.json. Raises ContractError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ContractError(f"run.json is not JSON: {error}") from None
    return from_json(Run, value, "run.json")


def run_text(run: Run) -> str:
    """The text of run.json: same run, same bytes."""
    return json.dumps(to_json(run), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
