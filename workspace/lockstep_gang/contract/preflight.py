"""Preflight: what nodes are expected to be like, what each answers, and what was found. Every message of it is here.

So are the lines that an agent prints where it is asked to measure a cluster, which the command line reads in logs: as a rank of an
all-reduce sweep, and as a probe of a node.

A preflight is a few rounds. In each the coordinator asks all nodes the same question (`Check`) and every node answers with plain
facts (`Checked`); judging them is the coordinator's. The round's number tells an answer from one to an earlier question.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep_spec.choices import Choice, Severity

PREFLIGHT_RESULT = "preflight result: "
"""Begins the line of node 0's log that has the report as JSON, when the preflight was all that was asked for."""
SWEEP = "sweep"
"""The agent's first argument."""
SWEEP_POINT = "sweep point: "
"""Begins the line that has one size as JSON: bytes, microseconds, ranks."""
SWEEP_DONE = "sweep done"
LOCKSTEP = "lockstep"
"""Key of the trainer's version among those of libraries."""
PROBE = "probe"
"""The agent's first argument for a look at a node."""
PROBED = "probed: "
"""Begins the line that has what was seen, as JSON."""


class Kind(Choice):
    FILE = "File"
    FOLDER = "Folder"


@dataclass(frozen=True)
class ExpectedPath:
    """Something that every node must be able to read; `field` is where the job names it."""

    field: str
    path: str
    kind: Kind
    or_folder: bool = False
    """True if a folder is right, too, where `kind` is FILE."""


@dataclass(frozen=True)
class ExpectedRdma:
    """NICs by the cluster's file. Null and empty: it says nothing."""

    devices: tuple[str, ...] = ()
    count: int | None = None
    gid_index: int | None = None
    interfaces: tuple[str, ...] = ()
    mtu: int | None = None
    rate: int | None = None
    """Gb/s of every port."""


@dataclass(frozen=True)
class AllReduce:
    """The short all-reduce. `minimum_bytes_per_second`: of bus bandwidth; null: it is measured and not judged."""

    minimum_bytes_per_second: int | None = None


@dataclass(frozen=True)
class SelfTest:
    """A product whose result is known, on each GPU of a node, or on its CPU. `precision`: that of the job; empty: nobody states it."""

    precision: str = ""


@dataclass(frozen=True)
class Expected:
    """Expectations of all nodes, beside what the rest of run.json says."""

    paths: tuple[ExpectedPath, ...] = ()
    shm_bytes: int | None = None
    """The size that /dev/shm was asked to have."""
    rdma: ExpectedRdma | None = None
    """Null: the job doesn't use RDMA."""
    all_reduce: AllReduce | None = None
    self_test: SelfTest | None = None
    only: bool = False
    """The job ends after it: no rank is started, and nothing is recorded."""
    own_variables: tuple[str, ...] = ()
    """Variables that each node has a value of its own for, such as its interface: not compared."""


class Stage(Choice):
    LOOK = "Look"  # at yourself; write a marker, open a port
    MEET = "Meet"  # the others: connect to their ports, look for node 0's marker
    SELF_TEST = "SelfTest"
    ALL_REDUCE = "AllReduce"


@dataclass(frozen=True)
class Peer:
    node: int
    port: int


@dataclass(frozen=True)
class Group:
    """Nodes that reduce together; the first one has the rendezvous."""

    nodes: tuple[int, ...]
    master_port: int
    seconds: int
    """Whoever is not done by then kills its processes and says where they were."""


@dataclass(frozen=True)
class Check:
    """The coordinator's question of one round."""

    round: int
    stage: Stage
    token: str
    """Part of the markers' names: never used before on the volume."""
    peers: tuple[Peer, ...] = ()
    group: Group | None = None
    anew: bool = False
    """True: a self-test of an earlier start doesn't count."""
    attempt: int | None = None
    """The attempt that follows: its ranks may begin to import; null: it isn't known which ranks a node will have, or there are none."""


@dataclass(frozen=True)
class PathFact:
    """`found` is File, Folder or empty; `error` says why it can't be read."""

    path: str
    """The node's own: machines that people own have other folders each."""
    found: str = ""
    error: str = ""
    field: str = ""
    """Field of the job that names it; '' from agents of older versions."""
    interpreter: str = ""
    """Interpreter that a file's first line names and that Python can't stand in for; '': none."""


@dataclass(frozen=True)
class ProgramFact:
    """File that ranks run. `senders`: folders of people's machines that sent it, as HOST:PATH; empty where none is recorded."""

    path: str
    digest: str
    senders: tuple[str, ...] = ()


@dataclass(frozen=True)
class VolumeFacts:
    """The run's folder: `error` when it can't be written; sizes in bytes."""

    error: str = ""
    free_bytes: int = 0
    checkpoint_bytes: int = 0
    """Size of the newest checkpoint there, 0: there is none."""
    path: str = ""
    """The folder; '' from agents of older versions."""


@dataclass(frozen=True)
class GpuFacts:
    """`driver` is empty where no NVIDIA driver is loaded."""

    count: int = 0
    driver: str = ""


@dataclass(frozen=True)
class HcaFacts:
    """One port of an RDMA device, as sysfs has it."""

    device: str
    port: int
    state: str
    link_layer: str
    rate: str
    gid: str = ""
    """The entry of the table that the cluster names, empty: there is none."""
    gid_type: str = ""
    routed_gids: tuple[int, ...] | None = None
    """Entries of a RoCE port whose addresses aren't link-local, RoCE v2 first; null: it is another port, or nothing is known."""
    no_guid: bool = False
    """True if the device's GUID is all zeroes, as it is for a virtual function before it is configured."""


def is_link_local(gid: str) -> bool:
    """Return True for a GID that no router forwards: of fe80::/10, or of an IPv4 address in 169.254.0.0/16."""
    return gid.startswith("fe80:") or ":ffff:a9fe:" in gid


@dataclass(frozen=True)
class RdmaFacts:
    hcas: tuple[HcaFacts, ...] = ()
    unusable: tuple[str, ...] = ()
    """Devices of sysfs whose /dev/infiniband/uverbs* is not here: NCCL leaves them out."""
    has_ipc_lock: bool = False
    memlock_bytes: int | None = None
    """Null: no limit."""
    mtus: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Looked:
    """Facts that a node found on itself. A part that is null was not asked for, or is in `unfinished`."""

    port: int = 0
    """Port at which it waits for the others; 0: it could not open one."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """Address → why its name has no address here."""
    paths: tuple[PathFact, ...] = ()
    volume: VolumeFacts | None = None
    shm_bytes: int | None = None
    gpus: GpuFacts | None = None
    rdma: RdmaFacts | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """Python and the libraries that ranks of all nodes must have alike."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that ranks of all nodes should have alike; never one that could hold a secret."""
    net_plugin: bool | None = None
    """True if the linker finds a network plugin of NCCL's; asked where the pods have EFA."""
    program: ProgramFact | None = None
    """Null: the ranks' program is no file of a volume."""
    unfinished: tuple[str, ...] = ()
    """Checks that did not end in time."""
    received_ms: int = 0
    sent_ms: int = 0
    """This node's clock when it was asked and when it answered, milliseconds since the epoch."""


@dataclass(frozen=True)
class Met:
    """Facts that a node found of the others."""

    unreachable: dict[str, str] = field(default_factory=dict)
    """Node's index → why."""
    sees_marker: bool | None = None
    """True if node 0's marker is there; null: it did not look in time, or can't."""


@dataclass(frozen=True)
class Measured:
    """One all-reduce of a group: microseconds of the slowest of several, or why there is no figure. `port` is free for the next round."""

    microseconds: int = 0
    ranks: int = 0
    bytes: int = 0
    error: str = ""
    port: int = 0


@dataclass(frozen=True)
class DeviceResult:
    """One device after its self-test: a GPU, or the CPU, which has neither UUID nor name."""

    index: int
    uuid: str = ""
    name: str = ""
    major: int = 0
    minor: int = 0
    """Compute capability of a GPU."""
    torch: str = ""
    lacking: bool = False
    """True if this torch has no code for it; `built` names what it has."""
    built: str = ""
    precision: str = ""
    elements: int = 0
    wrong: int = 0
    """Numbers of the result, and those of them that are not what they must be."""
    flops: int = 0
    """Operations a second."""
    ecc_errors: int | None = None
    """Uncorrected ones since its driver was loaded; null: nobody says."""
    error: str = ""
    """Exception, or why it has not ended."""


@dataclass(frozen=True)
class SelfTestResult:
    """The self-test of a node; `error`: why none of its devices was tested."""

    devices: tuple[DeviceResult, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Checked:
    """A node's answer."""

    round: int
    looked: Looked | None = None
    met: Met | None = None
    measured: Measured | None = None
    tested: SelfTestResult | None = None
    failed: str = ""
    """Reason why it can't answer."""


@dataclass(frozen=True)
class Finding:
    """One check that did not pass."""

    check: str
    severity: Severity
    message: str
    fix: str
    node: int | None = None
    excludes: bool = False
    """It is this node's hardware, and other nodes passed: the job is better off without it."""
    final: bool = False
    """Waiting can't help."""


@dataclass(frozen=True)
class Bandwidth:
    """busbw of an all-reduce: 2 (ranks - 1) / ranks × bytes / time."""

    ranks: int
    bytes: int
    bytes_per_second: int


@dataclass(frozen=True)
class Speed:
    """Operations a second of the slowest and of the fastest of all devices in the self-test."""

    devices: int
    gpus: bool
    precision: str
    slowest: int
    fastest: int

    @property
    def words(self) -> str:
        """Sentence such as `16 GPUs compute right, 590 to 640 TFLOP/s in BF16`."""
        kind = "GPU" if self.gpus else "CPU"
        who = f"{self.devices} {kind}s compute" if self.devices != 1 else f"1 {kind} computes"
        slowest, fastest = (f"{flops / 1e12:.3g}" for flops in (self.slowest, self.fastest))
        return f"{who} right, {slowest if slowest == fastest else f'{slowest} to {fastest}'} TFLOP/s in {self.precision}"


@dataclass(frozen=True)
class PreflightReport:
    """The last preflight. At most 20 findings, errors first."""

    time: str
    ok: bool
    checks: tuple[str, ...]
    """Names of those that were made."""
    nodes: int
    milliseconds: int
    findings: tuple[Finding, ...] = ()
    omitted: int = 0
    all_reduce: Bandwidth | None = None
    self_test: Speed | None = None
