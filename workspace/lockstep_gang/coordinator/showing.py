"""What whoever asked for a run sees of it: the output of all ranks, and Lockstep's own lines. Nobody waits for a reader."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep_gang.contract.interactive import Show
from lockstep_gang.contract.messages import message_to_json
from lockstep_gang.coordinator.channel import Channel
from lockstep_gang.lifecycle.gang import Request

BACKLOG_BYTES = 8 * 1024 * 1024


class Showing:
    """To the node where somebody asked."""

    def __init__(self, channels: Mapping[int, Channel]) -> None:
        self._channels = channels
        self._left_out = 0

    def show(self, request: Request | None, lines: tuple[str, ...]) -> None:
        """Nothing where nobody asked, or nobody waits for the end."""
        if request is None or (request.asked.detached and request.started):
            self._left_out = 0
            return
        channel = self._channels.get(request.node)
        if channel is None or channel.backlog_bytes > BACKLOG_BYTES:
            self._left_out += len(lines)
            return
        if self._left_out:
            lines = (f"[lockstep] {self._left_out} lines left out: they came too fast to be shown here; node 0's log has them", *lines)
            self._left_out = 0
        channel.send(message_to_json(Show(request.asked.id, lines)))
