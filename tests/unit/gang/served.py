"""A real coordinator that listens for its agents, for the tests of their connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep_gang.contract.channel import Channel, connect
from lockstep_gang.contract.run import Run
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.server import Server
from unit.gang.cases import KEY, free_port, make_run

PATIENCE_SECONDS = 60.0
"""Nothing here takes a second, but the machine may have more to do."""


@dataclass(frozen=True)
class Scene:
    """A coordinator that listens, and connections to it that are closed at the end."""

    run: Run
    coordinator: Coordinator
    address: tuple[str, int]
    lines: list[str]
    """Its log."""
    channels: list[Channel] = field(default_factory=list)

    async def connect(self, node: int, key: bytes = KEY, uid: str = "uid-1") -> Channel:
        channel = await connect(self.address, key, uid, node)
        self.channels.append(channel)
        return channel

    async def hears(self, node: int, instance: str = "a") -> None:
        while (found := self.coordinator.gang.nodes[node]).instance != instance or not found.connected:  # noqa: ASYNC110 (no event of it)
            await asyncio.sleep(0)

    async def says(self, text: str) -> None:
        while not any(text in line for line in self.lines):  # noqa: ASYNC110 (the coordinator has no event of it)
            await asyncio.sleep(0)


@asynccontextmanager
async def listening(folder: Path, **changes: Any) -> AsyncIterator[Scene]:
    """A scene of a run in this folder."""
    lines: list[str] = []
    run = make_run(run_dir=str(folder), coordinator_port=free_port(), **changes)
    output = Output(lines.append, tuple, lines.append)
    coordinator = Coordinator(run, KEY, output)
    server = Server(run, KEY, coordinator, output)
    scene = Scene(run, coordinator, await server.start(), lines)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield scene
    finally:
        await server.stop()
        for channel in scene.channels:
            channel.close()
            await channel.wait_closed()
