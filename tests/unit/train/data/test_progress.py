"""Preparing the data may take hours as long as it moves: who builds says so, and all ranks begin their load anew."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep_spec.training import DataConfig
from lockstep_train.base import volumes
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RunConfig
from lockstep_train.base.volumes import BuildProgress
from lockstep_train.data import dataset
from lockstep_train.data.tokens import source
from lockstep_train.data.tokens.source import Pace
from unit.train.data.data_cases import BYTES, write_jsonl
from unit.train.model.test_settings import training


@dataclass
class Places:
    """Calls that a watch gets, in order."""

    begun: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def begin(self, activity: str, limit_seconds: float) -> None:
        self.begun.append(activity)

    def at(self, place: str) -> None:
        self.places.append(place)

    def loaded(self) -> None: ...


def three_nodes() -> list[Any]:
    first = Ranks(0, 3, 0, 1, 0, 3, torch.device("cpu"), dist.HashStore())  # type: ignore[attr-defined]
    return [first, replace(first, rank=1, node=1), replace(first, rank=2, node=2)]


def test_every_rank_begins_as_many_parts_as_the_builder_that_said_most() -> None:
    watches = [Places(), Places(), Places()]
    one, other, waiting = (BuildProgress(ranks, watch, print) for ranks, watch in zip(three_nodes(), watches, strict=True))
    for line in ("a", "b", "c"):
        other.report(line)
    one.report("x")
    waiting.follow([0, 1])
    assert watches[2].begun == ["Load, part 2", "Load, part 3", "Load, part 4"]
    assert watches[0].begun == ["Load, part 2"], "one that still builds is behind, and would be named"
    other.report("d")
    for progress in (one, other, waiting):
        progress.follow([0, 1])
    assert watches[0].begun == watches[1].begun == watches[2].begun == [f"Load, part {number}" for number in (2, 3, 4, 5)]
    assert watches[2].places[-1] == "d"


def test_whoever_waits_for_the_data_begins_anew_while_its_builder_comes_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "PATIENCE", timedelta(milliseconds=20))
    monkeypatch.setattr(source, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(source, "BATCH", 10)
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": f"sample {number}"} for number in range(50)])
    config = RunConfig("x", None, tmp_path / "run", replace(training(), data=DataConfig(max_length=64, path=str(path))))
    moved, watches, lines = threading.Event(), [Places(), Places(), Places()], []

    class Follower(Places):
        def begin(self, activity: str, limit_seconds: float) -> None:
            super().begin(activity, limit_seconds)
            moved.set()

    watches[1] = Follower()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            assert moved.wait(60), "the waiting rank has seen nothing of the first line"

    def load(number: int) -> None:
        dataset.load_dataset(config, BYTES, everyone[number], say, watches[number])

    everyone = three_nodes()
    threads = [threading.Thread(target=load, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [line.split(",")[0] for line in lines] == [f"Tokenized {count} samples of {path}" for count in (10, 20, 30, 40, 50)]
    assert watches[0].begun == watches[1].begun == watches[2].begun == [f"Load, part {number}" for number in range(2, 7)]


def test_how_fast_samples_come_is_told_every_half_minute() -> None:
    now, lines = [0.0], list[str]()
    pace = Pace("x.jsonl", lines.append, lambda: now[0])
    for at, samples in ((10.0, 20_000), (30.0, 60_000), (45.0, 80_000), (62.0, 120_000)):
        now[0] = at
        pace.at(samples)
    assert lines == ["Tokenized 60,000 samples of x.jsonl, 2,000/s", "Tokenized 120,000 samples of x.jsonl, 1,875/s"]
