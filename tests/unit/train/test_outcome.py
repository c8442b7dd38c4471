"""What a finished run leaves, and what ranks that leave nothing hold meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from lockstep_spec.choices import Precision
from lockstep_train import loop
from lockstep_train.export import untrained_tensors
from lockstep_train.report.jsonl import JsonLog
from lockstep_train.zero import zero_access


@pytest.mark.parametrize("writes", [False, True])
def test_only_the_rank_that_writes_holds_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    gathered: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def gather(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            alive.append(sum(item() is not None for item in gathered))
            value = torch.ones(3)
            gathered.append(weakref.ref(value))
            yield name, value
            del value

    written: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(zero_access, "gather_masters", gather)
    monkeypatch.setattr(loop, "write_adapter", lambda folder, values, adapter, precision, files: written.append(values))
    monkeypatch.setattr(loop, "_make_whole", lambda run, folder: None)
    training = SimpleNamespace(precision=Precision.BF16)
    describe = SimpleNamespace(template=SimpleNamespace(identity=SimpleNamespace(base_files={})))
    run: Any = SimpleNamespace(
        describe=describe,
        engine=None,
        adapter={},
        shared=True,
        config=SimpleNamespace(training=training),
        ranks=SimpleNamespace(first=writes),
    )
    loop._export(run, tmp_path, full=False)
    assert max(alive) <= 1, "the FP32 values of more than one parameter are held"
    assert [(list(values), {value.dtype for value in values.values()}) for values in written] == (
        [(list("abcd"), {torch.bfloat16})] if writes else []
    )


def test_weights_in_another_librarys_files_do_not_get_into_a_trained_model(tmp_path: Path) -> None:
    save_file({"model.norm": torch.ones(2), "model.buffer": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"norm": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert [name for name, _ in untrained_tensors(tmp_path, {"model.norm"})] == ["model.buffer"]


def test_of_records_that_a_full_disk_does_not_take_64_mebibytes_are_kept(tmp_path: Path) -> None:
    log = JsonLog(tmp_path / "steps.jsonl", 0, 1)
    log._file.close()
    log._file = cast(Any, SimpleNamespace(write=full_disk))
    log._unwritten = bytes((64 << 20) - 200)
    for step in range(1, 6):
        log.write({"step": step, "loss": 1.0})
    assert (64 << 20) - 200 < len(log._unwritten) <= 64 << 20


def full_disk(data: bytes) -> int:
    raise OSError("No space left on device")
