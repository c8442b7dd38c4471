"""Samples from single objects of a file or a table: a pure function, the same for lines, arrays and rows.

| keys | form |
|---|---|
| messages | chats as OpenAI and most tokenizers have them |
| conversations | chats as ShareGPT has them: from and value |
| prompt, completion | text, or lists of messages |
| instruction, output | Alpaca: one question, maybe with input, system and history |
| text | plain |
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep_spec.choices import TEMPLATE_OWN

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""ShareGPT's `from` → role. The calls of tools are spoken by:"""
CALLER = "function_call"
FORMS = ("messages", "conversations", "prompt", "completion", "instruction", "output", "text")
"""Keys of which a record needs some."""
KEYS = (*FORMS, "input", "system", "history", "tools", "chat_template_kwargs")
"""All keys that are read."""
TOO_DEEP = "lists or objects nested too deeply to be read"


def texts_of(value: Any) -> Iterator[str]:
    """Yield all strings within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in itertools.chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            yield from texts_of(item)


def refuse_half_characters(*values: Any) -> None:
    """Raise ValueError where JSON's escapes made a string that has no UTF-8."""
    for text in texts_of(values):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"it holds half a surrogate pair (\\u{ord(text[error.start]):x}), which no tokenizer can read: write the character whole,"
                " or leave it out"
            ) from error


@dataclass(frozen=True)
class Sample:
    """Text as it was read. With a `prompt`, only the `text` after it is the answer. Raises ValueError for half a character."""

    text: str
    prompt: str | None
    line: int
    """Number of its first line in the file, from 1."""

    def __post_init__(self) -> None:
        refuse_half_characters(self.text, self.prompt)

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.prompt or "")


@dataclass(frozen=True)
class Conversation:
    """Messages for the tokenizer's chat template. Raises ValueError for half a character."""

    messages: tuple[dict[str, Any], ...]
    prompt_count: int
    """Number of messages that are the prompt: never learned, whoever speaks."""
    tools: tuple[Any, ...]
    line: int
    untrained: tuple[int, ...] = ()
    """Numbers of the assistant's messages that are not learned: `train: false` or `weight: 0`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The row's `chat_template_kwargs`."""

    def __post_init__(self) -> None:
        refuse_half_characters(self.messages, self.tools, self.options)

    @property
    def characters(self) -> int:
        """Approximate number, for nothing is rendered yet."""
        return len(str(self.messages)) + len(str(self.tools))


AnySample = Sample | Conversation


def parse_object(line: str) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises ValueError."""
    try:
        record = json.loads(line)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from error
    return object_of(record)


def object_of(record: object) -> dict[str, Any]:
    """Return a record that is a JSON object. Raises ValueError for what is none."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def sample_of(record: Mapping[str, Any], line: int) -> AnySample:
    """Sample that a record holds; of several forms in one record the first of the module's table counts. Raises ValueError.

    Keys without a value are as good as absent: tables fill them in.
    """
    if record.get("messages") is not None:
        return _conversation(record, _messages(record, "messages"), 0, line)
    if record.get("conversations") is not None:
        return _conversation(record, _share_gpt(record), 0, line)
    if _are_filled(record, "prompt", "completion"):
        if isinstance(record["prompt"], str):
            return Sample(_text(record, "completion"), _text(record, "prompt"), line)
        prompt = _messages(record, "prompt")
        return _conversation(record, [*prompt, *_messages(record, "completion")], len(prompt), line)
    if _are_filled(record, "instruction", "output"):
        return _conversation(record, _alpaca(record), 0, line)
    if record.get("text") is not None:
        return Sample(_text(record, "text"), None, line)
    raise ValueError("neither `messages`, nor `conversations`, nor `prompt` and `completion`, nor `instruction` and `output`, nor `text`")


def _are_filled(record: Mapping[str, Any], question: str, answer: str) -> bool:
    """Return True if both keys have a value. Raises ValueError where one of two that are there has none: the row's `text`, if it has one,
    may be the bare question.
    """
    has_question, has_answer = record.get(question) is not None, record.get(answer) is not None
    if has_question != has_answer and question in record and answer in record:
        raise ValueError(f"`{answer if has_question else question}` has no value")
    return has_question and has_answer


def _conversation(record: Mapping[str, Any], messages: list[dict[str, Any]], prompt_count: int, line: int) -> Conversation:
    untrained = tuple(number for number, message in enumerate(messages) if not _is_trained(message, number))
    rendered = tuple(_without(message, "train", "weight") for message in messages)
    return Conversation(rendered, prompt_count, _tools(record), line, untrained, _options(record))


def _is_trained(message: Mapping[str, Any], number: int) -> bool:
    """Return True if a message is learned, by `train` and `weight`; it says nothing of messages that are not the assistant's. Raises
    ValueError.
    """
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"`train` of message {number} is neither true nor false")
    if weight is not None and weight not in (0, 1):
        raise ValueError(f"`weight` of message {number} is {weight!r}, but only 0 (not learned) and 1 are possible")
    learned = train is not False and weight != 0
    if message["role"] == "assistant":
        return learned
    if train is True or weight == 1:
        raise ValueError(
            f"message {number} is marked to be learned, but its role is {message['role']}: only the assistant's messages can be learned"
        )
    return True


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not a string")
    if not value.strip():
        raise ValueError(f"`{key}` is empty")
    return value


def _messages(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = _list(record[key], key)
    if not value:
        raise ValueError(f"`{key}` is not a list of messages")
    return [_message(message, f"{key}[{number}]") for number, message in enumerate(value)]


def _message(message: object, place: str) -> dict[str, Any]:
    """Message in the form that templates know, also where it has the older one, of one `function_call` and answers of a `function`."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"`{place}` is not an object with a `role`")
    calls = _tool_calls(message, place)
    content = _content(message.get("content"), place)
    if content is None and not calls:
        raise ValueError(f"`{place}` has neither a `content` that is a string nor `tool_calls`")
    changed = {"role": "tool" if message["role"] == "function" else message["role"], "content": content, "tool_calls": calls}
    return _without({name: changed.get(name, value) for name, value in {**message, **changed}.items()}, "function_call")


def _without(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """An object without these keys, and without those that have no value."""
    return {name: item for name, item in value.items() if item is not None and name not in names}


def _content(content: Any, place: str) -> str | None:
    """Content as one text: parts that are text are its lines."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts) or any(part.get("type") not in (None, "text") for part in parts):
        raise ValueError(f"the `content` of `{place}` is neither a string nor a list of parts of the type text")
    return "\n".join(texts) if texts else None


def _tool_calls(message: Mapping[str, Any], place: str) -> list[dict[str, Any]] | None:
    calls, older = (_decoded(message.get(name) or None, f"`{name}` of `{place}`") for name in ("tool_calls", "function_call"))
    if calls and older:
        raise ValueError(f"`{place}` has both `tool_calls` and the older `function_call`: leave one out")
    if calls and not isinstance(calls, list):
        raise ValueError(f"`tool_calls` of `{place}` is not a list")
    name = "tool_calls" if calls else "function_call"
    return [_call(call, f"{place}.{name}[{number}]") for number, call in enumerate(calls or ([older] if older else []))] or None


def _call(call: object, place: str) -> dict[str, Any]:
    """Call with the object around the function that templates expect, and keys in the order of servers, for some templates render all of
    them.
    """
    outer = _without(call) if isinstance(call, dict) else {}
    own = {"id", "type", "index"}
    function = outer.pop("function", None) or {name: outer.pop(name) for name in list(outer) if name not in own}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"`{place}` is not an object with a `function` that has a `name` and `arguments`")
    if function.get("arguments") is None and "parameters" in function:
        raise ValueError(f"`{place}` has `parameters`, which are a tool's; those of a call are `arguments`")
    outer.setdefault("type", "function")
    return {**outer, "function": {"name": function["name"], "arguments": {}} | _without(function)}


def _share_gpt(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`conversations`, after a `system` of the record's own. Those that hold `role` and `content` are read as `messages` are."""
    value = _list(record["conversations"], "conversations")
    if value and isinstance(value[0], dict) and "from" not in value[0]:
        return [*_system(record), *_messages({"conversations": value}, "conversations")]
    if not value:
        raise ValueError("`conversations` is not a list of messages")
    return [*_system(record), *(_spoken(message, number) for number, message in enumerate(value))]


def _spoken(message: object, number: int) -> dict[str, Any]:
    place = f"`conversations[{number}]`"
    if not isinstance(message, dict) or not isinstance(message.get("from"), str) or not isinstance(message.get("value"), str):
        raise ValueError(f"{place} is not an object with `from` and `value`")
    marks = {name: message.get(name) for name in ("train", "weight")}
    if message["from"] == CALLER:
        return {"role": "assistant", "content": "", "tool_calls": _calls(message["value"], place), **marks}
    role = SPEAKERS.get(message["from"])
    if role is None:
        raise ValueError(f"{place} is from {message['from']!r}; valid are {', '.join([*SPEAKERS, CALLER])}")
    return {"role": role, "content": message["value"], **marks}


def _calls(text: str, place: str) -> list[dict[str, Any]]:
    """Calls of tools as messages have them, of one object or a list of them with `name` and `arguments`, as JSON."""
    value = _decoded(text, place)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call for call in calls):
        raise ValueError(f"{place} is a {CALLER}, but its value is not a JSON object with `name` and `arguments`")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": _decoded(call["arguments"], f"`arguments` of {place}")}}
        for call in calls
    ]


def _alpaca(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The instruction, with its input below it, as the user's message, after `system` and the turns of `history`."""
    history = _decoded(record.get("history") or [], "history")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError("`history` is not a list of pairs of question and answer")
    if not isinstance(record.get("input") or "", str):
        raise ValueError("`input` is not a string")
    question = "\n".join(part for part in (_text(record, "instruction"), record.get("input") or "") if part)
    texts = [text for pair in history for text in pair] + [question, _text(record, "output")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`history` holds values that are not strings")
    return [*_system(record), *({"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts))]


def _system(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    system = record.get("system") or ""
    if not isinstance(system, str):
        raise ValueError("`system` is not a string")
    return [{"role": "system", "content": system}] if system.strip() else []


def _tools(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tools of a record. A function that stands there bare, as in ShareGPT's files and OpenAI's older `functions`, gets the object around
    it that templates expect.
    """
    name = "functions" if record.get("functions") and not record.get("tools") else "tools"
    value = _decoded(record.get(name) or [], name)
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is not a list")
    bare = name == "functions" or (record.get("messages") is None and record.get("conversations") is not None)
    return tuple(
        {"type": "function", "function": tool} if bare and isinstance(tool, dict) and "name" in tool and "function" not in tool else tool
        for tool in value
    )


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    value = _decoded(record.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if not isinstance(value, dict):
        raise ValueError("`chat_template_kwargs` is not an object")
    own = sorted(TEMPLATE_OWN & value.keys())
    if own:
        raise ValueError(f"`chat_template_kwargs` holds {', '.join(own)}, which is set for every chat")
    return value


def _list(value: Any, name: str) -> list[Any]:
    """List that a value is, or holds as JSON text; empty for what is none."""
    decoded = _decoded(value, name) if isinstance(value, str) and value.lstrip().startswith("[") else value
    return decoded if isinstance(decoded, list) else []


def _decoded(value: Any, name: str) -> Any:
    """Decode a value: tables without nested columns hold lists and objects as JSON text. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name if '`' in name else f'`{name}`'} is not valid JSON ({error})") from error
