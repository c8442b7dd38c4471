"""Several processes tokenize what one would, in the same order, and whatever happens to them nothing is lost."""

from __future__ import annotations

import dataclasses
import datetime
import io
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep_spec.choices import TrainOn
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.records import Conversation, Sample
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens import pool as pool_module
from lockstep_train.data.tokens.encode import Encoded
from lockstep_train.data.tokens.pool import (
    Answer,
    Batch,
    Encoder,
    Lost,
    Pool,
    answer_line,
    answer_of,
    batch_line,
    batch_of,
    encode_batch,
    serve,
    start_pool,
)
from unit.train.data.data_cases import BYTES, PLAIN_BYTES
from unit.virtual_time import VirtualClock

BATCHES: list[Batch] = [[Conversation(({"role": "user", "content": str(number)},), 0, (), number)] for number in range(30)]


def answer(batch: Batch) -> Answer:
    broken = Broken("x")
    broken.add(batch[0].line, "as it should be")
    return [], broken


class Process:
    """In place of a process: `encode` answers, or raises Lost."""

    def __init__(self, encode: Callable[[Batch], Answer] = answer) -> None:
        self._encode = encode
        self.ended = False

    def encode(self, line: bytes) -> Answer:
        return self._encode(batch_of(line))

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        assert self.ended


def run(processes: list[Any], here: Callable[[Batch], Answer] = answer) -> tuple[list[int], list[str]]:
    """Lines of the answers, in their order, and what was said."""
    told: list[str] = []
    found = Encoder(here, lambda: Pool(processes), told.append).run(BATCHES)
    return [broken.reasons[0][0] for _, (_, broken) in found], told


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "AFTER_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_answers_come_in_the_order_of_the_data_whoever_is_ready_first() -> None:
    other_is_ready = threading.Event()

    def late(batch: Batch) -> Answer:
        assert other_is_ready.wait(60)
        return answer(batch)

    def early(batch: Batch) -> Answer:
        other_is_ready.set()
        return answer(batch)

    processes = [Process(late), Process(early)]
    assert run(processes, here=lambda batch: pytest.fail("the pool was there")) == (list(range(30)), [])
    assert all(process.ended for process in processes)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("last", [0, 1, 7, 29])
def test_when_a_process_ends_the_rank_goes_on_alone_and_loses_nothing(last: int) -> None:
    def dying(batch: Batch) -> Answer:
        if batch[0].line >= last:
            raise Lost
        return answer(batch)

    processes = [Process(dying), Process(dying), Process()]
    lines, told = run(processes)
    assert lines == list(range(30))
    assert len(told) <= 1 and all("this rank goes on alone" in line for line in told)
    assert all(process.ended for process in processes)


@pytest.mark.usefixtures("at_once")
def test_processes_end_with_whoever_asked_them() -> None:
    processes = [Process(), Process()]
    answers = Encoder(answer, lambda: Pool(processes), print).run(BATCHES)
    next(answers)
    assert not any(process.ended for process in processes)
    answers.close()
    assert all(process.ended for process in processes)


def test_short_work_and_texts_without_a_template_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> Pool:
        raise AssertionError("a pool was started")

    assert len(list(Encoder(answer, never, print).run(BATCHES))) == 30
    monkeypatch.setattr(pool_module, "AFTER_SECONDS", 0.0)
    assert len(list(Encoder(answer, never, print).run([[Sample("a", None, 1)]]))) == 1


def test_the_pool_takes_over_what_is_left_after_twenty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, here = VirtualClock(), list[int]()
    monkeypatch.setattr(pool_module, "time", clock)

    def slow(batch: Batch) -> Answer:
        clock.sleep(4)
        here.append(batch[0].line)
        return answer(batch)

    assert run([Process(), Process()], slow) == (list(range(30)), [])
    assert here == [0, 1, 2, 3, 4]


def test_there_is_no_pool_without_cores_for_it_or_a_tokenizer_to_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_disk = dataclasses.replace(BYTES, folder=tmp_path)
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 2)
    assert start_pool(on_disk, TrainOn.ASSISTANT, "x", print) is None
    monkeypatch.setattr(pool_module, "usable_cores", lambda: 64)
    assert start_pool(BYTES, TrainOn.ASSISTANT, "x", print) is None
    monkeypatch.setattr(pool_module, "Process", lambda *_: Process())
    told: list[str] = []
    started = start_pool(on_disk, TrainOn.ASSISTANT, "x", told.append)
    started.close()
    assert (started.size, told) == (8, ["Tokenizing x with 8 processes"])


def test_a_process_answers_each_batch_until_its_input_ends() -> None:
    asked: list[Batch] = [[Sample("one", None, 1), Conversation(({"role": "user", "content": "q"},), 0, (), 2)], [Sample("c", "ab", 3)]]
    answers = io.BytesIO()
    serve(PLAIN_BYTES, TrainOn.ASSISTANT, "x", io.BytesIO(b"".join(map(batch_line, asked)) + b"[{"), answers)
    answers.seek(0)
    assert list(map(answer_of, answers)) == [encode_batch(batch, PLAIN_BYTES, TrainOn.ASSISTANT, "x") for batch in asked]


def test_batches_and_answers_come_back_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "f", "arguments": {"x": [1, 2.5, None, True]}}}
    said = ({"role": "user", "content": 'é "\n'}, {"role": "assistant", "content": "", "tool_calls": [tool]})
    batch: Batch = [Conversation(said, 1, (tool,), 7), Sample("a", None, 8), Sample("b", "c", 9)]
    assert batch_of(batch_line(batch)) == batch
    broken = Broken("x", [(3, "why \ud800")], 12)
    sent: Answer = ([Encoded([1, 2, 300_000], b"\x00\x01\x01", 7)], broken)
    assert answer_of(answer_line(sent)) == sent
    with pytest.raises(ValueError):
        answer_of(answer_line(sent)[:-9])


@pytest.mark.usefixtures("at_once")
def test_what_has_no_json_is_tokenized_by_the_rank_in_its_place() -> None:
    day = {"role": "user", "content": "x", "at": datetime.date(2026, 1, 1)}
    batches = [*BATCHES[:3], [Conversation((day,), 0, (), 3)], *BATCHES[4:]]
    here: list[int] = []

    def noted(batch: Batch) -> Answer:
        here.append(batch[0].line)
        return answer(batch)

    found = Encoder(noted, lambda: Pool([Process(), Process()]), print).run(batches)
    assert [broken.reasons[0][0] for _, (_, broken) in found] == list(range(30))
    assert here == [3]


def test_the_first_broken_lines_are_told_in_whatever_order_they_are_found() -> None:
    lines = list(range(1, 41))
    random.Random(1).shuffle(lines)  # noqa: S311
    whole = Broken("x.jsonl")
    for begin in range(0, 40, 8):
        part = Broken("x.jsonl")
        for line in lines[begin : begin + 8]:
            part.add(line, "bad")
        whole.include(part)
    with pytest.raises(
        ConfigError,
        match=(
            r"^40 broken lines in the data: x\.jsonl:1: bad; x\.jsonl:2: bad; .*x\.jsonl:5: bad \(and 35 more\); fix them, or set"
            r" training\.data\.onBroken to Drop"
        ),
    ):
        whole.refuse()
