"""Question to the Python of this node's ranks: does it have the trainer, and of which version?

It is asked as the agent starts, so that an image without the trainer ends the job before other nodes, and their GPUs, are waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lockstep_gang.agent.preflight.programs import Programs, json_objects
from lockstep_gang.agent.ranks.environment import inherited
from lockstep_gang.contract.run import Run
from lockstep_gang.lifecycle.preflight.checks import runs_trainer

QUESTION = """import json
try:
    import lockstep_spec, lockstep_train
except ImportError as error:
    print(json.dumps({"lacks": str(error)}))
else:
    print(json.dumps({"version": getattr(lockstep_spec, "VERSION", "")}))
"""
REASON_CHARACTERS = 300


class NodeTrainer:
    """The question of one node. `unable` is called if ranks would end in an ImportError; a Python that can't be asked says nothing."""

    def __init__(self, run: Run, unable: Callable[[str], None]) -> None:
        self._run, self._unable = run, unable
        self._programs = Programs([*run.command[:1], "-c", QUESTION], run.working_directory)
        self._asking: asyncio.Future[str | None] | None = None

    def begin(self) -> None:
        """Ask, unless ranks run something else, or nodes are not looked at."""
        if self._run.preflight is not None and runs_trainer(self._run):
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> str | None:
        text = bytearray()
        await self._programs.run(text, {**inherited(), **self._run.environment})
        answer = json_objects(bytes(text))[-1]
        if "lacks" in answer:
            self._unable(str(answer["lacks"])[:REASON_CHARACTERS])
        return answer.get("version")

    async def version(self, seconds: float) -> str | None:
        """Return the trainer's version, '' of one that states none; None: it isn't asked for, or there is no answer in time."""
        if self._asking is None:
            return None
        done, _ = await asyncio.wait([self._asking], timeout=seconds)
        return self._asking.result() if done else None

    def end(self) -> None:
        self._programs.kill()
