"""The samples that a conversation makes: token ids, and which of them are learned.

Turns are put together into one sample where the last one's rendering has the earlier ones as the model wrote them. Where a template
rewrites an earlier turn (Qwen3 and GLM drop its thought, gpt-oss ends it with another token), that turn is a sample of its own, for the
model never meets the rewritten form as something to write. Where a turn can't be located, the template's own `{% generation %}` marks are
used, and where there are none, the conversation is
refused: a mask that is guessed teaches the wrong thing without a word.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from lockstep_spec.choices import TrainOn
from lockstep_train.base.errors import first_line
from lockstep_train.data.read.records import Conversation
from lockstep_train.data.tokens.turns import (
    ENDING,
    LOST_CALL,
    LOST_TOOLS,
    STAND_IN,
    Chat,
    ChatTemplate,
    Message,
    Span,
    Turn,
    Unmasked,
    calling,
    next_speaker,
    no_end,
    other_end,
    place_of,
    shows,
    takes_text,
    turn_of,
)

ASSISTANT = "assistant"
BREAK = "\n\n"


@dataclass(frozen=True)
class Encoded:
    """A whole sample, however long. A conversation may make several, which follow each other; the first one has all of it."""

    ids: list[int]
    learned: bytes
    """A byte a token: 1 where it is learned."""
    line: int
    remarks: tuple[str, ...] = ()
    """Oddities of its answers; one that holds for several turns is there several times."""


def encode_conversation(conversation: Conversation, template: ChatTemplate, train_on: TrainOn) -> list[Encoded]:
    """The sample of the last turn, and one for each earlier turn that the template rewrites. Raises ValueError saying what is wrong with
    it.
    """
    form = _as_text if takes_text(template, tools=bool(conversation.tools)) else _as_object
    messages = tuple(_with_arguments(message, form) for message in conversation.messages)
    chat = Chat(messages, conversation.tools, conversation.options, template)
    if train_on is TrainOn.ALL:
        return [_whole(chat, conversation)]
    turns = [
        number
        for number, message in enumerate(conversation.messages)
        if message["role"] == ASSISTANT and number >= conversation.prompt_count and number not in conversation.untrained
    ]
    if not turns:
        raise ValueError("no token of it is learned: it has no answer of the assistant that is to be learned")
    if train_on is TrainOn.LAST_TURN:
        turns = turns[-1:]
    try:
        made = [turn_of(chat, number) for number in turns]
        kept = [turn for turn in made if LOST_CALL not in turn.remarks]
        if not kept:
            raise ValueError(f"no token of it is learned: its {LOST_CALL}")
        samples = [encoded(template, text, spans, conversation.line, remarks) for text, spans, remarks in joined(kept)]
    except Unmasked as problem:
        advice = _advice(chat)
        if advice:
            raise ValueError(f"{problem}; {advice}") from problem
        if template.marked is None:
            raise ValueError(
                f"{problem}, and the chat template has no generation marks; add them to the template, leave the message out of training "
                "(`train: false`), or set training.data.trainOn to All"
            ) from problem
        return [_marked(chat, turns, conversation.line)]
    _refuse_left_out(chat, made[-1])
    lost = [LOST_CALL] * (len(made) - len(kept)) + [LOST_TOOLS] * _lost_tools(chat, made[0])
    return [replace(samples[0], remarks=(*samples[0].remarks, *lost)), *samples[1:]]


REMEDIES = {
    "system": "put its text into the first of the user's messages",
    "developer": "make it a message of the role system",
    "tool": "leave out conversations with tools",
}
OR_TEMPLATE = "or set training.data.chatTemplate to a template with that role"


def _refuse_left_out(chat: Chat, last: Turn) -> None:
    """Raise ValueError for a message before the last turn that the template leaves out: the model would answer what it isn't shown."""
    for number, message in enumerate(chat.messages[: last.number]):
        role, text = message["role"], str(message.get("content") or "").strip()
        if role != ASSISTANT and text[-ENDING:] not in last.context and not shows(chat, number, {**message, "content": STAND_IN}):
            remedy = REMEDIES.get(role, "give it a role that the template has")
            raise ValueError(f"the chat template leaves out messages[{number}], whose role is {role}; {remedy}, {OR_TEMPLATE}")


def _advice(chat: Chat) -> str:
    """Advice on a conversation that the template refuses: a role that it lacks, or an order that it can't have; empty for another."""

    def takes(messages: Sequence[Message]) -> bool:
        with contextlib.suppress(Unmasked):
            return bool(replace(chat, messages=tuple(messages)).beginning(len(messages), prompted=False))
        return False

    if takes(chat.messages):
        return ""
    roles = [message["role"] for message in chat.messages]
    asked, answered = {"role": "user", "content": "x"}, {"role": ASSISTANT, "content": "z"}
    for role in dict.fromkeys(role for role in roles if role not in ("user", ASSISTANT)):
        other: Message = {"role": role, "content": "y", **({"tool_call_id": "call00000", "name": "f"} if role == "tool" else {})}
        if takes([asked]) and not takes([asked, calling({}), other, answered] if role == "tool" else [other, asked, answered]):
            remedy = REMEDIES.get(role, "give them another role")
            return f"this template takes no messages of the role {role}: {remedy}, {OR_TEMPLATE}"
    twice = (number for number, (one, other) in enumerate(itertools.pairwise(roles)) if one == other != "tool")
    return next((f"messages[{one}] and messages[{one + 1}] are both of the role {roles[one]}: join them" for one in twice), "")


def _lost_tools(chat: Chat, first: Turn) -> bool:
    """Return True if the template shows none of the row's tools."""
    names = [str(tool["function"].get("name")) for tool in chat.tools if isinstance(tool, dict) and isinstance(tool.get("function"), dict)]
    return bool(names) and not any(name in first.context for name in names)


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """Message with the arguments of its calls in one of the two forms that data have them in: servers give templates objects."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    changed = [{**function, "arguments": form(function["arguments"])} for function in functions]
    return {**message, "tool_calls": [{**call, "function": one} for call, one in zip(message["tool_calls"], changed, strict=True)]}


def _as_object(arguments: Any) -> Any:
    """Text that is no JSON object stays what it is."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def joined(turns: Sequence[Turn]) -> list[tuple[str, list[Span], tuple[str, ...]]]:
    """Texts with the spans that are learned of each, the last turn's first: every turn is learned once, in as few texts as possible."""
    samples = []
    remaining = list(turns)
    while remaining:
        last = remaining.pop()
        placed = [(turn, place_of(turn, last.text)) for turn in remaining]
        spans = [*(place for _, place in placed if place is not None), last.span]
        remarks = [remark for turn, place in placed if place is not None for remark in turn.remarks]
        samples.append((last.text, spans, (*remarks, *last.remarks)))
        remaining = [turn for turn, place in placed if place is None]
    return samples


def _whole(chat: Chat, conversation: Conversation) -> Encoded:
    """Learn all of a conversation as it is rendered, with the stop token that the next speaker's marker is."""
    if conversation.untrained:
        raise ValueError(
            "`train: false` and `weight: 0` need training.data.trainOn Assistant or LastTurn, because All learns every message"
        )
    text = chat.beginning(len(chat.messages), prompted=False)
    if not all(shows(chat, number, _renamed(message)) for number, message in enumerate(chat.messages) if message.get("tool_calls")):
        raise ValueError(f"its {LOST_CALL}")
    last = chat.messages[-1]
    if last["role"] == ASSISTANT and not text.rstrip().endswith((*chat.template.stops, *chat.template.special)):
        text += next_speaker(chat.template, bool(last.get("tool_calls"))) or ""
    ids, _ = chat.template.encode(text)
    begin = _beginning(chat.template)
    masked = len(begin) if tuple(ids[: len(begin)]) == begin else 0
    return Encoded(ids, bytes(masked) + b"\1" * (len(ids) - masked), conversation.line)


def _renamed(message: Message) -> Message:
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "name": STAND_IN}} for call in message["tool_calls"]]}


@cache
def _beginning(template: ChatTemplate) -> tuple[int, ...]:
    """Tokens that the template has before every message, where that is special tokens alone: GLM's [gMASK]<sop>, which the model is always
    given.
    """
    try:
        text = Chat((), (), {}, template).beginning(0, prompted=False)
    except Unmasked:
        return ()
    ids, places = template.encode(text)
    return tuple(ids) if all(text[start:end].strip() in template.special for start, end in places) else ()


def encoded(template: ChatTemplate, text: str, spans: Sequence[Span], line: int, remarks: tuple[str, ...] = ()) -> Encoded:
    """A text of which these parts are learned. Raises Unmasked where one ends within a token."""
    ids, places = template.encode(text)
    cuts = [start for start, _ in spans if across(places, start) is not None]
    if cuts:
        ids, places = _in_pieces(template, text, cuts)
    return Encoded(ids, learned_tokens(_without_white_space(template, text, places, spans), spans), line, remarks)


def across(places: Sequence[Span], border: int) -> int | None:
    """The token that begins before this character and ends behind it."""
    number = bisect_left(places, border, key=itemgetter(0)) - 1
    return number if number >= 0 and places[number][1] > border else None


def _in_pieces(template: ChatTemplate, text: str, cuts: Sequence[int]) -> tuple[list[int], list[Span]]:
    """Encode as at inference: what the model is given ends at a cut, and what it writes begins there."""
    ids, places = template.encode(text[: cuts[0]])
    for start, end in itertools.pairwise([*cuts, len(text)]):
        more, spans = _continued(template, text[start:end])
        ids = [*ids, *more]
        places = [*places, *((start + first, start + last) for first, last in spans)]
    return ids, places


def _continued(template: ChatTemplate, text: str) -> tuple[list[int], list[Span]]:
    """Tokens of a text that others stand before. Tokenizers of Llama 2 and Mistral would put the mark of a word's beginning before one that
    stands alone.
    """
    ids, places = template.encode(BREAK + text)
    if across(places, len(BREAK)) is not None:
        return template.encode(text)
    first = bisect_left(places, len(BREAK), key=itemgetter(0))
    return ids[first:], [(start - len(BREAK), end - len(BREAK)) for start, end in places[first:]]


def _without_white_space(template: ChatTemplate, text: str, places: Sequence[Span], spans: Sequence[Span]) -> Sequence[Span]:
    """The places, those of special tokens at a span's end without the white space that some of them swallow (`rstrip`: Phi-3's <|end|>)."""
    places = list(places)
    for _, border in spans:
        number = across(places, border)
        if number is None:
            continue
        start, end = places[number]
        literal = text[start:end].rstrip()
        if literal.lstrip() in template.special:
            places[number] = (start, start + len(literal))
    return places


def _marked(chat: Chat, turns: Sequence[int], line: int) -> Encoded:
    """Mask by the template's marks, one for each of the assistant's messages. Raises ValueError where the template refuses the
    conversation.
    """
    assert chat.template.marked is not None  # noqa: S101 (the caller asked)
    text = chat.beginning(len(chat.messages), prompted=False)
    try:
        marked = chat.template.marked(chat.messages, chat.tools, chat.options)
    except Exception as error:  # templates raise whatever they like
        raise ValueError(f"the chat template refuses it: {first_line(error) or type(error).__name__}") from error
    messages = [number for number, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
    if len(marked) != len(messages):
        raise ValueError(
            f"the chat template marks {len(marked)} parts of it for {len(messages)} of the assistant's messages; put its generation marks"
            " around each of those once"
        )
    places = dict(zip(messages, marked, strict=True))
    last = places[messages[-1]][1]
    if not text[last:].strip() and not text[:last].rstrip().endswith(chat.template.stops):
        text = text[:last] + (next_speaker(chat.template, bool(chat.messages[messages[-1]].get("tool_calls"))) or text[last:])
    empty = next((number for number in turns if _says_something(chat.messages[number]) and not text[slice(*places[number])].strip()), None)
    if empty is not None:
        raise ValueError(
            f"the chat template's generation marks hold nothing of messages[{empty}]; put them around all that the model writes"
        )
    ended = [_ended(chat.template, text, places[number]) for number in turns]
    odd = tuple(itertools.chain.from_iterable(remarks for _, remarks in ended))
    return encoded(chat.template, text, [span for span, _ in ended], line, odd)


def _says_something(message: Message) -> bool:
    return bool(str(message.get("content") or "").strip() or message.get("tool_calls"))


def _ended(template: ChatTemplate, text: str, span: Span) -> tuple[Span, tuple[str, ...]]:
    """Extend a marked part through its stop token, which stands at its end or right behind it, and what is odd about it."""
    start, end = span
    written, following = text[start:end].rstrip(), text[end:].lstrip()
    if written.endswith(template.stops):
        return (start, start + len(written)), ()
    stop = next((stop for stop in template.stops if following.startswith(stop)), None)
    if stop is not None:
        return (start, len(text) - len(following) + len(stop)), ()
    token = next((token for token in template.special if written.endswith(token)), None)
    if token is not None:
        return (start, start + len(written)), (other_end(template, token),)
    return span, (no_end(template, written[-40:]),)


def learned_tokens(places: Sequence[Span], spans: Sequence[Span]) -> bytes:
    """A byte a token: 1 where it begins inside a span. Raises Unmasked when a token lies across the border of one."""
    learned = bytearray(len(places))
    for span in spans:
        for border in span:
            if across(places, border) is not None:
                raise Unmasked(f"a token lies across the border of the assistant's turn at character {border}")
        first, behind = (bisect_left(places, border, key=itemgetter(0)) for border in span)
        learned[first:behind] = b"\1" * (behind - first)
    return bytes(learned)
