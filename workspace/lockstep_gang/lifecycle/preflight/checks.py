"""The checks of a preflight (pure): names, reachability, clocks, files, shared memory, devices and software, each over what all nodes
found, against run.json and against each other.

A check is a name, the cause that it stands for, and the judgment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep_gang.contract.placewords import words_of
from lockstep_gang.contract.preflight import LOCKSTEP, Finding, Kind, Met, PathFact, ProgramFact, VolumeFacts
from lockstep_gang.contract.report import Cause
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight import nics
from lockstep_gang.lifecycle.preflight.nodes import LookedAt, NodeAnswers, error, expected_of, findings_of, odd, warning
from lockstep_spec import VERSION
from lockstep_spec.choices import Severity, StorageMode
from lockstep_spec.files import runs_with
from lockstep_spec.words import binary_size, listed

SKEW_SECONDS = 1.0


def names(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        for address, why in looked.unresolved.items():
            yield error("names", node, f"{nodes.name(node)} can't resolve {address} ({why})", nodes.words.names)


def peers(nodes: NodeAnswers) -> Iterator[Finding]:
    closed = [node for node, looked in nodes.looked.items() if not looked.port]
    for node in closed:
        yield error("peers", node, f"{nodes.name(node)} could not open a port", "look at its agent's log")
    for node, met in nodes.met.items():
        for other, why in met.unreachable.items():
            message = f"{nodes.name(node)} can't reach {nodes.name(int(other))}: {why}"
            yield error("peers", node, message, nodes.words.peers)


def clocks(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, skew in nodes.skews.items():
        if abs(skew) > SKEW_SECONDS:
            message = f"the clock of {nodes.name(node)} is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} node 0's"
            yield warning("clock", node, message, "let NTP or chrony set the node's clock: logs and tokens go by it")


FREE_BYTES_FLOOR = 256 * 1024**2
"""Free space below which nothing can be recorded any more."""
CHECKPOINT_BYTES_UNKNOWN = 1024**3
"""Room that should be there while no checkpoint tells what one needs."""
_SHM_SHARE = 0.95  # a tmpfs is rounded to pages


def paths(nodes: NodeAnswers) -> Iterator[Finding]:
    workspace = nodes.run.run_dir.removesuffix(f"runs/{nodes.run.job.name}")
    for node, looked in nodes.looked.items():
        facts = {fact.field or fact.path: fact for fact in looked.paths}
        for item in nodes.expected.paths:
            fact = facts.get(item.field) or facts.get(item.path) or PathFact(item.path, error="it was not looked at")
            kinds = [item.kind, Kind.FOLDER] if item.or_folder else [item.kind]
            problem = _path_problem(fact, [kind.value for kind in kinds])
            if problem and item.kind.is_known and "paths" not in looked.unfinished:
                message = f"{item.field}: {problem} {fact.path} on {nodes.name(node)}"
                fix = "put it there, or correct the path" if not fact.error else "look at the volume and at the file's rights"
                yield replace(error("paths", node, message, fix), final=not fact.error)
            elif fact.interpreter:
                message = f"{item.field}: {fact.path} on {nodes.name(node)} is a program of {fact.interpreter}, which Python can't read"
                yield replace(error("paths", node, message, runs_with(fact.interpreter, item.path.removeprefix(workspace))), final=True)


def _path_problem(fact: PathFact, kinds: Sequence[str]) -> str:
    if fact.error:
        return f"{fact.error}:"
    return "" if fact.found in kinds else f"there is no {' or '.join(kinds).lower()}"


PROGRAM = "program"


def programs_of(looked: Iterable[LookedAt]) -> dict[str, ProgramFact]:
    """Return the program that each node has, by its index."""
    return {str(node): facts.program for node, facts, *_ in looked if facts.program is not None}


def judge_programs(run: Run, before: Mapping[str, ProgramFact], now: Mapping[str, ProgramFact]) -> Iterator[Finding]:
    """Compare the nodes' programs with those that the attempt `before` ran, and with node 0's. Another folder's program is an error."""
    for node, program in now.items():
        old, name = before.get(node), run.node_name(int(node))
        if old is not None and old.digest != program.digest:
            text = f"{program.path} on {name} is another program than the last attempt ran: "
            who = f"sent from {listed(program.senders)}" if program.senders else "changed by an editor or another tool there"
            if old.senders and program.senders and not set(old.senders) & set(program.senders):
                fix = (
                    f"send the first one again with lockstep sync --force, then lockstep retry {run.job.name}, and the other one to a"
                    " folder of its own (--to)"
                )
                message = f"{text}that one was sent from {listed(old.senders)}, and this one {who}"
                yield replace(error(PROGRAM, int(node), message, fix), final=True)
            else:
                yield warning(PROGRAM, int(node), f"{text}it was {who}", "nothing to do, if you meant it")
        elif "0" in now and program.digest != now["0"].digest:
            yield warning(PROGRAM, int(node), f"{program.path} on {name} differs from node 0's", "lockstep sync sends one to every node")


def writable(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error:
            message = f"{nodes.name(node)} can't write in {volume.path or nodes.run.run_dir}: {volume.error}"
            yield error("writable", node, message, "look at the volume: is it full, read-only, or another user's?")


def shared(nodes: NodeAnswers) -> Iterator[Finding]:
    claimed = nodes.run.storage is StorageMode.SHARED
    if nodes.looked[0].volume is None or nodes.looked[0].volume.error:
        return  # then nobody can see what node 0 wrote
    for node, met in nodes.met.items():
        if met.sees_marker is None or met.sees_marker is claimed:
            continue
        run_dir, name = nodes.run.run_dir, nodes.name(node)
        if claimed:
            message = f"{name} does not see what node 0 writes to {run_dir}, though storage is Shared"
            fix = nodes.words.shared
        else:
            message = f"{name} sees what node 0 writes to {run_dir}, though storage is PerPod"
            fix = nodes.words.own
        yield replace(error("shared", node, message, fix), final=True)


def space(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error or (node and nodes.run.storage is StorageMode.SHARED):
            continue  # one volume, told once
        free, needed = volume.free_bytes, volume.checkpoint_bytes or CHECKPOINT_BYTES_UNKNOWN
        message = f"{binary_size(free)} are free in {volume.path or nodes.run.run_dir} on {nodes.name(node)}"
        if free < FREE_BYTES_FLOOR:
            yield error(
                "space", node, f"{message}, at least {binary_size(FREE_BYTES_FLOOR)} are needed", "delete what is no longer needed there"
            )
        elif free < needed:
            reason = "the newest checkpoint has" if volume.checkpoint_bytes else "a checkpoint may need"
            yield warning(
                "space", node, f"{message}, {reason} {binary_size(needed)}", "make room, or saves will fail and the job run on without"
            )


def _volumes(nodes: NodeAnswers) -> Iterator[tuple[int, VolumeFacts]]:
    return ((node, looked.volume) for node, looked in nodes.looked.items() if looked.volume is not None)


def shared_memory(nodes: NodeAnswers) -> Iterator[Finding]:
    expected = nodes.expected.shm_bytes
    for node, looked in nodes.looked.items():
        if expected is not None and looked.shm_bytes is not None and looked.shm_bytes < expected * _SHM_SHARE:
            message = (
                f"shared memory (/dev/shm) has {binary_size(looked.shm_bytes)} on {nodes.name(node)}, the cluster asks for"
                f" {binary_size(expected)}"
            )
            yield warning("sharedMemory", node, message, nodes.words.shared_memory)


def gpus(nodes: NodeAnswers) -> Iterator[Finding]:
    counts = [(node, looked.gpus.count, nodes.run.gpus_of(node)) for node, looked in nodes.looked.items() if looked.gpus is not None]
    few = [(node, f"{count} of {expected}", "{} has <> GPUs", nodes.words.gpus) for node, count, expected in counts if count < expected]
    yield from findings_of(nodes, "gpus", Severity.ERROR, few, excluding=True)


def drivers(nodes: NodeAnswers) -> Iterator[Finding]:
    values = {node: looked.gpus.driver for node, looked in nodes.looked.items() if looked.gpus is not None}
    for node, own, common in odd(values):
        message = f"the NVIDIA driver is {own or 'not loaded'} on {nodes.name(node)} and {common or 'not loaded'} on other nodes"
        yield warning("driver", node, message, "use nodes with one driver version, or update that node")


_SAME = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed")
"""Libraries whose messages to each other change between versions."""


def python(nodes: NodeAnswers) -> Iterator[Finding]:
    values = {node: looked.versions.get("python", "") for node, looked in nodes.looked.items() if looked.versions}
    for node, own, common in odd(values):
        message = f"Python is {own} on {nodes.name(node)} and {common} on other nodes"
        yield warning("python", node, message, nodes.words.python)


def trainer(nodes: NodeAnswers) -> Iterator[Finding]:
    """Compare with this agent's version, which is the operator's; nodes among each other are compared as libraries are."""
    versions = ((node, looked.versions[LOCKSTEP]) for node, looked in nodes.looked.items() if LOCKSTEP in looked.versions)
    other = next(((node, version) for node, version in versions if version != VERSION), None)
    if other is not None:
        node, version = other
        message = f"the trainer of {nodes.name(node)} is of version {version or 'unknown'}, and this job's agent of {VERSION}"
        yield warning("trainer", node, message, nodes.words.trainer)


def without_trainer(run: Run, node: int, why: str) -> Finding:
    """Return the error of a node whose ranks would end at once."""
    message = f"the Python of {run.node_name(node)} has no trainer ({why})"
    return replace(error("trainer", node, message, words_of(run).trainer), final=True)


def libraries(nodes: NodeAnswers) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.versions if name != "python"})
    for name in names:
        values = {node: looked.versions.get(name, "") for node, looked in nodes.looked.items() if looked.versions}
        for node, own, common in odd(values):
            message = f"{name} is {own or 'not installed'} on {nodes.name(node)} and {common or 'not installed'} on other nodes"
            fix = nodes.words.libraries
            yield replace(error("libraries", node, message, fix), final=True) if name in _SAME else warning("libraries", node, message, fix)


def environment(nodes: NodeAnswers) -> Iterator[Finding]:
    names = sorted({name for looked in nodes.looked.values() for name in looked.environment} - set(nodes.expected.own_variables))
    for name in names:
        values = {n: looked.environment.get(name, "") for n, looked in nodes.looked.items() if "environment" not in looked.unfinished}
        for node, value, common in odd(values):
            message = f"{name} is {_quoted(value)} on {nodes.name(node)} and {_quoted(common)} on other nodes"
            yield warning("environment", node, message, "set it in the job or in the cluster, for all nodes")


def _quoted(value: str) -> str:
    return repr(value[:100]) if value else "not set"


_UNFINISHED = {
    "paths": ("paths", "the volume does not answer: is its server there?"),
    "volume": ("writable", "the volume does not answer: is its server there?"),
}


@dataclass(frozen=True)
class _Check:
    name: str
    cause: Cause
    judge: Callable[[NodeAnswers], Iterator[Finding]]
    applies: Callable[[Run], bool] = lambda run: True


def judge_all(run: Run, looked: Sequence[LookedAt], met: Mapping[int, Met]) -> list[Finding]:
    """Everything that is wrong, but for the all-reduce."""
    nodes = NodeAnswers(run, {node: facts for node, facts, *_ in looked}, met, skews(looked))
    findings = [finding for check in _CHECKS if check.applies(run) for finding in check.judge(nodes)]
    return [*findings, *_unfinished(nodes)]


def checks_of(run: Run) -> list[str]:
    """Names of the checks that are made of this job's nodes, but for the all-reduce."""
    return [check.name for check in _CHECKS if check.applies(run)]


def cause_of(finding: Finding) -> Cause:
    causes = {check.name: check.cause for check in _CHECKS} | _OTHER_CAUSES
    return causes[finding.check]


def skews(looked: Sequence[LookedAt]) -> dict[int, float]:
    """Seconds by which each node's clock is ahead of node 0's, by what both ends saw of one question and its answer (as NTP does)."""
    ahead = {
        node: ((facts.received_ms / 1000 - asked) + (facts.sent_ms / 1000 - at)) / 2 for node, facts, asked, at in looked if facts.sent_ms
    }
    return {node: value - ahead[0] for node, value in ahead.items()} if 0 in ahead else {}


def silent(run: Run, answered: Iterable[int], seconds: float, failed: Mapping[int, str]) -> list[Finding]:
    """Findings about nodes without an answer. `failed`: what kept nodes that say so from making processes or threads for it."""
    words, heard = words_of(run), {*answered, *failed}
    late = [node for node in range(run.nodes) if node not in heard]
    unheard = [error("answer", node, f"{run.node_name(node)} did not answer in {seconds:.0f} s", words.hung) for node in late]
    unable = ((node, f"{run.node_name(node)} can't make its checks: {why}") for node, why in failed.items())
    return [*unheard, *(error("answer", node, text, words.more_processes) for node, text in unable)]


def _unfinished(nodes: NodeAnswers) -> Iterator[Finding]:
    for node, looked in nodes.looked.items():
        for part in looked.unfinished:
            check, fix = {**_UNFINISHED, "unresolved": ("names", nodes.words.dns)}.get(part, ("answer", "look at its agent's log"))
            finding = warning if part == PROGRAM else error  # (ranks can start without it)
            yield finding(check, node, f"{nodes.name(node)} could not finish the check of {check} in time", fix)


def runs_trainer(run: Run) -> bool:
    """Return True if ranks run Lockstep's trainer."""
    return run.command[1:3] == ("-m", "lockstep_train")


def _has_gpus(run: Run) -> bool:
    return run.gpus_per_node > 0


def _has_rdma(run: Run) -> bool:
    return expected_of(run).rdma is not None


def _has_peers(run: Run) -> bool:
    return run.nodes > 1


_OTHER_CAUSES = {
    PROGRAM: Cause.SETUP,
    "answer": Cause.NODE_LOST,
    "allReduce": Cause.FABRIC,
    "selfTest": Cause.HARDWARE,
    "torchBuild": Cause.SETUP,
}
_CHECKS = (
    _Check("names", Cause.SETUP, names),
    _Check("peers", Cause.FABRIC, peers, _has_peers),
    _Check("paths", Cause.CONFIGURATION, paths),
    _Check("writable", Cause.STORAGE, writable),
    _Check("shared", Cause.STORAGE, shared, lambda run: run.nodes > 1 and run.storage is not None),
    _Check("space", Cause.STORAGE, space),
    _Check("sharedMemory", Cause.SETUP, shared_memory, lambda run: expected_of(run).shm_bytes is not None),
    _Check("gpus", Cause.SETUP, gpus, _has_gpus),
    _Check("driver", Cause.SETUP, drivers, _has_gpus),
    _Check("python", Cause.SETUP, python, _has_peers),
    _Check("trainer", Cause.SETUP, trainer, runs_trainer),
    _Check("libraries", Cause.SETUP, libraries, _has_peers),
    _Check("environment", Cause.SETUP, environment, _has_peers),
    _Check("clock", Cause.SETUP, clocks, _has_peers),
    _Check("lockedMemory", Cause.SETUP, nics.locked_memory, _has_rdma),
    _Check("hcas", Cause.FABRIC, nics.hcas, _has_rdma),
    _Check("rates", Cause.FABRIC, nics.rates, _has_rdma),
    _Check("gids", Cause.FABRIC, nics.gids, _has_rdma),
    _Check("mtu", Cause.FABRIC, nics.mtus, _has_rdma),
    _Check("unusedRdma", Cause.FABRIC, nics.unused_rdma, lambda run: _has_gpus(run) and _has_peers(run) and not _has_rdma(run)),
    _Check("netPlugin", Cause.SETUP, nics.net_plugins, _has_rdma),
)
