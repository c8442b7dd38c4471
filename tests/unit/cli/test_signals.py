"""The signals that end a verb."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from lockstep.cli.shared import signals
from unit.virtual_time import VirtualClock

ENDS = """
import os, signal, sys
from lockstep.cli.shared.signals import ending_like_ctrl_c
try:
    with ending_like_ctrl_c() as received:
        os.kill(os.getpid(), signal.{name})
        signal.pause()
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    sys.exit(128 + received[0])
"""

HOW_SIGINT_IS = {
    "as usual": "",
    "ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN)",  # as in the background of a script: asyncio.run has no handler to borrow
}
IN_A_STEP = """
import asyncio, os, signal, sys
from lockstep.cli.shared.signals import ending_like_ctrl_c
{before}

async def main():
    loop = asyncio.get_running_loop()
    asked, answered = loop.create_future(), asyncio.Event()

    def answer():
        if not asked.done():
            os.kill(os.getpid(), signal.SIGTERM)
            asked.set_result(None)
            answered.set()

    loop.call_soon(answer)
    try:
        await asked
        await asyncio.sleep(60)
    finally:
        await answered.wait()
        print("cleaned")

try:
    with ending_like_ctrl_c() as received:
        asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(128 + received[0])
"""
ENDLESS_CLEANING = """
import asyncio, os, signal, sys, threading
from lockstep.cli.shared import signals
{before}

async def main():
    signals_come = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)) for seconds in (0.0, 0.2, 3.0)]
    for one in signals_come:
        one.start()
    try:
        await asyncio.sleep(60)
    finally:
        print("cleans", flush=True)
        try:
            await asyncio.sleep(0.5)
            print("still", flush=True)
        finally:
            await asyncio.sleep(60)

try:
    with signals.ending_like_ctrl_c() as received:
        asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(128 + received[0])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_change_the_exit_code_of_a_verb_that_has_cleaned_up(number: signal.Signals) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS.format(name=number.name)], timeout=60, check=False)
    assert done.returncode == 128 + number


@pytest.mark.parametrize("before", HOW_SIGINT_IS.values(), ids=HOW_SIGINT_IS)
def test_a_signal_interrupts_no_step_of_the_event_loop(before: str) -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_STEP.format(before=before)], timeout=20, check=False, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, b"cleaned\n", b"")


@pytest.mark.parametrize("before", HOW_SIGINT_IS.values(), ids=HOW_SIGINT_IS)
def test_a_later_signal_ends_cleaning_that_takes_too_long_and_one_together_with_the_first_does_not(before: str) -> None:
    command = [sys.executable, "-c", ENDLESS_CLEANING.format(before=before)]
    done = subprocess.run(command, timeout=20, check=False, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, b"cleans\nstill\n")


def test_signals_within_a_second_of_the_first_are_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, before = VirtualClock(), {number: signal.getsignal(number) for number in signals.NUMBERS}
    monkeypatch.setattr(signals, "time", clock)
    try:
        with signals.ending_like_ctrl_c() as received:
            end: Any = signal.getsignal(signal.SIGTERM)
            for seconds, interrupts in ((0.0, True), (0.9, False), (0.2, True)):
                clock.sleep(seconds)
                with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
                    end(signal.SIGTERM, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == [signal.SIGTERM]
