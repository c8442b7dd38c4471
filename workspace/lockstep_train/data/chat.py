"""Which parts of a conversation are learned, found by rendering it with the tokenizer's own chat template.

An assistant's turn begins where the template's generation prompt ends, for that is what the model is given when it is asked; it
ends where the next message begins. Both are found by rendering beginnings of the conversation and comparing the texts, so no
template needs to be known. Where that fails, the template's own `{% generation %}` marks are used, and where there are none, the
sample is refused: a mask that is guessed teaches the wrong thing without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep_sizes.choices import TrainOn
from lockstep_train.data.read import Conversation
from lockstep_train.errors import first_line

ASSISTANT = "assistant"
EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")
"""Put in by templates of reasoning models where there was no thought (GLM, Qwen): form, not something to learn."""
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
THOUGHT_BEGUN = re.compile(r"<think>\s*(</think>\s*)?\Z")

Span = tuple[int, int]
Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """What is needed of a tokenizer that has one."""

    render: Callable[[Sequence[Message], Sequence[Any], bool], str]
    """(messages, tools, whether to end with the generation prompt) → text. May raise what the template raises."""
    marked: Callable[[Sequence[Message], Sequence[Any]], list[Span]] | None
    """The parts that the template marks by `{% generation %}`, or None when it has no such marks."""
    encode: Callable[[str], tuple[list[int], list[Span]]]
    """Token ids without special tokens added, and where in the text each token stands."""


class Unmasked(ValueError):
    """Why the learned parts of a conversation can't be told."""


def encode_conversation(conversation: Conversation, template: ChatTemplate, train_on: TrainOn) -> tuple[list[int], bytes]:
    """Token ids, and a byte each: 1 where it is learned. Raises ValueError saying what is wrong with the conversation."""
    try:
        text = template.render(conversation.messages, conversation.tools, False)
    except Exception as error:  # templates raise whatever they like, to refuse a role or an order
        raise ValueError(f"the chat template refuses it: {error}") from error
    ids, places = template.encode(text)
    if train_on is TrainOn.ALL:
        return ids, b"\1" * len(ids)
    try:
        spans = assistant_spans(conversation, template, text)
        learned = learned_tokens(places, _chosen(spans, train_on))
    except Unmasked as problem:
        if template.marked is None:
            raise ValueError(
                f"{problem}, and the chat template has no generation marks; add them to the template, or set training.data.trainOn to All"
            ) from problem
        learned = learned_tokens(places, _chosen(_marked_spans(conversation, template.marked), train_on))
    return ids, learned


def _beginning(conversation: Conversation, template: ChatTemplate, count: int, *, asked: bool) -> str:
    """The first messages rendered alone. Raises Unmasked where the template refuses them: the whole may be fine for it all the same."""
    try:
        return template.render(conversation.messages[:count], conversation.tools, asked)
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        if count == 0:
            raise Unmasked(f"messages[0] is the assistant's: the chat template can't render what comes before it ({reason})") from error
        raise Unmasked(f"the chat template can't render the messages before messages[{count}] by themselves ({reason})") from error


def assistant_spans(conversation: Conversation, template: ChatTemplate, text: str) -> list[Span]:
    """Where in `text`, the rendered conversation, the assistant's turns stand. Raises Unmasked."""
    messages = conversation.messages
    turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT and number >= conversation.given]
    return [_turn(conversation, template, text, number) for number in turns]


def _marked_spans(conversation: Conversation, marked: Callable[[Sequence[Message], Sequence[Any]], list[Span]]) -> list[Span]:
    """Raises ValueError where the template refuses the conversation."""
    try:
        found = marked(conversation.messages, conversation.tools)
    except Exception as error:
        raise ValueError(f"the chat template refuses it: {first_line(error) or type(error).__name__}") from error
    spans = [span for span in found if span[1] > span[0]]
    return spans[sum(message["role"] == ASSISTANT for message in conversation.messages[: conversation.given]) :]


def _turn(conversation: Conversation, template: ChatTemplate, text: str, number: int) -> Span:
    start = _start(conversation, template, text, number)
    whole = number + 1 == len(conversation.messages)
    rendered = text if whole else _beginning(conversation, template, number + 1, asked=False)
    said = rendered[start:] if rendered[:start] == text[:start] else None
    end = _end(text, start, said) if said is not None else None
    if end is None:
        raise Unmasked(f"messages[{number}] is rendered otherwise when it is not the last message")
    thought = EMPTY_THOUGHT.match(text, start, end)
    return (thought.end() if thought else start, end)


def _start(conversation: Conversation, template: ChatTemplate, text: str, number: int) -> int:
    """The end of the generation prompt before this turn; also of one that begins a thought which this turn doesn't have."""
    asked = _beginning(conversation, template, number, asked=True)
    without_thought = THOUGHT_BEGUN.sub("", asked)
    for prompt in (asked, without_thought, without_thought.rstrip()):
        if text.startswith(prompt):
            return len(prompt)
    raise Unmasked(f"the messages before messages[{number}], rendered to be answered, are no beginning of the whole conversation")


def _end(text: str, start: int, said: str) -> int | None:
    """Where the turn ends in the whole text. Templates of reasoning models drop the thoughts of all turns but the last one."""
    thought = THOUGHT.match(said)
    for candidate in (said, said[thought.end() :] if thought else said):
        if text.startswith(candidate, start):
            return start + len(candidate)
    return None


def _chosen(spans: list[Span], train_on: TrainOn) -> list[Span]:
    return spans[-1:] if train_on is TrainOn.LAST_TURN else spans


def learned_tokens(places: Sequence[Span], spans: Sequence[Span]) -> bytes:
    """A byte a token: 1 inside a span. Raises Unmasked when a token lies across the border of one."""
    learned = bytearray(len(places))
    remaining = iter(spans)
    span = next(remaining, None)
    for number, (begin, end) in enumerate(places):
        while span is not None and begin >= span[1]:
            span = next(remaining, None)
        if span is None:
            break
        if begin < span[0] < end or begin < span[1] < end:
            raise Unmasked(f"a token lies across the border of the assistant's turn at character {span[0] if begin < span[0] else span[1]}")
        learned[number] = begin >= span[0] and end > begin
    return bytes(learned)
