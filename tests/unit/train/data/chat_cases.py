"""A chat template rendered as transformers renders it, a tokenizer of words whose special tokens stand for themselves, and one that the
library makes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep_spec.choices import TrainOn
from lockstep_train.data.read.records import Conversation
from lockstep_train.data.tokens.chat import Encoded, encode_conversation
from lockstep_train.data.tokens.tokenizer import on_one_day
from lockstep_train.data.tokens.turns import ChatTemplate, Span

SPECIAL = re.compile(r"<[^>\s]*>|\[/?[A-Za-z_]+\]")
WORDS = re.compile(SPECIAL.pattern + r"|\w+|\n+|\s|.")
TEXTS: list[str] = []
"""The text of each token id."""


def encode(text: str) -> tuple[list[int], list[Span]]:
    """Special tokens, words and runs of line breaks are tokens."""
    matches = list(WORDS.finditer(text))
    for match in matches:
        if match.group() not in TEXTS:
            TEXTS.append(match.group())
    return [TEXTS.index(match.group()) for match in matches], [match.span() for match in matches]


def decode(ids: Sequence[int]) -> str:
    return "".join(TEXTS[number] for number in ids)


def refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def template(source: str, stops: Sequence[str], marked: Any = None, special: Sequence[str] = ()) -> ChatTemplate:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined)
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(on_one_day(source))

    def render(messages: Sequence[Any], tools: Sequence[Any], generation_prompt: bool, options: Mapping[str, Any]) -> str:
        return compiled.render(messages=list(messages), tools=list(tools) or None, add_generation_prompt=generation_prompt, **options)

    return ChatTemplate(render, marked, encode, tuple(stops), frozenset(special), "</think>" in source)


def runs(sample: Encoded) -> list[str]:
    """The neighboring tokens that are learned, as text."""
    texts: list[str] = []
    for number, (token, learned) in enumerate(zip(sample.ids, sample.learned, strict=True)):
        if learned:
            texts = [*texts[:-1], texts[-1] + TEXTS[token]] if number and sample.learned[number - 1] else [*texts, TEXTS[token]]
    return texts


def samples(
    chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], train_on: TrainOn = TrainOn.ASSISTANT, **fields: Any
) -> list[Encoded]:
    """What the conversation makes; `fields` of Conversation besides the messages."""
    conversation = Conversation(tuple(map(dict, messages)), fields.pop("given", 0), tuple(fields.pop("tools", ())), 1, **fields)
    return encode_conversation(conversation, chat, train_on)


def says(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


def saved_tokenizer(folder: Path, source: str, special: Sequence[Any], merges: Sequence[tuple[str, str]] = (), trim: bool = False) -> Path:
    """A tokenizer of bytes as transformers saves it, whose model stops at all of its `special` tokens, which are `AddedToken`s."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), processors.TemplateProcessing(single="$A")])
    backend.add_special_tokens(list(special))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = source
    tokenizer.save_pretrained(folder)
    stops = [backend.token_to_id(str(token.content)) for token in special]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder
