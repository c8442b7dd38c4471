"""The tests' own groups of ranks: how they fail, and end."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import ForkServer

from unit.gang.cases import gone


def test_a_variant_that_fails_on_one_rank_leaves_the_others_their_results(ranks: ForkServer, tmp_path: Path) -> None:
    variants = {"first": "ends", "raising": "raises", "second": "ends", "killed": "dies", "third": "ends"}
    outcomes = ranks.run_each("end_as_told", 2, variants, tmp_path / "results.json")
    assert outcomes == {"first": "ends", "second": "ends", "third": "ends"}
    assert outcomes.failures.keys() == {"raising", "killed"}
    with pytest.raises(AssertionError, match="ValueError: raises"):
        outcomes["raising"]


def test_a_rank_that_can_not_begin_has_failed(ranks: ForkServer) -> None:
    ended = ranks.run("end_as_told", [None], IMPOSSIBLE="\0", codes=1)
    assert "ValueError: embedded null byte" in ended.output


def test_ranks_end_with_their_client_however_it_ends(ranks: ForkServer, tmp_path: Path) -> None:
    client = ForkServer(tmp_path, ranks.meeting)
    client.start("end_as_told", [None], arguments={"variants": {}, "output": ""}, WORLD_SIZE="2")  # so it waits for another one
    (pid,) = client._running
    client._client.close()  # as the kernel does for a client that is killed
    assert gone(pid, 180)
