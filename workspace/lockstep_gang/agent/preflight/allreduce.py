"""This node's processes of the short all-reduce: started, read, and ended by a deadline."""

from __future__ import annotations

import asyncio

from lockstep_gang.agent.preflight.programs import KILLED_SECONDS, json_objects, of_module, program_environment, why_ended
from lockstep_gang.contract.layout import RankLayout
from lockstep_gang.contract.preflight import Group, Measured
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.network import any_free_port

RANK_MODULE = "lockstep_gang.agent.preflight.allreduce_rank"


class AllReduceRanks:
    """Processes of the all-reduce, one a GPU or a single one. They report in lines of JSON; the last one has the figure."""

    def __init__(self, run: Run, node: int, group: Group) -> None:
        self._run, self._node, self._group = run, node, group
        self._programs = of_module(RANK_MODULE)

    async def measure(self) -> Measured:
        """The figure of this node's first process, or why there is none; at the latest when the group's time is over."""
        layout = self._layout
        ranks = layout.counts[self._group.nodes.index(self._node)]
        written = [bytearray() for _ in range(ranks)]
        running = [asyncio.ensure_future(self._programs.run(text, self.environment(local))) for local, text in enumerate(written)]
        done, _ = await asyncio.wait(running, timeout=self._group.seconds)
        self.kill()
        await asyncio.wait(running, timeout=KILLED_SECONDS)
        texts = [bytes(text) for text in written]
        measured = _first_failure(texts) if len(done) == ranks else _late(texts, self._group.seconds)
        if measured is None:
            figures = json_objects(texts[0])[-1]
            measured = Measured(figures["microseconds"], layout.world_size, figures["bytes"])
        return Measured(
            measured.microseconds, measured.ranks, measured.bytes, measured.error, any_free_port(self._run.addresses[self._node])
        )

    def kill(self) -> None:
        self._programs.kill()

    @property
    def _layout(self) -> RankLayout:
        """Places of the group's processes: its nodes count from 0."""
        return RankLayout(tuple(max(1, self._run.gpus_of(node)) for node in self._group.nodes))

    def environment(self, local_rank: int) -> dict[str, str]:
        """Variables of one of this node's processes."""
        group = self._group
        own = self._layout.ranks_of(group.nodes.index(self._node))
        place = {
            "RANK": own.start + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self._layout.world_size,
            "LOCAL_WORLD_SIZE": len(own),
            "MASTER_ADDR": self._run.addresses[group.nodes[0]],
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "GPUS_PER_NODE": self._run.gpus_of(self._node),
            "LOCKSTEP_NODE": self._node,
            "LOCKSTEP_SECONDS": group.seconds,
            "OMP_NUM_THREADS": 1,
        }
        return program_environment(self._run, place)


def _late(texts: list[bytes], seconds: int) -> Measured:
    late = next((line for text in texts if "microseconds" not in (line := json_objects(text)[-1])), {})
    return Measured(error=f"not done after {seconds} s, in: {late.get('stage', 'start')}")


def _first_failure(texts: list[bytes]) -> Measured | None:
    for text in texts:
        line = json_objects(text)[-1]
        if "microseconds" not in line:
            return Measured(error=why_ended(text, line.get("stage", "start")))
    return None
