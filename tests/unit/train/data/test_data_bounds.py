"""How much of a data file is read, tokenized and reported at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch

from lockstep_train.data.read import tables
from lockstep_train.data.read.records import Sample
from lockstep_train.data.read.text_files import _Elements
from lockstep_train.data.tokens.chat import Encoded
from lockstep_train.data.tokens.encode import Example
from lockstep_train.data.tokens.source import Remarks, batches
from lockstep_train.model import isolation
from unit.train.data.chat_cases import samples, says, template
from unit.train.data.test_masks import CHATML, STOPS


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_thousand_rows_of_a_table_become_objects_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.table({"text": ["x"] * 2500})
    path, made = tmp_path / f"x.{kind}", list[int]()

    class Batch:
        """A batch that says how many of its rows become objects."""

        def __init__(self, real: Any) -> None:
            self._real, self.schema, self.num_rows = real, real.schema, real.num_rows

        def select(self, columns: Any) -> Batch:
            return Batch(self._real.select(columns))

        def slice(self, first: int, count: int) -> Batch:
            return Batch(self._real.slice(first, count))

        def to_pylist(self) -> list[Any]:
            made.append(self.num_rows)
            return list(self._real.to_pylist())

    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
        real = pyarrow.parquet.ParquetFile.iter_batches
        monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", lambda self, **how: map(Batch, real(self, **how)))
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
        monkeypatch.setattr(pyarrow.ipc, "open_stream", lambda file, real=pyarrow.ipc.open_stream: map(Batch, real(file)))
    assert len(list(tables.rows_of(path))) == 2500
    assert made == [1000, 1000, 500]


@pytest.mark.parametrize(("after", "reads"), [(16, 2), (17, 1)])
def test_an_error_of_syntax_within_16_characters_of_the_end_may_be_a_word_that_goes_on(after: int, reads: int) -> None:
    parts = ["[?".ljust(1 + after), " " * 5000]
    elements = _Elements(lambda: parts.pop(0) if parts else "")
    with pytest.raises(ValueError, match="not valid JSON"):
        elements.next()
    assert 2 - len(parts) == reads


def test_two_thousand_samples_are_tokenized_at_once() -> None:
    assert [len(batch) for batch in batches(Sample("x", None, line) for line in range(5000))] == [2000, 2000, 1000]


def test_the_eight_most_frequent_remarks_are_reported() -> None:
    remarks = Remarks("x.jsonl")
    for number in range(10):
        remarks.include([Encoded([1], b"\1", line, (f"remark {number}",)) for line in range(20 - number)])
    assert [note.split("remark ")[1][0] for note in remarks.notes()] == list("01234567")


@pytest.mark.parametrize(("unchanged", "is_taken"), [(20, True), (19, False)])
def test_an_answer_is_recognized_by_its_last_twenty_characters(unchanged: int, is_taken: bool) -> None:
    chat = template(CHATML.replace("message.content", "message.content | replace('Hello', 'Hi')"), STOPS)
    try:
        samples(chat, says("question", "Hello" + "x" * unchanged))
    except ValueError as error:
        assert not is_taken and "leaves out the content of messages[1], or changes it" in str(error)
    else:
        assert is_taken


class Refusing:
    """An engine whose model says what it was given."""

    training = False
    module = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=9, _attn_implementation="sdpa")))

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        raise ValueError(f"rows and tokens: {list(input_ids.shape)}")

    def eval(self) -> None: ...
    def train(self, mode: bool) -> None: ...


def test_documents_of_24_tokens_show_whether_they_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation.dist, "all_reduce", lambda *_: None)  # with no other rank
    examples = [Example(numpy.arange(5000) % 9, numpy.zeros(5000, int), "x", (5000,))]
    assert isolation.isolation_problem(Refusing(), examples, 3, torch.device("cpu")) == "rows and tokens: [3, 192]"
