"""workspace/train_multi_node.py, which people copy: it learns, stops when asked, and goes on from there."""

from __future__ import annotations

import re
from pathlib import Path

from rank_harness import ForkServer


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"Step (\d+)/\d+ \| Loss: ([\d.]+)", output)}


def test_the_sample_script_saves_when_one_rank_is_told_to_stop_and_goes_on_from_there(ranks: ForkServer, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "c" / "weights.safetensors")
    stopped = ranks.run("sample_script", [None, None], arguments={"checkpoint": checkpoint, "epochs": 4, "stop_at": 5}, codes=75)
    assert f"CHECKPOINT step 5 | {checkpoint}" in stopped.outputs[0]
    (beside := tmp_path / "any").touch()
    assert Path(checkpoint).stat().st_mode == beside.stat().st_mode, "pods of another run may have another user"
    ended = ranks.run("sample_script", [None, None], arguments={"checkpoint": checkpoint, "epochs": 4})
    assert "2 ranks over gloo, 16 steps, from step 5" in ended.outputs[0]
    again = ranks.run("sample_script", [None, None], arguments={"checkpoint": checkpoint, "epochs": 4})
    assert f"Nothing is left to do: {checkpoint} is of step 16 of 16; --fresh trains anew, more --epochs train on" in again.outputs[0]
    anew = ranks.run("sample_script", [None, None], arguments={"checkpoint": checkpoint, "epochs": 4, "fresh": True})
    assert sorted(losses(anew.outputs[0])) == list(range(1, 17))
    before, after = losses(stopped.outputs[0]), losses(ended.outputs[0])
    assert sorted(before) == [1, 2, 3, 4, 5] and max(after) == 16
    assert after[16] < 0.75 * before[1]
    assert losses(stopped.outputs[1]) == {}, "only rank 0 tells"
