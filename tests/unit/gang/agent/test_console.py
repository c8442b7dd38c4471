"""The agent's output: colors for a terminal, and for nothing else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lockstep_gang.agent.log import Console

PLAIN, COLORED = "[rank 0] wandb: offline", "[rank 0] \x1b[1;34mwandb\x1b[0m: offline\x1b[0m"


class Kept:
    """A journal in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.write = self.lines.append

    def close(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(("no_color", "has_colors"), [("", True), ("1", False)])
def test_colors_reach_a_terminal_and_neither_the_journal_nor_the_report(
    no_color: str, has_colors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    reader, terminal = os.openpty()
    console, journal = Console(terminal), Kept()
    assert console.has_colors is has_colors
    kept: Any = journal
    console.journal = kept
    console.write(PLAIN, COLORED)
    console.close(5)
    assert os.read(reader, 1000).decode() == f"{COLORED if has_colors else PLAIN}\r\n"
    assert [*journal.lines, *console.tail()] == [PLAIN] * 2
    os.close(reader)
    os.close(terminal)


def test_a_pipe_gets_no_colors() -> None:
    reader, writer = os.pipe()
    console = Console(writer)
    console.close(5)
    os.close(reader)
    os.close(writer)
    assert not console.has_colors
