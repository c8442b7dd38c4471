"""Samples from single objects of a file or a table: a pure function, the same for lines, arrays and rows.

| keys | form |
|---|---|
| messages, conversations | chats: role and content, or from and value as ShareGPT has them |
| prompt, completion | text, or lists of messages |
| instruction, output | Alpaca: one question, maybe with input, system and history |
| text | plain |
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lockstep_spec.choices import TEMPLATE_OWN
from lockstep_train.data.read import meanings
from lockstep_train.data.read.meanings import SWITCHES, Meaning, is_trained, mapping, meanings_of, setting

SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard", "ai", "bot", "chatbot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response", "function", "tool_response", "tool_result", "tool_output"), "tool"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "call"),
}
"""Role of each of other tools' names; `call`: the assistant, calling tools."""
ROLES = frozenset({*SPEAKERS.values(), "developer"})
OF_CHATS = ("system", "tools", "functions", "chat_template_kwargs")
FORMS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): OF_CHATS,
    ("conversations",): OF_CHATS,
    ("prompt", "completion"): OF_CHATS,
    ("instruction", "output"): ("input", "history", *OF_CHATS),
    ("text",): (),
}
"""Keys that a record needs, all of one form → those that are read with them. The first form that a record has counts."""
OF_FORMS = tuple(key for form in FORMS for key in form)
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
OF_MESSAGES = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", *THOUGHTS, *SWITCHES}
"""Keys of messages that are read; all others go to the chat template, which may ignore them."""
TEXT_PARTS = ("text", "input_text", "output_text", None)
PICTURED = re.compile(r"<(?:(image|video|audio)>(?:\s*\Z|(?<=\A.{7})(?!.*</\1>))|img>[^<>]+</img>)", re.DOTALL)
"""Place of a picture in a user's message (LLaVA, ms-swift, Qwen-VL, …); in the middle of a text, or with an end, the first are HTML's."""
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
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
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the row that are not read."""

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
    """Numbers of the assistant's messages that are not learned: `train: false`, `weight: 0` and the like."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The row's `chat_template_kwargs`."""
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Keys of the row that are not read."""

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


def sample_of(record: Mapping[str, Any], line: int, *, columns: Mapping[str, str] = NO_COLUMNS) -> AnySample:
    """Sample that a record holds; of several forms in one record the first of the module's table counts, before it one that `columns` name
    (our key → the record's; nothing: it is not to be read). Raises ValueError, also for keys that would change what is learned.

    Keys without a value are as good as absent: tables fill them in.
    """
    row = mapped(record, columns) if columns else record
    form = next((form for form in sorted(FORMS, key=lambda form: not any(map(columns.get, form))) if _has(row, form)), None)
    if not meanings.NAMED.isdisjoint(row):
        _refuse_meanings(row, form)
    if form is None:
        raise ValueError(_formless(row))
    off = {key for key, value in record.items() if columns.get(key) == "" or (value is True and key in meanings.NAMED)}
    read = off.union(columns.get(key, key) for key in (*form, *FORMS[form]))
    unread = [key for key, value in record.items() if key not in read and value not in (None, "", [], {})]
    return _sample(row, form, line, (*unread, *_unread_of_messages(row, form)))


def mapped(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A record under our keys. `columns`: our key → the record's; nothing: it is not to be read."""
    others = {key: value for key, value in record.items() if key not in columns and key not in columns.values()}
    return {**others, **{key: record[name] for key, name in columns.items() if name in record}}


def _has(record: Mapping[str, Any], form: tuple[str, ...]) -> bool:
    """Return True if all keys of a form have a value. Raises ValueError where one of two that are there has none: the row's `text`, if it
    has one, may be the bare question.
    """
    filled = [key for key in form if record.get(key) is not None]
    if len(filled) == 1 < len(form) and all(key in record for key in form):
        raise ValueError(f"`{next(key for key in form if key not in filled)}` has no value")
    return len(filled) == len(form)


def _formless(record: Mapping[str, Any]) -> str:
    advice = mapping(record)
    foreign = next((words for key, words in meanings.FORMLESS.items() if record.get(key)), None)
    if foreign is not None and not advice:
        return foreign
    lists = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and not advice:
        return (
            f"its `{lists[0]}` holds objects with {quoted(record[lists[0]][0])}: write them as `messages` with `role` and `content`, or, if"
            f" they are the rows, one a line (jq -c '.{lists[0]}[]' FILE > NEW)"
        )
    return (
        "neither `messages`, nor `conversations`, nor `prompt` and `completion`, nor `instruction` and `output`, nor `text`"
        f"; the row has {quoted(record)}; say which of them to read"
        + (f", for example by {setting(advice)}" if advice else " in training.data.columns")
    )


def quoted(keys: Iterable[str], most: int = 8) -> str:
    """Keys for people, so many of them."""
    names = [f"`{key}`" for key in keys]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _refuse_meanings(record: Mapping[str, Any], form: tuple[str, ...] | None) -> None:
    """Raise ValueError for a row's first key that would change what is learned, with the columns that would read the row all the same."""
    acting = dict(meanings_of(record, answered=form != ("text",)))
    for key, meaning in acting.items():
        chat: Any = record[form[0]] if form is not None and len(form) == 1 else None
        asks = form is None or (meanings.is_chat(chat) and _speaker(chat[-1]) != "assistant")
        columns = mapping(record) if asks else {}
        columns |= {key: "" for key in acting if key not in columns.values()}
        pictured = key in meanings.MEDIA and any(PICTURED.search(text.lstrip()) for text in texts_of(record))
        useful = meaning.readable and not pictured and (not asks or any(columns.values()))
        raise ValueError(_refusal(f"`{key}`", record[key], meaning) + (f"; with {setting(columns)} it can be learned" if useful else ""))


def _refusal(place: str, value: Any, meaning: Meaning) -> str:
    return f"{place} {meaning.problem.format(value=str(value).lower() if isinstance(value, bool) else str(value)[:40])}"


def _unread_of_messages(record: Mapping[str, Any], form: tuple[str, ...]) -> list[str]:
    """Keys of a row's messages that only a chat template might read."""
    messages = [message for key in form if isinstance(record[key], list) for message in record[key] if isinstance(message, dict)]
    keys = {key for message in messages for key in message if key not in OF_MESSAGES and message[key] is not None}
    roles = {role for message in messages if (role := _speaker(message)) not in ROLES}
    return [f"{form[0]}[].{key}" for key in sorted(keys)] + [f"role {role}" for role in sorted(roles)]


def _sample(record: Mapping[str, Any], form: tuple[str, ...], line: int, unread: tuple[str, ...]) -> AnySample:
    if form == ("text",):
        return Sample(_text(record, "text"), None, line, unread)
    if form == ("instruction", "output"):
        return _conversation(record, _alpaca(record), 0, line, unread)
    if form != ("prompt", "completion"):
        return _conversation(record, _messages(record, form[0]), 0, line, unread)
    if isinstance(record["prompt"], str) and isinstance(record["completion"], str) and not record["prompt"].lstrip().startswith("[{"):
        if record.get("system"):
            raise ValueError("`system` isn't read beside a `prompt` that is text: put it into the prompt, or write `messages`")
        _refuse_pictured(record["prompt"], "`prompt`")
        return Sample(_text(record, "completion"), _text(record, "prompt"), line, unread)
    prompt = _messages(record, "prompt", "user")
    return _conversation(record, [*prompt, *_messages(record, "completion", "assistant")], len(prompt), line, unread)


def _refuse_pictured(text: str | None, place: str) -> None:
    picture = PICTURED.search((text or "").lstrip())
    if picture is not None:
        raise ValueError(f"{place} has the place of a picture or a sound ({picture.group().strip()[:40]}), which the model isn't shown")


def _conversation(
    record: Mapping[str, Any], messages: list[dict[str, Any]], prompt_count: int, line: int, unread: tuple[str, ...]
) -> Conversation:
    system = _system(record)
    if system and messages[0]["role"] == "system":
        if messages[0]["content"] != system[0]["content"]:
            raise ValueError("`system` and the first message are two different system messages: leave one out")
        system = []
    messages = [*system, *messages]
    for number, message in enumerate(messages):
        if message["role"] == "user":
            _refuse_pictured(message["content"], f"message {number}")
    untrained = tuple(number for number, message in enumerate(messages) if not is_trained(message, number))
    given = prompt_count + len(system) * bool(prompt_count)
    for number in range(given, len(messages)):
        said = (str(messages[number].get(name) or "") for name in ("content", "tool_calls", *THOUGHTS))
        if messages[number]["role"] == "assistant" and number not in untrained and not any(map(str.strip, said)):
            raise ValueError(f"message {number} is an empty answer, which would teach to stop at once: mark it by `train: false`")
    rendered = tuple(_without(message, *SWITCHES) for message in messages)
    return Conversation(rendered, given, _tools(record), line, untrained, _options(record), unread)


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record[key]
    if not isinstance(value, str):
        raise ValueError(f"`{key}` is not a string")
    if not value.strip():
        raise ValueError(f"`{key}` is empty")
    return value


def _messages(record: Mapping[str, Any], key: str, speaker: str = "") -> list[dict[str, Any]]:
    """Messages of a key; where it holds a text or one message, and not a list of them, that is the speaker's."""
    value = record[key]
    if speaker and isinstance(value, str) and not value.lstrip().startswith("[{"):
        return [{"role": speaker, "content": _text(record, key)}]
    value = [value] if speaker and isinstance(value, dict) else _list(value, key)
    if not value:
        raise ValueError(f"`{key}` is not a list of messages")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value):
        read = _message(message, f"{key}[{number}]")
        before = messages[-1] if messages else read
        called = "tool_calls" in read and _speaker(message) == "call" and before is not read
        if called and all(before.get(name) == read.get(name) for name in ("role", *SWITCHES)):
            before["tool_calls"] = [*before.get("tool_calls", []), *read["tool_calls"]]  # one turn: text and calls, or several calls
        else:
            messages.append(read)
    return messages


def _speaker(message: Mapping[str, Any]) -> str:
    name = str(message.get("role" if isinstance(message.get("role"), str) else "from"))
    return SPEAKERS.get(name) or SPEAKERS.get(name.strip().casefold(), name)


def _message(message: object, place: str) -> dict[str, Any]:
    """Message in the form that templates know, whether it has `role` and `content` or `from` and `value`, also where it has the older one,
    of one `function_call` and answers of a `function`.
    """
    if not isinstance(message, dict) or not any(isinstance(message.get(name), str) for name in ("role", "from")):
        raise ValueError(f"`{place}` is not an object with a `role` and a `content`, or with `from` and `value`{_keys_of(message)}")
    for key, meaning in meanings_of(message, answered=True, keys=meanings.OF_MESSAGE):
        raise ValueError(_refusal(f"`{key}` of `{place}`", message[key], meaning))
    role, calls = _speaker(message), _tool_calls(message, place)
    if "role" not in message and role not in SPEAKERS.values():
        raise ValueError(f"`{place}` is from {message['from']!r}; valid are {', '.join(SPEAKERS)}")
    raw = message.get("content") if message.get("content") is not None else message.get("value")
    if role == "call":
        role, raw, calls = "assistant", "", _calls(raw, f"`{place}`")
    content = _content(raw, place)
    if content is None and not calls:
        raise ValueError(f"`{place}` has neither a `content` that is a string nor `tool_calls`")
    changed = {"role": role, "content": content, "tool_calls": calls}
    return _without({name: changed.get(name, value) for name, value in {**message, **changed}.items()}, "function_call", "from", "value")


def _keys_of(value: object) -> str:
    return f" (it has {quoted(value)})" if isinstance(value, dict) and value else ""


def _without(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """An object without these keys, and without those that have no value."""
    return {name: item for name, item in value.items() if item is not None and name not in names}


def _content(content: Any, place: str) -> str | None:
    """Content as one text: parts that are text are its lines."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for number, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str) or any(key in part for key in SWITCHES):
            words = "Lockstep learns text: a string, or a list of parts that have the type text and a `text`"
            raise ValueError(f"`{place}.content[{number}]` is of the type {kind}{_keys_of(part)}, and {words}")
    return "\n".join(part["text"] for part in parts) if parts else None


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


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Calls of tools as messages have them, of one object or a list of them with `name` and `arguments`, maybe as JSON."""
    value = _decoded(value, place)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call for call in calls):
        raise ValueError(f"{place} is a call of a tool, but its value is not a JSON object with `name` and `arguments`")
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
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


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
