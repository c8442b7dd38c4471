"""Terminals on hosts: a real bash in one, as `lockstep shell` has it."""

from __future__ import annotations

import asyncio
import re

from lockstep.platforms.jobs.terminal import shell_command
from lockstep.programs import Program
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_ssh import Ways

SECONDS = 30.0


class Screen:
    """Everything that a terminal has shown."""

    def __init__(self, program: Program) -> None:
        self.program, self.shown = program, b""

    async def until(self, pattern: bytes) -> re.Match[bytes]:
        try:
            async with asyncio.timeout(SECONDS):
                while not (match := re.search(pattern, self.shown)):
                    data = await self.program.read()
                    assert data, self.shown
                    self.shown += data
        except TimeoutError:
            raise AssertionError(f"{pattern!r} is not shown: {self.shown!r}") from None
        return match


async def test_a_shell_has_a_terminal_with_a_size_that_follows_the_window(ways: Ways) -> None:
    async with ways.place().program(shell_command("xterm-256color"), tty=True) as program:
        screen = Screen(program)
        await program.resize(91, 33)
        await program.write(b"echo $TERM on $(tty) of $(hostname), $((6*7))\n")
        assert b"xterm-256color on /dev/pts/" in (await screen.until(rb"\S+ on /dev/pts/\d+ of bed0, 42"))[0]
        await program.write(b"stty size\n")
        await screen.until(rb"33 91\r")
        await program.resize(120, 40)
        await program.write(b"stty size; umask\n")
        await screen.until(rb"40 120\r\n0002\r")
        await program.write(b"exit 7\n")
        async for _ in program.output():
            pass
        assert program.code == 7


async def test_ctrl_c_ends_what_runs_and_not_the_shell(bed: BedHosts, ways: Ways) -> None:
    async with ways.place().program(shell_command(None), tty=True) as program:
        screen = Screen(program)
        await program.write(b"sleep 5432\n")
        assert await asyncio.to_thread(eventually, lambda: "sleep 5432" in bed.console(0, "ps", "-eo", "args"))
        await program.write(b"\x03")
        await program.write(b"echo still $((40+2))\n")
        await screen.until(b"still 42")
        assert "sleep 5432" not in bed.console(0, "ps", "-eo", "args")


async def test_the_end_of_what_is_typed_ends_the_shell(ways: Ways) -> None:
    async with ways.place().program(shell_command(None), tty=True) as program:
        await program.write(b"echo up$((6*7))\n")
        await Screen(program).until(rb"up42\r\n(.|\n)*\$ $")  # (what is typed before the shell reads by itself is lost)
        await program.close_stdin()
        async for _ in program.output():
            pass
        assert program.code == 0


async def test_a_terminal_that_is_left_takes_its_programs_with_it(bed: BedHosts, ways: Ways) -> None:
    async with ways.place().program(shell_command(None), tty=True) as program:
        await program.write(b"sleep 5433\n")
        assert await asyncio.to_thread(eventually, lambda: "sleep 5433" in bed.console(0, "ps", "-eo", "args"))
    assert eventually(lambda: "sleep 5433" not in bed.console(0, "ps", "-eo", "args"))


async def test_much_that_is_pasted_arrives_whole(ways: Ways) -> None:
    async with ways.place().program(["sh", "-c", "stty -echo; echo up; wc -c"], tty=True) as program:
        screen = Screen(program)
        await screen.until(b"up")
        await program.write(b"".join(b"%0998d\n" % number for number in range(500)))
        await program.close_stdin()
        assert (await screen.until(rb"(\d+)\r"))[1] == b"499500"
