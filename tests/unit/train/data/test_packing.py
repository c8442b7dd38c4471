"""Several documents in one sequence: all of them, once, in an order that never changes, and apart."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_spec.training import EvaluationConfig
from lockstep_train.data.sequences.documents import best_fit_decreasing
from lockstep_train.data.tokens.encode import IGNORED, Example
from lockstep_train.data.tokens.tokenizer import Tokenizer
from lockstep_train.model.isolation import isolation_problem
from unit.train.data.data_cases import BYTES, PLAIN_BYTES, dataset_of, write_jsonl

RECORDS = [{"text": "x" * (1 + 7 * number % 23) + str(number)} for number in range(40)]


@given(st.lists(st.integers(1, 50), max_size=200))
def test_every_document_is_in_one_sequence_and_none_is_too_full(lengths: list[int]) -> None:
    order, starts = best_fit_decreasing(numpy.array(lengths, numpy.int64), 50)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    packs = [order[begin:end] for begin, end in itertools.pairwise(starts)]
    assert all(0 < sum(lengths[document] for document in pack) <= 50 for pack in packs)
    rooms = sorted(50 - sum(lengths[document] for document in pack) for pack in packs)
    assert all(one + other < 50 for one, other in itertools.pairwise(rooms))  # no two of them could have been one


def test_the_longest_documents_go_first_and_the_fullest_sequence_that_fits_takes_the_next() -> None:
    order, starts = best_fit_decreasing(numpy.array([3, 6, 4, 5, 2]), 10)
    assert [order[begin:end].tolist() for begin, end in itertools.pairwise(starts)] == [[1, 2], [0, 3, 4]]


@pytest.mark.parametrize("tokenizer", [BYTES, PLAIN_BYTES], ids=["with a first token of its own", "without"])
def test_a_pack_holds_whole_documents_whose_first_tokens_are_not_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", RECORDS))
    alone = dataset_of(tmp_path / "cache", tokenizer, path=path, max_length=64).training
    told: list[str] = []
    packed = dataset_of(tmp_path / "cache", tokenizer, path=path, max_length=64, packing=True, told=told)
    documents = []
    for example in packed.training:
        assert sum(example.documents) == len(example.ids) <= 64
        ends = numpy.cumsum(example.documents)
        documents += [
            (tuple(ids), tuple(labels))
            for ids, labels in zip(numpy.split(example.ids, ends)[:-1], numpy.split(example.labels, ends)[:-1], strict=True)
        ]
    assert all(labels[0] == IGNORED for _, labels in documents)
    assert sorted(documents) == sorted((tuple(example.ids), tuple(example.labels)) for example in alone)
    assert packed.training.learned_tokens(range(len(packed.training))) == alone.learned_tokens(range(40))
    assert packed.notes[-1].startswith("Packed 40 documents into ")
    assert len(packed.training) < 20


def test_packs_for_evaluation_are_made_of_the_evaluated_samples_alone(tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every_steps=1, holdout=0.3, samples=6)
    small = dataset_of(tmp_path / "a", path=str(write_jsonl(tmp_path / "x.jsonl", RECORDS)), packing=True, evaluation=evaluation)
    backwards = dataset_of(tmp_path / "b", path=str(write_jsonl(tmp_path / "y.jsonl", RECORDS[::-1])), packing=True, evaluation=evaluation)
    assert sum(len(example.documents) for example in small.evaluation) == 6
    assert [example.ids.tolist() for example in small.evaluation] == [example.ids.tolist() for example in backwards.evaluation]


class Leaking:
    """A model in which a changed document moves the next one's logits by a share of what it moves within one document."""

    training = False
    module = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=100, _attn_implementation="sdpa")))

    def __init__(self, dtype: torch.dtype, share: float) -> None:
        self._dtype, self._share = dtype, share

    def eval(self) -> None: ...
    def train(self, mode: bool) -> None: ...
    def __call__(self, input_ids: torch.Tensor, document_lengths: tuple[int, ...], **_: Any) -> Any:
        before = input_ids[0, ::48].repeat_interleave(48)  # the first token of the document before, or of the same one
        moved = before * torch.tensor([self._share] * 96 + [1.0] * 96)
        assert document_lengths == (24, 24, 24, 24, 48, 48)
        return SimpleNamespace(logits=moved[None, :, None].to(self._dtype))


@pytest.mark.parametrize(
    ("dtype", "share", "leaks"),
    [
        (torch.float32, 0.0009, False),
        (torch.float32, 0.0011, True),
        (torch.bfloat16, 0.019, False),
        (torch.bfloat16, 0.021, True),
        (torch.float16, 0.019, False),
        (torch.float16, 0.021, True),
    ],
)
def test_a_leak_is_more_than_a_thousandth_of_what_a_change_does_and_two_hundredths_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, share: float, leaks: bool
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_: None)
    example = Example(numpy.arange(24), numpy.arange(24), "x", (24,))
    problem = isolation_problem(Leaking(dtype, share), [example], 1, torch.device("cpu"))
    assert ("changing one document moved the logits of the next one" in problem) == leaks == bool(problem)
