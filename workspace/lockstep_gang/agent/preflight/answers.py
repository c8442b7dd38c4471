"""Answers of this node to a preflight's questions, each in time, whatever hangs."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lockstep_gang.agent.preflight import facts, files, network
from lockstep_gang.agent.preflight.programs import AllReduceRanks, NodeSelfTest, Programs, json_objects
from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.agent.ranks.memory import process_limit
from lockstep_gang.agent.ranks.script import program_fact
from lockstep_gang.contract.preflight import LOCKSTEP, Check, Checked, ExpectedRdma, Looked, Met, Stage
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.waits import in_thread
from lockstep_gang.lifecycle.preflight.checks import runs_trainer
from lockstep_gang.lifecycle.preflight.nodes import expected_of
from lockstep_gang.lifecycle.preflight.rounds import GROUP_SECONDS, neighbors
from lockstep_spec.choices import StorageMode

T = TypeVar("T")
LOOK_SECONDS = 8.0
"""Limit of a check, after which it is reported as not finished: a volume whose server is gone blocks for ever."""
TIDY_SECONDS = 1.0
TRAINER_QUESTION = """import json
try:
    import lockstep_spec, lockstep_train
except ImportError as error:
    print(json.dumps({"lacks": str(error)}))
else:
    print(json.dumps({"version": getattr(lockstep_spec, "VERSION", "")}))
"""
REASON_CHARACTERS = 300


class NodePreflight:
    """This node's part of a preflight. `take` a check and the answer is sent; `end` when something else is asked for."""

    def __init__(self, run: Run, key: bytes, node: int, send: Callable[[Checked], None]) -> None:
        self._run, self._key, self._node = run, key, node
        self._send = send
        self._expected = expected_of(run)
        self._round = 0
        self._answer: Checked | None = None
        self._task: asyncio.Task[None] | None = None
        self._door: network.ProbePort | None = None
        self._ranks: AllReduceRanks | None = None
        self._self_test = NodeSelfTest(run, node)
        self.trainer: str | None = None
        """Version of the ranks' trainer, where it is known."""

    def begin(self) -> None:
        """Begin what takes seconds and needs no other node."""
        self._self_test.begin()

    def take(self, check: Check) -> None:
        """Answer a check. The same question again means that the answer was lost with a connection."""
        if check.round == self._round:
            if self._answer is not None:
                self._send(self._answer)
            return
        self._stop()
        self._round, self._answer = check.round, None
        self._task = asyncio.ensure_future(self._work(check))

    def end(self) -> None:
        """Close the port, end the processes, remove the marker."""
        self._self_test.end()
        if self._round:
            self._stop()
            self._shut()
            self._round = 0
            tidying = threading.Thread(target=self._tidy, name="preflight tidy", daemon=True)
            tidying.start()
            tidying.join(TIDY_SECONDS)  # a volume may hang, ranks must not wait for it

    def _tidy(self) -> None:
        files.remove_markers(self._run.run_dir, self._node)
        if self._expected.only:  # on a shared volume, whoever is last finds them empty
            files.remove_empty_folders(self._run.run_dir)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._ranks is not None:
            self._ranks.kill()

    def _shut(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    async def _work(self, check: Check) -> None:
        try:
            answer = await self._answered(check)
        except (RuntimeError, BlockingIOError) as error:  # no thread or process can be made: the others would wait for an answer
            limit = process_limit()
            answer = Checked(check.round, failed=f"{type(error).__name__}: {error}"[:REASON_CHARACTERS] + (f" ({limit})" if limit else ""))
        self._answer = answer
        self._send(answer)

    async def _answered(self, check: Check) -> Checked:
        if not check.stage.is_known:
            return Checked(check.round)  # so that the round needn't wait for its deadline
        if check.stage is Stage.LOOK:
            return Checked(check.round, looked=await self._look(check))
        if check.stage is Stage.MEET:
            return Checked(check.round, met=await self._meet(check))
        if check.stage is Stage.SELF_TEST:
            return Checked(check.round, tested=await self._self_test.result(GROUP_SECONDS, anew=check.anew))
        self._shut()  # its port is the rendezvous'
        assert check.group is not None  # noqa: S101 (the coordinator's side of the same stage)
        self._ranks = AllReduceRanks(self._run, self._node, check.group)
        return Checked(check.round, measured=await self._ranks.measure())

    async def _look(self, check: Check) -> Looked:
        received_ms = _now_ms()
        run, expected = self._run, self._expected
        near = [run.addresses[node] for node in sorted({0, *neighbors(self._node, run.nodes)})]
        variables = {**inherited(), **run.environment}
        parts: dict[str, Callable[[], Any]] = {
            "unresolved": lambda: network.unresolved(near),
            "paths": lambda: files.path_facts(expected.paths, run.working_directory),
            "volume": lambda: files.volume_facts(run.run_dir, check.token, self._node),
            "shm_bytes": facts.shm_bytes,
            "gpus": facts.gpu_facts,
            "versions": facts.versions,
            "environment": lambda: facts.compared_variables(variables),
            "rdma": lambda: facts.rdma_facts(expected.rdma or ExpectedRdma()),
        }
        if run.command and not runs_trainer(run):
            parts["program"] = lambda: program_fact(run.command, run.working_directory)
        if variables.get("FI_PROVIDER") == "efa":
            parts["net_plugin"] = lambda: facts.has_net_plugin(variables)
        port = await self._open_door()
        results = await _all_in_time(parts)
        if self.trainer is not None and "versions" in results:
            results["versions"][LOCKSTEP] = self.trainer
        unfinished = tuple(sorted(set(parts) - set(results)))
        return Looked(port=port, unfinished=unfinished, received_ms=received_ms, sent_ms=_now_ms(), **results)

    async def _open_door(self) -> int:
        self._shut()
        self._door = network.ProbePort(self._run, self._key, self._node)
        try:
            return await self._door.open()
        except OSError:
            return 0

    async def _meet(self, check: Check) -> Met:
        reaching = [network.why_unreachable(self._run, self._key, self._node, peer.node, peer.port) for peer in check.peers]
        looking = asyncio.ensure_future(self._sees_marker(check.token))
        reasons = await asyncio.gather(*reaching)
        unreachable = {str(peer.node): why for peer, why in zip(check.peers, reasons) if why}  # noqa: B905 (one reason a peer)
        return Met(unreachable, await looking)

    async def _sees_marker(self, token: str) -> bool | None:
        if self._node == 0 or self._run.storage is None:
            return None
        wait = files.SEEN_SECONDS if self._run.storage is StorageMode.SHARED else 0.0
        path = files.marker(self._run.run_dir, token, 0)
        return (await _all_in_time({"marker": lambda: files.sees(path, token, wait)})).get("marker")


async def ask_trainer(run: Run) -> tuple[str | None, str]:
    """Ask the Python of this node's ranks for Lockstep's trainer: its version ('' if it states none, None if nothing is known), and why it
    can't run.

    It is asked before the node says hello, so that an image without the trainer ends the job before other nodes, and their GPUs, are waited
    for. Only an ImportError stops a start; a Python that can't be asked, or gives no answer in time, says nothing.
    """
    if run.preflight is None or not runs_trainer(run):
        return None, ""
    programs, text = Programs([*run.command[:1], "-c", TRAINER_QUESTION], run.working_directory), bytearray()
    asking = asyncio.ensure_future(programs.run(text, {**inherited(), **run.environment}))
    await asyncio.wait([asking], timeout=LOOK_SECONDS)
    programs.kill()
    answer = json_objects(bytes(text))[-1]
    version = answer.get("version")
    return version if isinstance(version, str) else None, str(answer.get("lacks", ""))[:REASON_CHARACTERS]


async def _all_in_time(parts: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Results of the parts that end in time. Not in the loop's own threads: the agent would wait for them at its end."""
    futures = {name: in_thread(partial(_telling, name, part), f"preflight {name}") for name, part in parts.items()}
    await asyncio.wait(futures.values(), timeout=LOOK_SECONDS)
    return {name: future.result() for name, future in futures.items() if future.done() and future.exception() is None}


def _telling(name: str, part: Callable[[], T]) -> T:
    """Return what `part` returns. Report what it raises at once: the others go on."""
    try:
        return part()
    except Exception as error:
        print(f"[lockstep] preflight: {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
