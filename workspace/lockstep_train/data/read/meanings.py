"""Keys to which other tools give a meaning that decides what is learned: read as they mean it, or refused with what to do.

Key and value decide together: a boolean `label` beside an answer marks a bad one (KTO), `label: 3` beside a text is a class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

LEARNED = ("train", "training", "trainable", "loss", "loss_mask", "loss_scale", "loss_weight", "step_loss_mask", "weight")
"""A message's switch in Axolotl, ms-swift, XTuner, verl, slime, LLaMA-Factory, and files of OpenAI and Mistral: learned where it is on."""
MASKED = "masked"
"""The same turned round (torchtune)."""
SWITCHES = frozenset({*LEARNED, MASKED})
_TAILS = ("", "_answer", "_messages", "_output", "_response", "_text")
CHOSEN = tuple(f"{side}{tail}" for side in ("chosen", "preferred") for tail in _TAILS)
PREFERENCE = (*CHOSEN, *(f"{side}{tail}" for side in ("rejected", "non_preferred", "dispreferred") for tail in _TAILS), "response_rejected")
SHOWN = ("image", "images", "video", "videos", "audio", "audios")
MEDIA = (*SHOWN, *(f"{kind}_{tail}" for kind in ("image", "video", "audio") for tail in ("url", "urls", "path", "paths", "file")))
VERDICTS = ("kto_tag", "completion_label", "kto_label", "is_desirable", "desirable")
WEIGHTS = ("weight", "sample_weight", "loss_weight", "reward")
ROW_SWITCHES = ("train", "training", "loss", "is_trained")
MASKS = ("mask", "masks", "loss_mask", "loss_masks", "train_detail", "assistant_masks")


def switch(value: Any) -> bool | None:
    """Return what a value means as a switch, also as a number or as a table's text; None where it is none."""
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    return known.get(str(value).strip().casefold())


def _is_content(value: Any) -> bool:
    return bool(value) and isinstance(value, str | list | dict | bytes)


@dataclass(frozen=True)
class Meaning:
    """Keys that Lockstep doesn't act on, where leaving them out would change what is learned."""

    keys: tuple[str, ...]
    acts: Callable[[Any], bool]
    problem: str
    """Meaning, and what to do; `{value}`: its value."""
    readable: bool = True
    """True if it is sensible to read the row without the key."""
    beside_text: bool = False
    """True if it counts beside a plain `text`, too, where there is no answer."""


_TWO = "is of a row with a better and a worse answer (DPO, reward models), and Lockstep learns from single answers"
_UNSEEN = "is a picture, a video or a sound, which the model wouldn't be shown: leave such rows out"
_BAD = "is {value}: it marks what is not to be learned (a bad answer, in KTO's sets); training.data.onBroken: Drop leaves such rows out"
_ONCE = "is {value}, but a row is learned once, whatever its weight or reward: leave out rows that are bad"
_PARTS = "says which parts are learned: mark messages that are not by `train: false` instead"
MEANINGS = (
    Meaning(PREFERENCE, _is_content, _TWO, beside_text=True),
    Meaning(SHOWN, _is_content, _UNSEEN, beside_text=True),
    Meaning(MEDIA, _is_content, _UNSEEN),
    Meaning(("label", *ROW_SWITCHES), lambda value: str(value).casefold() == "false", _BAD, readable=False),
    Meaning(VERDICTS, lambda value: switch(value) is False, _BAD, readable=False),
    Meaning(WEIGHTS, lambda value: isinstance(value, int | float) and switch(value) is not True, _ONCE),
    Meaning(MASKS, lambda value: str(value).casefold() not in ("", "user", "human", "system"), _PARTS),
)
"""Keys beside a form of sample, and what to do about each. Masks may name whose words are never learned anyway (NeMo's `mask: User`)."""
NAMED = frozenset(key for meaning in MEANINGS for key in meaning.keys)
OF_MESSAGE = frozenset({*PREFERENCE, *MEDIA, *MASKS, *VERDICTS, "label"} - SWITCHES)
"""Those that count in a single message, too."""


def meanings_of(record: Mapping[str, Any], *, answered: bool, keys: Set[str] = NAMED) -> Iterator[tuple[str, Meaning]]:
    """Yield each key that would change what is learned. `answered`: there is more than a plain text."""
    present = [key for key, value in record.items() if key in keys and value is not None]
    for meaning in MEANINGS if present else ():
        if answered or meaning.beside_text:
            yield from ((key, meaning) for key in meaning.keys if key in present and meaning.acts(record[key]))


def is_trained(message: Mapping[str, Any], number: int) -> bool:
    """Return True if a message is learned by its switches; they say nothing of messages that are not the assistant's. Raises ValueError."""
    values = {key: switch(value) for key, value in message.items() if key in SWITCHES and value is not None}
    odd = next((key for key, value in values.items() if value is None), None)
    if odd is not None:
        raise ValueError(f"`{odd}` of message {number} is {message[odd]!r}, but must be true or 1 (learned), or false or 0 (not learned)")
    learned = all(value is not (key == MASKED) for key, value in values.items())
    if values and learned and message["role"] != "assistant":
        said = f"message {number} is marked to be learned, but its role is {message['role']}"
        raise ValueError(f"{said}: only the assistant's messages can be learned")
    return learned or message["role"] != "assistant"


QUESTIONS = ("question", "query", "prompt", "instruction", "problem", "input", "user", "human", "article", "document", "context", "text")
ANSWERS = ("answer", "response", "output", "completion", "generation", "solution", "target", "assistant", "reply", "summary", "translation")
ALONG = {"input": ("context", "article"), "system": ("system_prompt",)}
TEXTS = ("text", "content", "document", "body", "code", "article", "story")
FORMLESS = {
    "input_ids": "it holds tokens, and Lockstep makes tokens of texts itself",
    "completions": "`completions` are several answers to one prompt (reward models), and Lockstep learns from single answers",
    "prompt": "it has a `prompt` and no answer (as sets for reinforcement learning have), so there is nothing to learn",
}
"""Keys of rows that have no form that is read → what such a row is."""
CHATS = ("messages", "conversations", "conversation", "dialog", "dialogue", "chat", "turns")


def is_chat(value: Any) -> bool:
    """Return True for a list of messages of any tool."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and bool({"role", "from"} & value[0].keys())


def mapping(record: Mapping[str, Any]) -> dict[str, str]:
    """Our key → the column that a row seems to have for it; none where nothing can be said."""
    names = {str(key).casefold(): key for key in record}

    def first(keys: tuple[str, ...], fits: Callable[[Any], bool]) -> str | None:
        return next((names[key] for key in keys if key in names and fits(record[names[key]])), None)

    chosen = first(CHOSEN, _is_content)
    question = first((*QUESTIONS, *CHATS), lambda value: _is_text(value) or is_chat(value))
    answer, chat = first(ANSWERS, _is_text), first(CHATS, is_chat)
    pairs: dict[str, str | None]
    if chosen is not None:
        pairs = {"messages": chosen} if is_chat(record[chosen]) and len(record[chosen]) > 1 else {"prompt": question, "completion": chosen}
    elif chat is not None:
        pairs = {"messages": chat}
    elif question is not None and answer is not None:
        asked, answered = ("prompt", "completion") if is_chat(record[question]) else ("instruction", "output")
        along = {key: first(keys, lambda _: True) for key, keys in ALONG.items() if key not in record}
        more = {key: name for key, name in along.items() if name is not None and name not in (question, answer)}
        pairs = {asked: question, answered: answer, **more}
    else:
        pairs = {"text": first((*TEXTS, *ANSWERS), _is_text) if question is None or question.casefold() in TEXTS else None}
    known = {key: name for key, name in pairs.items() if name is not None}
    return known if len(known) == len(pairs) else {}


def setting(columns: Mapping[str, str]) -> str:
    """Say what to write in a job file, so that keys are read by these columns."""
    quoted = {key: name if name.isidentifier() else json.dumps(name, ensure_ascii=False) for key, name in columns.items() if key != name}
    return f"training.data.columns: {{{', '.join(f'{key}: {name}' for key, name in quoted.items())}}}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
