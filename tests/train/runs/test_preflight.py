"""The self-test and the short all-reduce of a preflight, with real torch processes that the agents start."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep_gang.contract.preflight import PREFLIGHT_RESULT, AllReduce, Expected, PreflightReport, SelfTest
from lockstep_gang.contract.run import run_text
from lockstep_spec.codec import from_json
from unit.gang.cases import Gang, gang

SLOW = """
import importlib, time
imported = importlib.import_module
def slowed(name, package=None):
    module = imported(name, package)
    if name == "torch.distributed":
        all_reduce = module.all_reduce
        module.all_reduce = lambda *given, **named: (time.sleep(0.5), all_reduce(*given, **named))[1]
    return module
importlib.import_module = slowed
"""
"""sitecustomize of a node whose every all-reduce takes half a second longer."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path, python_options=()) as made:
        yield made


def result(agents: Gang) -> PreflightReport:
    line = next(line for line in agents.log().splitlines() if PREFLIGHT_RESULT in line)
    return from_json(PreflightReport, json.loads(line.partition(PREFLIGHT_RESULT)[2]), "result")


WRONG = """
import importlib
imported = importlib.import_module
def broken(name, package=None):
    module = imported(name, package)
    if name == "torch":
        product = module.Tensor.__matmul__
        def off_by_one(left, right):
            result = product(left, right)
            if left.dtype == module.bfloat16:
                result[7, 9] += 1
            return result
        module.Tensor.__matmul__ = off_by_one
    return module
importlib.import_module = broken
"""
"""sitecustomize of a node that computes one number of a product wrong."""


def test_a_node_that_computes_wrong_by_one_is_named_before_any_rank_runs(agents: Gang) -> None:
    run = agents.write("print('a rank runs')", nodes=2, preflight=Expected(self_test=SelfTest("BF16"), only=True))
    (agents.folder / "broken").mkdir()
    (agents.folder / "broken/sitecustomize.py").write_text(WRONG)
    there = replace(run, environment={**run.environment, "PYTHONPATH": str(agents.folder / "broken")})
    (agents.folder / "broken.json").write_text(run_text(there))
    agents.start(0)
    agents.start(1, run_path=agents.folder / "broken.json")
    assert agents.codes(120) == [1, 1]
    (finding,) = [finding for finding in result(agents).findings if finding.check == "selfTest"]
    assert (finding.node, finding.excludes) == (1, True)
    assert "the CPU of node 1 computes wrong: 2 of 131072 numbers of a product in BF16" in finding.message


# As Lockstep's trainer does: it says whether it has waited for its order, and reports its end.
TRAINER = """
import json, os, socket, sys
waited = "LOCKSTEP_STANDBY" in os.environ
if waited:
    for name, value in json.loads(sys.stdin.readline())["environment"].items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
rank = int(os.environ["RANK"])
print("here", rank, os.environ["LOCKSTEP_ATTEMPT"], os.environ["TORCHELASTIC_RESTART_COUNT"], waited, flush=True)
reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
reports.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
reports.send(json.dumps({"event": "end", "rank": rank}).encode())
"""


def test_the_trainer_s_ranks_import_beside_the_self_test_and_start_where_nodes_compute_right(agents: Gang) -> None:
    agents.write(TRAINER, nodes=2, ranks_per_node=2, node_ranks=(2, 1), training={}, preflight=Expected(self_test=SelfTest("FP32")))
    agents.run(codes=[0, 0], seconds=120)
    lines = [line.partition("] here ")[2] for node in range(2) for line in agents.log(node).splitlines() if "] here " in line]
    assert sorted(lines) == ["0 1 0 True", "1 1 0 True", "2 1 0 True"]
    assert agents.log().index("; 2 CPUs compute right, ") < agents.log().index("[rank 0] here 0")


def test_no_rank_is_left_that_has_waited_beside_a_self_test_that_failed(agents: Gang) -> None:
    (agents.folder / "torch.py").write_text("raise ImportError('broken')")
    path = {"PYTHONPATH": str(agents.folder)}
    run = agents.write(TRAINER, nodes=1, training={}, preflight=Expected(self_test=SelfTest("FP32")))
    agents.run_path.write_text(run_text(replace(run, environment={**run.environment, **path})))
    agents.start(0)
    agents.until("the self-test of node 0 can't use its CPU: ImportError: broken")
    assert agents.processes[0].poll() is None
    agents.processes[0].terminate()
    agents.codes(60)
    assert "] here " not in agents.log()
    end = time.monotonic() + 30
    while [pid for pid in Path("/proc").glob("[0-9]*") if str(agents.folder).encode() in _environment(pid)]:
        assert time.monotonic() < end
        time.sleep(0.05)  # the kernel kills them as the agent ends


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_a_fast_all_reduce_passes_and_gives_its_figure(agents: Gang) -> None:
    agents.write("", nodes=2, preflight=Expected(all_reduce=AllReduce(10**6), only=True))
    agents.run(codes=[0, 0], seconds=120)
    measured = result(agents).all_reduce
    assert (measured.ranks, measured.bytes) == (2, 8 * 1024**2)
    assert measured.bytes_per_second > 10**6
    assert "all-reduce of 8 MiB over 2 ranks" in agents.log()


SMALL_TORCH = """
class Tensor:
    is_cuda, device = False, None
    def __init__(self, value, size=1): self.value, self.size = value, size
    def item(self): return self.value
    def numel(self): return self.size
def ones(size, device): return Tensor(1, size)
def tensor(values, device): return Tensor(values[0])
def device(name): return None
"""
SMALL_DISTRIBUTED = """
import json, socket
from torch import Tensor
class ReduceOp: MAX = max
def TCPStore(address, port, world_size, is_master, timeout, master_listen_fd):
    if is_master:
        listening = socket.socket(fileno=master_listen_fd)
        listening.listen()
        peers = [listening.accept()[0] for _ in range(world_size - 1)]
    else:
        peers = []
        while not peers:
            try: peers.append(socket.create_connection((address, port)))
            except ConnectionRefusedError: pass
    return [peer.makefile("rw") for peer in peers]
def init_process_group(backend, store, rank, world_size, timeout): group.update(peers=store, is_first=rank == 0)
def say(peer, value): peer.write(json.dumps(value) + "\\n"); peer.flush()
def hear(peer):
    line = peer.readline()
    if not line: raise ConnectionResetError("Connection reset by peer")
    return json.loads(line)
def all_reduce(tensor, op=max):
    peers = group["peers"]
    if group["is_first"]:
        tensor.value = max(tensor.value, *map(hear, peers))
        for peer in peers: say(peer, tensor.value)
    else:
        say(peers[0], tensor.value)
        tensor.value = hear(peers[0])
def barrier(): all_reduce(Tensor(0))
def destroy_process_group(): pass
group = {}
"""
"""The part of torch that an all-reduce of the CPU takes, without the seconds that each of nine imports takes: who is named is the subject
here.
"""


def start_with_small_torch(agents: Gang, nodes: int, least: int, first: str) -> None:
    """Start nodes that expect so many bytes a second; `first`: sitecustomize of node 1."""
    run = agents.write("", nodes=nodes, preflight=Expected(all_reduce=AllReduce(least), only=True))
    for name, text in (("small/torch/__init__", SMALL_TORCH), ("small/torch/distributed", SMALL_DISTRIBUTED), ("odd/sitecustomize", first)):
        path = agents.folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for node in range(nodes):
        path = agents.folder / f"run-{node}.json"
        python_path = ":".join(str(agents.folder / folder) for folder in (["odd"] if node == 1 else []) + ["small"])
        path.write_text(run_text(replace(run, environment={**run.environment, "PYTHONPATH": python_path})))
        agents.start(node, run_path=path)


def test_the_one_slow_node_of_three_is_named(agents: Gang) -> None:
    start_with_small_torch(agents, 3, 25 * 10**6, SLOW)
    assert agents.codes(240) == [1, 1, 1]
    errors = [finding for finding in result(agents).findings if finding.check == "allReduce"]
    assert [(finding.node, finding.excludes) for finding in errors] == [(1, True)]


def test_a_collective_that_fails_is_told_with_where(agents: Gang) -> None:
    start_with_small_torch(agents, 2, 10**6, SLOW.replace("time.sleep(0.5)", "1 / 0"))
    assert agents.codes(120) == [1, 1]
    (finding,) = [finding for finding in result(agents).findings if finding.check == "allReduce"]
    assert "on node 1: ZeroDivisionError: division by zero" in finding.message
