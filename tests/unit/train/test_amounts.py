"""How many steps, samples and passes a measurement takes, how many threads read, and how much of a tensor is in memory at once."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep_spec.choices import Batches
from lockstep_train import assemble
from lockstep_train.base import ranks
from lockstep_train.engine import measure
from lockstep_train.engine.experts import LayerUsage, usage_fields
from lockstep_train.engine.loss import Layer, tiled_loss
from lockstep_train.engine.measure import Pass
from lockstep_train.fetch import fetch, objects
from lockstep_train.fetch.remote import RemoteFile
from lockstep_train.model import base_files, load
from lockstep_train.model.merger import Merger
from lockstep_train.zero import self_test
from unit.train.test_shares import watched

MEBI = 1 << 20


@pytest.mark.parametrize(("steps", "is_judged"), [(50, False), (51, True)])  # of which the first is one before the split
def test_ranks_are_compared_by_fifty_steps(steps: int, is_judged: bool) -> None:
    run = watched([60.0, 120.0], steps)
    assert (run.proposal() is not None) == is_judged


def test_of_three_passes_of_each_size_after_one_that_is_not_timed_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = chain([0.0, 0.0, 9.0, 5.0, 8.0, 4.0, 7.0, 3.0], repeat(1.0))  # by turns of four samples and of one
    monkeypatch.setattr(measure, "time_pass", lambda *_: Pass(next(seconds), 0.0))
    monkeypatch.setattr(measure, "collate", lambda *_: None)
    monkeypatch.setattr(measure, "Waits", lambda _: SimpleNamespace(install=lambda: None))
    monkeypatch.setattr(measure, "zero_access", SimpleNamespace(set_counters=lambda *_: None))
    rank: Any = SimpleNamespace(device=torch.device("cpu"))
    example: Any = SimpleNamespace(ids=range(10))
    assert measure.measure_rank(None, cast(Any, None), example, 0, 4, rank, Batches.TOKENS).time.seconds(4 * 10) == pytest.approx(7.0)


def test_ranks_are_timed_with_the_longest_of_the_first_64_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [SimpleNamespace(ids=range(length)) for length in range(100)]
    timed: list[int] = []
    monkeypatch.setattr(assemble, "global_batch", lambda count, seed, cursor, size, end: list(range(cursor, min(cursor + size, end))))
    monkeypatch.setattr(assemble, "measure_rank", lambda engine, loss, example, *_: timed.append(len(example.ids)))
    monkeypatch.setattr(assemble, "measured_shares", lambda first, micro, balance, measure_size, *_: measure_size(1) or first)
    config = SimpleNamespace(training=SimpleNamespace(seed=1, optimization=SimpleNamespace(balance=None, micro_batch_size=1)))
    plan = SimpleNamespace(cursor=lambda step: 0, done=SimpleNamespace(steps=0), global_batch_size=100, total_samples=100)
    anything: Any = SimpleNamespace(training=examples, pad=0, sizes=SimpleNamespace(batches=None))
    assemble.balanced(cast(Any, config), anything, anything, anything, cast(Any, plan), None, anything, anything, anything)
    assert timed == [63]


class Counting(ThreadPoolExecutor):
    """A pool none of whose tasks begins before all forty are there."""

    threads: int
    begin: threading.Event

    def __init__(self, *how: Any, **more: Any) -> None:
        super().__init__(*how, **more)
        self._left = 40

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Any:
        future = super().submit(lambda: Counting.begin.wait(10) and work(*arguments, **named))
        self._left -= 1
        if not self._left:
            Counting.threads = len(self._threads)
            Counting.begin.set()
        return future


FORTY = [RemoteFile(str(number), 1, "") for number in range(40)]


def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = fetch.Transfer(Path("/nowhere"), cast(Any, SimpleNamespace(name="x")), "pin", lambda _: None)
    monkeypatch.setattr(transfer, "bring", lambda file: Path(file.path))
    transfer.bring_all(FORTY)


def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = objects.ObjectFolder("s3://x/y")
    monkeypatch.setattr(folder, "_system", lambda: (None, ""))
    monkeypatch.setattr(folder, "_infos", lambda *_: FORTY)
    monkeypatch.setattr(objects, "remote_file", lambda system, root, file: file)
    assert len(folder._list()) == 40


def hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_files, "_present_files", lambda _: {file.path: Path(file.path) for file in FORTY})
    monkeypatch.setattr(base_files, "_hashed", lambda path, cache: str(path))
    assert len(base_files.hash_base(Path("/nowhere"))) == 40


def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {file.path: torch.empty(1) for file in FORTY}
    model = SimpleNamespace(state_dict=lambda keep_vars: names)
    monkeypatch.setitem(sys.modules, "transformers.utils.loading_report", SimpleNamespace(LoadStateDictInfo=SimpleNamespace))  # type: ignore[arg-type]
    monkeypatch.setattr(load, "read_headers", lambda _: {})
    monkeypatch.setattr(load, "model_layouts", lambda *_: (dict.fromkeys(names), []))
    monkeypatch.setattr(load, "refuse_wrong_shapes", lambda *_: None)
    monkeypatch.setattr(load, "_jobs", lambda place, layout: [(place,)])
    monkeypatch.setattr(load, "_fill", lambda reader, place: 7)
    settings = SimpleNamespace(hf_quantizer=None, weight_mapping=None, pretrained_model_name_or_path="x")
    load._load_slices(model, ["x.safetensors"], settings, outcome := load.SliceLoad())
    assert outcome.bytes_read == 40 * 7


@pytest.mark.parametrize(
    ("module", "work", "threads"), [(fetch, fetched, 8), (objects, listed, 16), (base_files, hashed_at_once, 4), (load, loaded, 4)]
)
def test_so_many_threads_read_at_once(
    module: Any, work: Callable[[pytest.MonkeyPatch], None], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counting.begin = threading.Event()
    monkeypatch.setattr(module, "ThreadPoolExecutor", Counting)
    work(monkeypatch)
    assert Counting.threads == threads


def test_as_many_ranks_as_tcp_store_allows_wait_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    class Socket(socket.socket):
        def listen(self, backlog: int = 0, /) -> None:
            waiting.append(backlog)
            super().listen(backlog)

    monkeypatch.setattr(ranks, "socket", SimpleNamespace(**{**vars(socket), "socket": Socket}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    descriptor = ranks._listening("127.0.0.1", port)
    assert descriptor is not None
    socket.socket(fileno=descriptor).close()
    assert waiting == [2048]


def test_a_merge_has_eight_mebi_elements_of_a_tensor_at_a_time() -> None:
    sizes: list[int] = []
    stored = SimpleNamespace(
        tensors={"w": SimpleNamespace(dtype="BF16", shape=(20, MEBI))}, read=lambda name, start, block: sizes.append(block.numel())
    )
    assert sum(block.numel() for block in Merger({}, {}, {}, cast(Any, stored)).tensor("w")) == 20 * MEBI
    assert sizes == [8 * MEBI, 8 * MEBI, 4 * MEBI]


def test_the_self_test_of_deepspeed_has_four_mebi_elements_at_a_time() -> None:
    blocks = self_test._blocks(torch.empty(10 * MEBI, device="meta"))
    assert [(first // MEBI, len(block) // MEBI) for first, block in blocks] == [(0, 4), (4, 4), (8, 2)]


def test_in_fp16_gradients_of_logits_are_multiplied_so_that_small_ones_stay_and_large_ones_are_finite() -> None:
    """A word whose probability is 2e-8, less than FP16 has, and one that is as good as impossible but right."""
    layer = Layer(torch.eye(2, dtype=torch.float16), None, trained=False)
    rows = torch.tensor([[17.7, 0.0], [17.7, 0.0]], dtype=torch.float16)
    _, gradients = tiled_loss(rows, layer, torch.tensor([0, 1]), gradients=True)
    small, large = (gradients.rows.float() / gradients.scale)[:, 1].tolist()
    assert (small, large) == (pytest.approx(2e-8, rel=0.2), -1.0)


def test_shares_of_experts_have_six_digits() -> None:
    fields = usage_fields([LayerUsage(0, (1, 2))])
    assert fields == {"share": {"0": [0.333333, 0.666667]}, "entropy": {"0": 0.918296}, "maxShare": {"0": 0.666667}}


@pytest.mark.parametrize(("begun", "goes_on"), [(Batches.ROWS, Batches.ROWS), (Batches.read("Newer"), Batches.TOKENS)])
def test_a_run_goes_on_as_it_began_unless_only_another_version_knows_how(begun: Batches, goes_on: Batches) -> None:
    lines: list[str] = []
    training = SimpleNamespace(optimization=SimpleNamespace(batches=Batches.TOKENS))
    source = SimpleNamespace(manifest=SimpleNamespace(batches=begun), folder="f")
    assert assemble.begun_batches(cast(Any, training), cast(Any, source), lines.append) is goes_on
    assert len(lines) == 1 and begun.value in lines[0]
