"""Programs of other people, from PyPI's wheels, run as they are: the losses that torchrun has, and a stop, a fault and a hang as with a
script of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from programs.inputs import PROGRAMS
from programs.places import OnThisMachine, Place
from support.launched import Typed

Losses = Callable[[str], list[float]]
END_SECONDS = 900.0
"""Limit for three attempts that import large libraries, on busy cores."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def stop_at(place: Place, name: str, text: str) -> Typed:
    """Start the program, and stop it when it prints this."""
    follows = place.start(name, PROGRAMS[name])
    follows.sees(text)
    place.type("stop", name)
    assert place.stopped(name), follows.output
    return follows


def go_on(place: Place, name: str, follows: Typed) -> list[float]:
    """Let the stopped program go on to its end, and return the losses since then."""
    follows = place.go_on(name, follows)
    assert follows.ends(END_SECONDS) == 0, follows.output
    return losses(place, name, 2)


def losses(place: Place, name: str, attempt: int) -> list[float]:
    return PROGRAMS[name].losses(place.log(name, attempt))


def test_trl_s_sft_script_stops_and_starts_again_since_it_looks_for_no_checkpoint(place: Place, expected: Losses) -> None:
    follows = stop_at(place, "sft", "'loss': ")
    before = losses(place, "sft", 1)
    assert 0 < len(before) < len(expected("sft"))
    assert before == expected("sft")[: len(before)]
    assert go_on(place, "sft", follows) == expected("sft")


def test_open_clip_goes_on_from_its_last_epoch(place: Place, expected: Losses) -> None:
    follows = stop_at(place, "open-clip", "Start epoch 2")
    before = losses(place, "open-clip", 1)
    assert 16 <= len(before) < len(expected("open-clip"))
    assert before == expected("open-clip")[: len(before)]
    saved = len(expected("open-clip")) - len(go_on(place, "open-clip", follows))  # (it shuffles anew after a resume, so losses are others)
    assert saved % 8 == 0 and len(before) - 8 <= saved <= len(before), "it goes on with the epoch that was cut off"


def test_lightning_s_trainer_that_exits_with_0_on_sigterm_is_stopped_and_goes_on(place: Place, expected: Losses) -> None:
    follows = stop_at(place, "lightning", "step 9 loss")
    before = losses(place, "lightning", 1)
    assert len(before) < len(expected("lightning"))
    assert before == expected("lightning")[: len(before)]
    place.share("lightning", "checkpoints")
    after = go_on(place, "lightning", follows)
    assert 0 < len(after) < len(expected("lightning"))
    assert after == expected("lightning")[-len(after) :]


def test_a_loop_of_accelerate_fails_then_hangs_and_then_ends(place: Place, expected: Losses) -> None:
    follows = place.start("accelerate", PROGRAMS["accelerate"])
    assert follows.ends(END_SECONDS) == 0, follows.output
    assert "rank 1 on node 1 exited with 1: KeyError: 'label'" in follows.output
    assert "rank 1 on node 1 hangs" in follows.output and "it is in wait_for_row (batches.py:" in follows.output
    for attempt in (1, 2):
        before = losses(place, "accelerate", attempt)
        assert before == expected("accelerate")[: len(before)] and 0 < len(before) < 8
    assert losses(place, "accelerate", 3) == expected("accelerate")


@pytest.mark.parametrize("place", [OnThisMachine], indirect=True)
def test_open_clip_fails_on_two_cpus_as_under_torchrun(place: Place) -> None:
    """Its DDP names a CPU in device_ids, which torch refuses; no launcher can help."""
    follows = place.start("two", replace(PROGRAMS["open-clip"], nodes=2))
    assert follows.ends(END_SECONDS) == 1
    assert "ValueError: DistributedDataParallel device_ids and output_device arguments only work with" in follows.output
