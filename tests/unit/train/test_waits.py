"""A rank that waits for another one, for a volume or for its own work goes on, or ends, after the time that is promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lockstep_spec.choices import Method, StorageMode
from lockstep_train import loop
from lockstep_train.base import volumes
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.ranks import Ranks
from lockstep_train.watch import watchdog
from lockstep_train.watch.watchdog import END_KEY, RankPlace, Watchdog
from unit.virtual_time import VirtualClock


class Left(BaseException):
    """In place of the process's end."""


class Scene:
    """A rank's watchdog on a clock of its own, and what its agent gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int = 1, ends: float = float("inf"), slowness: int = 1) -> None:
        self.clock, self.beats, self.code, self.problem = VirtualClock(), list[float](), 0, ""
        self.begun = self.clock.now
        monkeypatch.setattr(watchdog, "time", self.clock)
        self.stop = SimpleNamespace(wait=lambda seconds: self.clock.sleep(seconds * slowness), requested=False, stacks_requested=False)
        reporter = SimpleNamespace(agent=SimpleNamespace(send=self._beat, send_error=self._error), event=lambda *_, **__: None)
        self.watch = Watchdog(cast(Any, self.stop), cast(Any, reporter), RankPlace(rank, 1, Path("/nowhere")), self._leave)
        self.watch._closed = cast(Any, SimpleNamespace(is_set=lambda: self.seconds > ends, wait=self.clock.sleep))
        monkeypatch.setattr(self.watch, "_write_stacks", lambda: None)

    @property
    def seconds(self) -> float:
        return self.clock.now - self.begun

    def _beat(self, event: str, **_: Any) -> None:
        self.beats.append(self.seconds)

    def _error(self, error: Exception) -> None:
        self.problem = str(error)

    def _leave(self, code: int) -> None:
        self.code = code
        raise Left

    def run(self, *_: Any, **__: Any) -> None:
        """Watch until the rank has to end."""
        self.watch._run()


def loading(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SimpleNamespace(set=lambda *_: None)
    volumes.BuildProgress(cast(Any, SimpleNamespace(store=store, node=0)), scene.watch, print).report("Tokenized 10 samples")
    scene.run()


def saving(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "vote", lambda *_: False)
    monkeypatch.setattr(loop, "Steps", lambda *_: SimpleNamespace(take=lambda step: SimpleNamespace(stop=False, saving=False)))
    monkeypatch.setattr(loop, "save_at_border", scene.run)
    settings = SimpleNamespace(training=SimpleNamespace(evaluation=None))
    plan, dataset = SimpleNamespace(done=SimpleNamespace(steps=0), total_steps=1), SimpleNamespace(evaluation=())
    run = SimpleNamespace(
        config=settings, plan=plan, dataset=dataset, watch=scene.watch, resumed_from=None, ranks=None, eval_loss_before=None, usage=None
    )
    loop.train(cast(Any, run), cast(Any, scene.stop))


def exporting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_export", scene.run)
    settings = SimpleNamespace(training=SimpleNamespace(method=Method.LORA), run_dir=Path("/nowhere"))
    reporter = SimpleNamespace(activity=lambda _: None)
    loop.export_outcome(cast(Any, SimpleNamespace(reporter=reporter, config=settings, watch=scene.watch)), None)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (loading, "Load, part 2 has not ended within 14400 s"),
        (saving, "Save of step 1 has not ended within 1800 s"),
        (exporting, "Export of the adapter has not ended within 3600 s"),
    ],
)
def test_work_that_does_not_end_is_called_a_hang(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Scene, pytest.MonkeyPatch], None], problem: str
) -> None:
    scene = Scene(monkeypatch, slowness=20)
    with pytest.raises(Left):
        work(scene, monkeypatch)
    assert (scene.code, scene.problem.partition(":")[0]) == (76, problem)


def test_an_agent_hears_of_a_rank_that_has_not_moved_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, ends=20)
    scene.run()
    assert scene.beats == [1, 6, 11, 16]


class Store:
    """A store with one answer to whether a key is there."""

    def __init__(self, mark: str | None = None, here: bool = False) -> None:
        self._here = here
        self._mark = json.dumps({"reason": mark, "rank": 2, "message": "…"})

    def check(self, keys: list[str]) -> bool:
        return self._here and keys == [END_KEY]

    def get(self, key: str) -> str:
        return self._mark

    def set(self, key: str, value: str) -> None: ...
    def compare_set(self, *_: str) -> None: ...


def stopped_early(scene: Scene) -> None:
    scene.stop.requested = True


def stopped_with_others_that_have_not_read_why(scene: Scene) -> None:
    scene.stop.requested = True
    scene.watch._store, scene.watch._ranks = cast(Any, Store()), 2


def another_rank_has_failed(scene: Scene) -> None:
    scene.watch._store = cast(Any, Store("failed", here=True))


def the_store_is_lost(scene: Scene) -> None:
    scene.watch._store = cast(Any, object())


def a_step_is_overdue(scene: Scene) -> None:
    scene.watch.begin("Step 7", 20)


@pytest.mark.parametrize(
    ("rank", "fault", "code", "seconds"),
    [
        (1, stopped_early, 75, 1 + 10),
        (0, stopped_with_others_that_have_not_read_why, 75, 1 + 3),
        (1, another_rank_has_failed, 1, 1 + 10),
        (1, the_store_is_lost, 76, 1 + 10 + 1),
        (1, a_step_is_overdue, 76, 20 + 1 + 3),
    ],
)
def test_a_rank_that_has_to_end_waits_so_long_for_the_others(
    monkeypatch: pytest.MonkeyPatch, rank: int, fault: Callable[[Scene], None], code: int, seconds: float
) -> None:
    scene = Scene(monkeypatch, rank)
    fault(scene)
    with pytest.raises(Left):
        scene.run()
    assert (scene.code, scene.seconds) == (code, pytest.approx(seconds, abs=0.1))


@pytest.mark.parametrize(("storage", "seconds"), [(None, 0.5), (StorageMode.SHARED, 30.0)])
def test_a_volume_that_must_be_shared_is_looked_at_longer_than_one_that_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: StorageMode | None, seconds: float
) -> None:
    clock, store = VirtualClock(), dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(volumes, "time", clock)
    for key, value in (("marks", '".volume-1-other"'), ("lowest", "[1, 1]"), ("refused", "1")):
        store.set(f"storage/{key}/1", value)
    ranks, begun = Ranks(0, 2, 0, 1, 0, 2, torch.device("cpu"), store), clock.now
    if storage is None:
        assert not volumes.nodes_share(ranks, tmp_path, storage)
    else:
        with pytest.raises(ConfigError, match=r"node 1 does not see within 30 s what node 0 wrote"):
            volumes.nodes_share(ranks, tmp_path, storage)
    assert clock.now - begun == pytest.approx(seconds, abs=0.11)
