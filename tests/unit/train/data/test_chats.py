"""Chats on their way into a run: what becomes of their samples, what is reported of them, and what the preview shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from lockstep_spec.choices import TrainOn
from lockstep_spec.training import EvaluationConfig
from lockstep_train.data.dataset import Dataset
from lockstep_train.data.read.records import Conversation, sample_of
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.chat import Encoded, encoded
from lockstep_train.data.tokens.encode import encode_samples
from lockstep_train.data.tokens.pool import answer_line, answer_of, batch_line, batch_of
from lockstep_train.data.tokens.source import Remarks
from lockstep_train.data.tokens.tokenizer import Tokenizer, load_tokenizer, stop_tokens
from lockstep_train.preview import marked_text
from unit.train.data.chat_cases import TEXTS, decode, encode, saved_tokenizer, says, template
from unit.train.data.chat_families import CHATML, FAMILIES, PHI3, PHI4, Family
from unit.train.data.data_cases import dataset_of, write_jsonl

QWEN3 = next(family for family in FAMILIES if family.name == "Qwen3")


def tokenizer(family: Family) -> Tokenizer:
    chat = template(family.template, family.stops)
    stops = frozenset(encode(stop)[0][0] for stop in family.stops)
    return Tokenizer(lambda text: encode(text)[0], (), None, 0, chat, decode=decode, digest=family.name, stops=stops)


def thinking(conversation: int) -> dict[str, Any]:
    turns = [
        {
            "role": role,
            "content": f"{role}{conversation}x{turn}" if role == "user" else f"<think>\nt{turn}\n</think>\n\na{conversation}x{turn}",
        }
        for turn in range(3)
        for role in ("user", "assistant")
    ]
    return {"messages": turns}


def texts(sequences: Any) -> list[str]:
    return [decode([int(token) for token in sequences[index].ids]) for index in range(len(sequences))]


def test_samples_of_a_conversation_are_trained_or_evaluated_together_and_its_whole_is_what_is_evaluated(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [thinking(number) for number in range(40)]))
    evaluation = EvaluationConfig(every_steps=1, holdout=0.3, samples=100)
    dataset: Dataset = dataset_of(tmp_path / "cache", tokenizer(QWEN3), evaluation, path=path, max_length=1000)
    trained, evaluated = texts(dataset.training), texts(dataset.evaluation)
    assert 0 < len(evaluated) < 40
    assert len(trained) == 3 * (40 - len(evaluated))

    def of(text: str) -> str:
        return text.partition("user\nuser")[2].partition("x")[0]

    assert {of(text) for text in trained}.isdisjoint({of(text) for text in evaluated})
    assert len({of(text) for text in evaluated}) == len(evaluated)
    assert all(f"a{of(text)}x2" in text for text in evaluated), "an earlier turn was evaluated in place of the whole"


def test_a_line_says_how_many_samples_came_of_how_many_conversations_at_every_start(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "x.jsonl", [*(thinking(number) for number in range(4)), {"messages": thinking(9)["messages"][:2]}]))
    for _ in range(2):
        notes = dataset_of(tmp_path / "cache", tokenizer(QWEN3), path=path, max_length=1000).notes
        assert (
            f"{path}: 4 conversations make 12 samples, because the chat template renders earlier answers differently from what the model"
            " writes" in notes[1]
        )
    last = dataset_of(tmp_path / "cache", tokenizer(QWEN3), path=path, max_length=1000, train_on=TrainOn.LAST_TURN)
    assert len(last.training) == 5
    assert len(last.notes) == 1


def test_what_is_odd_about_answers_is_counted_with_its_first_line_the_most_frequent_first() -> None:
    remarks = Remarks("x.jsonl")
    remarks.include([Encoded([1], b"\1", 3, ("rare",)), Encoded([1], b"\1", 4, ("often",)), Encoded([1], b"\1", 4, ("often", "often"))])
    remarks.include([Encoded([1], b"\1", 7)])
    assert remarks.notes()[1:] == ["WARNING: x.jsonl: 3 often (the first at line 4)", "WARNING: x.jsonl: 1 rare (the first at line 3)"]
    assert remarks.notes()[0].startswith("x.jsonl: 1 conversations make 2 samples")


def test_remarks_and_what_a_row_says_come_back_from_another_process() -> None:
    conversation = Conversation(({"role": "assistant", "content": "a"},), 0, (), 7, (0,), {"enable_thinking": False})
    assert batch_of(batch_line([conversation])) == [conversation]
    encoded = [Encoded([1, 2], b"\0\1", 7, ("odd",))]
    assert answer_of(answer_line((encoded, Broken("x"))))[0] == encoded


def test_the_preview_marks_the_stop_tokens_that_are_learned() -> None:
    mine = tokenizer(QWEN3)
    ids, _ = encode("<|im_start|>a<|im_end|>\nb<|im_end|>")
    mask = bytes(TEXTS[token] == "b" or number == len(ids) - 1 for number, token in enumerate(ids))
    assert marked_text(Encoded(ids, mask, 1), mine, color=False) == "<|im_start|>a<|im_end|>\n[b«<|im_end|>»]"


class SomeTokenizer:
    """As much of one of transformers as its stop tokens need."""

    def __init__(self, end: int | None) -> None:
        self.eos_token_id = end

    def __len__(self) -> int:
        return 100

    def decode(self, ids: list[int]) -> str:
        return " \n" if ids == [13] else f"<{ids[0]}>"


def test_stop_tokens_are_those_of_every_file_that_a_server_reads(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path, SomeTokenizer(None)) == []
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "text_config": {"eos_token_id": [3, 4]}}))
    assert stop_tokens(tmp_path, SomeTokenizer(9)) == [2, 3, 4, 9]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 13, 100, None]}))
    assert stop_tokens(tmp_path, SomeTokenizer(9)) == [1, 2, 3, 4, 9], "one has no row, and one is no text"


def learned_of(folder: Path, contents: list[str]) -> list[list[str]]:
    """The tokens that are learned of a chat, a list for each run of them."""
    mine, broken = load_tokenizer(folder), Broken("x")
    (sample,) = encode_samples([sample_of({"messages": says(*contents)}, 1)], mine, TrainOn.ASSISTANT, broken)
    broken.refuse()
    groups: list[list[str]] = []
    for number, (token, learned) in enumerate(zip(sample.ids, sample.learned, strict=True)):
        if learned:
            groups += [] if number and sample.learned[number - 1] else [[]]
            groups[-1].append(mine.decode([token]))
    return groups


@pytest.mark.parametrize("trim", [True, False])
def test_tokens_of_white_space_alone_are_learned_also_where_the_tokenizer_trims_their_places(tmp_path: Path, trim: bool) -> None:
    special = [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")]
    folder = saved_tokenizer(tmp_path, CHATML, special, [("Ġ", "Ġ")], trim)
    assert learned_of(folder, ["q", "a\n     b  c"]) == [["a", "\n", "  ", "  ", " ", "b", " ", " ", "c", "<|im_end|>"]]


@pytest.mark.parametrize("source", [PHI3, PHI4, CHATML])
@pytest.mark.parametrize("sides", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_special_tokens_that_swallow_white_space_are_learned_and_the_white_space_of_an_answer_is_its_own(
    tmp_path: Path, source: str, sides: dict[str, bool]
) -> None:
    """Phi-3's <|end|> and <|assistant|> take the line breaks behind them, Phi-4's <|im_sep|> those before them, too."""
    names = ("<|user|>", "<|assistant|>", "<|end|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>")
    folder = saved_tokenizer(tmp_path, source, [AddedToken(name, **sides) for name in names])
    stop = "<|end|>" if source is PHI3 else "<|im_end|>"
    assert learned_of(folder, ["q", "a", "r", "  b\nc", "s", "\n d"]) == [["a", stop], [*"  b\nc", stop], [*"\n d", stop]]


def test_an_answer_that_begins_with_white_space_is_cut_off_its_prompt_as_at_inference(tmp_path: Path) -> None:
    """Qwen makes one token of the line break that ends the prompt and the one that begins the answer."""
    folder = saved_tokenizer(tmp_path, CHATML, [AddedToken("<|im_start|>"), AddedToken("<|im_end|>")], [("Ċ", "Ċ"), ("Ġ", "a")])
    assert learned_of(folder, ["q", "\n\na", "r", "b", "s", "\n a"]) == [
        ["\n", "\n", "a", "<|im_end|>"],
        ["b", "<|im_end|>"],
        ["\n", " a", "<|im_end|>"],
    ]
    mine = load_tokenizer(folder)
    (sample,) = encode_samples([sample_of({"messages": says("q", "\na")}, 1)], mine, TrainOn.ASSISTANT, Broken("x"))
    assert sample.ids[: sample.learned.index(1)] == mine.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("trim", [True, False])
def test_a_space_that_ends_the_prompt_is_no_part_of_the_answers_first_token(tmp_path: Path, trim: bool) -> None:
    spaced = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:"
        " {% endif %}"
    )
    folder = saved_tokenizer(tmp_path, spaced, [AddedToken("<|end|>")], [("Ġ", "a")], trim)
    assert learned_of(folder, ["q", "ab"]) == [["a", "b", "<|end|>"]]


def test_an_answer_that_is_cut_off_its_prompt_gets_no_mark_of_a_beginning(tmp_path: Path) -> None:
    """A tokenizer as Llama 2's, with a prompt that ends with the space of the answer's first word."""
    from tokenizers import Tokenizer, models, normalizers

    pieces = ["▁", *"qabAS:\n<>", "▁a", "▁b"]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])

    def placed(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = backend.encode(text)
        return encoding.ids, encoding.offsets

    mine = replace(template("", ["</s>"], special=["</s>"]), encode=placed)
    sample = encoded(mine, "q A: ab</s>\n", [(5, 11)], 1)
    learned = [backend.id_to_token(token) for token, mask in zip(sample.ids, sample.learned, strict=True) if mask]
    assert learned == ["a", "b", "</s>"]
    assert [backend.id_to_token(token) for token in sample.ids[: sample.learned.index(1)]] == ["▁", "q", "▁", "A", ":", "▁"]
