"""Last words of a node that reaches nobody: what its container says when it ends, which the kubelet keeps with the pod.

So before anything runs there, it ends once with a sentence, is started again by the kubelet, and goes on trying. A sentence of each kind is
left once a pod: the kubelet waits longer before every further start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from lockstep_gang.contract.report import Trouble
from lockstep_spec.words import printable_line

LAST_WORDS = Path("/dev/termination-log")
"""File in which the kubelet reads them; only pods have it."""
LEFT = Path("/tmp")  # noqa: S108 (the pod's own volume, which outlives its containers)
PATIENCE_SECONDS = 6.0
LOOK_SECONDS = 0.5
CHARACTERS = 1000


class CutOff:
    """Watch for trouble that lasts."""

    def __init__(self, trouble: Callable[[], Trouble | None], last_words: Path = LAST_WORDS, left: Path = LEFT) -> None:
        """`trouble`: what keeps this node from being heard while nothing runs on it; None: nothing, or there is work that must not end for it."""
        self._trouble, self._last_words, self._left = trouble, last_words, left

    async def wait(self, patience_seconds: float = PATIENCE_SECONDS) -> Trouble:
        """Return once the last words are left, after which the agent ends. Outside of a pod it never returns."""
        since, kind = time.monotonic(), ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            trouble = self._trouble()
            if trouble is None or trouble.kind.value != kind:
                since, kind = time.monotonic(), trouble.kind.value if trouble is not None else ""
            if trouble is not None and time.monotonic() - since >= patience_seconds and self._leave(trouble):
                return trouble

    def _leave(self, trouble: Trouble) -> bool:
        """Write the last words. False: they were written before, or nobody would read them."""
        mark = self._left / f"lockstep-said-{trouble.kind.value}"
        try:
            if not self._last_words.exists() or mark.exists():
                return False
            mark.touch()
            self._last_words.write_text(printable_line(f"{trouble.kind.value}: {trouble.text}")[:CHARACTERS], encoding="utf-8")
        except OSError:
            return False
        return True
