"""Texts in parts, with small tokenizers of the kinds that models have: those that mark the beginning of a text, and those that don't."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors

from lockstep_spec.choices import TrainOn
from lockstep_train.data.read.records import Sample
from lockstep_train.data.read.text_files import Broken
from lockstep_train.data.tokens.encode import encode_paragraphs, encode_samples, paragraph_break
from lockstep_train.data.tokens.tokenizer import Tokenizer, encode_many, place_many

MERGES = [("▁", "a"), ("a", "b"), ("▁", "b"), ("▁a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("Ċ", "Ċ"), (".", "ĊĊ")]


def bpe() -> Any:
    pieces = ["<unk>", "▁", ".", "\n", "é", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    return LibraryTokenizer(models.BPE({piece: number for number, piece in enumerate(dict.fromkeys(pieces))}, MERGES, unk_token="<unk>"))


def llama_2() -> Any:
    found = bpe()
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return found


def mistral(scheme: str = "first", split: bool = False) -> Any:
    found = bpe()
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    return found


def byte_level(trim: bool = True, regex: bool = True) -> Any:
    found = bpe()
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    found.post_processor = processors.ByteLevel(trim_offsets=trim)
    return found


def without_breaks() -> Any:
    """All white space is a mark of a word's beginning, so a break goes into the token after it."""
    found = bpe()
    found.normalizer = normalizers.Replace("\n\n", " ")
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return found


MARKING = {"Llama 2": llama_2(), "Mistral": mistral(), "always": mistral("always", split=True)}
PLAIN = {"GPT-2": byte_level(), "Qwen": byte_level(trim=False), "no pattern": byte_level(regex=False), "no breaks": without_breaks()}


def tokenizer(library: Any, places: bool = True) -> Tokenizer:
    fast = SimpleNamespace(is_fast=True, backend_tokenizer=library)
    return Tokenizer(
        encode=lambda text: list(library.encode(text, add_special_tokens=False).ids),
        begin=(),
        end=None,
        pad=0,
        encode_many=lambda texts: encode_many(fast, texts),
        places=(lambda texts: place_many(fast, texts)) if places else None,
    )


def pieces(library: Any, ids: list[int]) -> list[str]:
    return [library.id_to_token(token) for token in ids]


def sample(library: Any, prompt: str | None, text: str, places: bool = True) -> tuple[list[str], list[str]]:
    """What is given, and what is learned."""
    broken = Broken("x")
    samples = [Sample("a", None, 1), Sample(text, prompt, 2), Sample("b", "a", 3)]
    encoded = encode_samples(samples, tokenizer(library, places), TrainOn.ALL if prompt is None else TrainOn.ASSISTANT, broken)
    found = next(item for item in encoded if item.line == 2)
    given = [token for token, learned in zip(found.ids, found.learned, strict=True) if not learned]
    return pieces(library, given), pieces(library, found.ids[len(given) :])


def paragraphs(library: Any, *texts: str) -> list[list[str]]:
    return [pieces(library, item.ids) for item in encode_paragraphs([Sample(text, None, 1) for text in texts], tokenizer(library))]


@pytest.mark.parametrize("name", MARKING)
@pytest.mark.parametrize(
    ("prompt", "answer", "given", "learned"),
    [
        ("ab", " ab", ["▁ab"], ["▁ab"]),
        ("ab.", "ab", ["▁ab", "."], ["ab"]),
        ("ab\n", "b a", ["▁ab", "\n"], ["b", "▁a"]),
        ("a", "éb", ["▁a"], ["é", "b"]),
    ],
)
def test_an_answer_has_no_space_before_it_that_nobody_wrote(
    name: str, prompt: str, answer: str, given: list[str], learned: list[str]
) -> None:
    library = MARKING[name]
    assert sample(library, prompt, answer) == (given, learned)
    assert pieces(library, tokenizer(library).encode(prompt + answer)) == given + learned, "the two together are what one text would be"


@pytest.mark.parametrize("name", MARKING)
def test_a_text_by_itself_keeps_the_mark_of_its_beginning(name: str) -> None:
    assert sample(MARKING[name], None, "ab b") == ([], ["▁ab", "▁b"])


@pytest.mark.parametrize("name", MARKING)
def test_neither_a_paragraph_nor_its_break_begins_with_a_space_that_nobody_wrote(name: str) -> None:
    assert paragraphs(MARKING[name], "ab b", " ab", "b") == [["ab", "▁b", "\n", "\n"], ["▁ab", "\n", "\n"], ["b", "\n", "\n"]]
    assert len(paragraph_break(tokenizer(MARKING[name]))) == 2


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("prompt", "answer"), [("ab", " ab"), ("ab ", "ab"), ("ab", "ab"), ("a  ", " b"), ("ab.", "\n\nab"), ("é", "é"), ("a\n", "  b ")]
)
def test_other_tokenizers_give_the_ids_of_both_parts_alone(name: str, prompt: str, answer: str) -> None:
    library = PLAIN[name]
    alone = tuple(pieces(library, tokenizer(library).encode(part)) for part in (prompt, answer))
    assert sample(library, prompt, answer) == alone
    assert sample(library, prompt, answer, places=False) == alone


@pytest.mark.parametrize("name", PLAIN)
def test_other_tokenizers_give_the_ids_of_paragraphs_alone(name: str) -> None:
    library = PLAIN[name]
    texts = ["ab.", "  b", "é a", "a\nb "]
    tail = tokenizer(library).encode("\n\n")
    assert paragraphs(library, *texts) == [pieces(library, tokenizer(library).encode(text) + tail) for text in texts]
