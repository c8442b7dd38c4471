"""Every form of a row becomes the same samples, whether it comes from a line, an array or a table."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read import text_files as read_module
from lockstep_train.data.read.records import AnySample, Conversation, Sample, sample_of
from lockstep_train.data.read.text_files import Broken, read_jsonl

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CHAT = Conversation((USER, ASSISTANT), 0, (), 1)
FUNCTION = {"name": "f", "parameters": {}}
TOOL = {"type": "function", "function": FUNCTION}


def spoken(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"conversations": spoken(("human", "q"), ("gpt", "a"))}, (USER, ASSISTANT)),
        ({"conversations": spoken(("user", "q"), ("assistant", "a"))}, (USER, ASSISTANT)),
        ({"conversations": spoken(("system", "s"), ("human", "q"), ("gpt", "a"))}, (SYSTEM, USER, ASSISTANT)),
        ({"conversations": spoken(("human", "q"), ("gpt", "a")), "system": "s"}, (SYSTEM, USER, ASSISTANT)),
        ({"conversations": spoken(("human", "q"), ("gpt", "a")), "system": ""}, (USER, ASSISTANT)),
        ({"conversations": [USER, ASSISTANT]}, (USER, ASSISTANT)),
        ({"conversations": json.dumps(spoken(("human", "q"), ("gpt", "a")))}, (USER, ASSISTANT)),
        ({"instruction": "q", "output": "a"}, (USER, ASSISTANT)),
        ({"instruction": "q", "input": "", "output": "a", "text": "as one text"}, (USER, ASSISTANT)),
        ({"instruction": "q", "input": "more", "output": "a"}, (USER | {"content": "q\nmore"}, ASSISTANT)),
        ({"instruction": "q", "output": "a", "system": "s", "history": [["1", "2"]]},
            (SYSTEM, {**USER, "content": "1"}, {**ASSISTANT, "content": "2"}, USER, ASSISTANT)),
        ({"messages": [USER, ASSISTANT], "conversations": spoken(("human", "other"))}, (USER, ASSISTANT)),
        ({"messages": json.dumps([USER, ASSISTANT])}, (USER, ASSISTANT)),
    ],
)  # fmt: skip
def test_chats_of_every_form_are_messages(record: dict[str, Any], messages: tuple[dict[str, str], ...]) -> None:
    assert sample_of(record, 1) == Conversation(messages, 0, (), 1)


@pytest.mark.parametrize("tools", [[FUNCTION], [TOOL], json.dumps([FUNCTION])])
def test_calls_of_tools_in_the_form_of_sharegpt_are_those_of_messages(tools: Any) -> None:
    call = json.dumps({"name": "f", "arguments": {"x": 1}})
    record = {"conversations": spoken(("human", "q"), ("function_call", call), ("observation", "42"), ("gpt", "a")), "tools": tools}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = (USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "42"}, ASSISTANT)
    assert sample_of(record, 1) == Conversation(messages, 0, (TOOL,), 1)


def test_tools_of_messages_stay_as_they_are() -> None:
    assert sample_of({"messages": [USER, ASSISTANT], "tools": [FUNCTION]}, 1) == Conversation((USER, ASSISTANT), 0, (FUNCTION,), 1)


FULL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TEXT = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
EMPTY = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ({"tool_calls": [FULL]}, [FULL]),
        ({"tool_calls": json.dumps([FULL])}, [FULL]),
        ({"tool_calls": [{"id": "a", "function": FULL["function"]}]}, [{"id": "a", **FULL}]),
        ({"tool_calls": [{"id": "a", "name": "f", "arguments": {"x": 1}}]}, [{"id": "a", **FULL}]),
        ({"tool_calls": [{"function": None, "name": "f", "arguments": None}]}, [EMPTY]),
        ({"tool_calls": [{"function": {"name": "f"}}]}, [EMPTY]),
        ({"function_call": {"name": "f", "arguments": '{"x": 1}'}}, [TEXT]),
        ({"function_call": {"name": "f", "arguments": '{"x": 1}'}, "tool_calls": []}, [TEXT]),
    ],
)
def test_calls_of_tools_have_one_form_also_those_of_the_older_function_call(message: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    sample = sample_of({"messages": [USER, {"role": "assistant", "content": "", **message}, {"role": "function", "content": "42"}]}, 1)
    assert sample == Conversation((USER, ASSISTANT | {"content": "", "tool_calls": calls}, {"role": "tool", "content": "42"}), 0, (), 1)


def test_functions_of_the_older_form_are_tools() -> None:
    assert sample_of({"messages": [USER, ASSISTANT], "functions": [FUNCTION]}, 1) == Conversation((USER, ASSISTANT), 0, (TOOL,), 1)


@pytest.mark.parametrize("calls", [{}, {"tool_calls": [FULL]}])
def test_parts_of_a_content_that_are_text_are_its_lines(calls: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sample_of({"messages": [USER, ASSISTANT | calls | {"content": parts}]}, 1) == Conversation(
        (USER, ASSISTANT | calls | {"content": "a\nb"}), 0, (), 1
    )


HALF = json.loads('"a \\ud83d"')


@pytest.mark.parametrize(
    "record",
    [
        {"text": HALF},
        {"prompt": HALF, "completion": "a"},
        {"prompt": "q", "completion": HALF},
        {"instruction": "q", "output": HALF},
        {"messages": [USER, ASSISTANT | {"content": HALF}]},
        {"messages": [USER, ASSISTANT | {"reasoning_content": HALF}]},
        {"messages": [USER, ASSISTANT | {"tool_calls": [{"function": {"name": "f", "arguments": {HALF: 1}}}]}]},
        {"messages": json.dumps([USER, ASSISTANT | {"content": HALF}])},
        {"messages": [USER, ASSISTANT], "tools": [FUNCTION | {"description": HALF}]},
        {"messages": [USER, ASSISTANT], "chat_template_kwargs": {"mood": HALF}},
    ],
)
def test_half_a_surrogate_pair_is_a_fault_of_its_row(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"it holds half a surrogate pair \(\\ud83d\), which no tokenizer can read"):
        sample_of(record, 1)
    assert sample_of({"text": "a", "note": HALF}, 1) == Sample("a", None, 1), "what isn't read is no matter"


def test_half_a_surrogate_pair_of_a_paragraph_is_a_fault_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": HALF}) + '\n{"text": "a"}\n')
    broken = Broken("x.jsonl")
    assert list(read_jsonl(tmp_path / "x.jsonl", broken, read_module.paragraph_of)) == [Sample("a", None, 2)]
    assert broken.first == [
        "x.jsonl:1: it holds half a surrogate pair (\\ud83d), which no tokenizer can read: write the character whole, or leave it out"
    ]


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"weight": 0.0}, {"train": False, "weight": None}])
def test_a_message_that_is_not_to_be_learned_is_numbered_and_the_mark_does_not_reach_the_template(mark: dict[str, Any]) -> None:
    messages = [USER, ASSISTANT | mark, USER | {"train": False}, ASSISTANT | {"train": True, "weight": 1}]
    assert sample_of({"messages": messages}, 1) == Conversation((USER, ASSISTANT, USER, ASSISTANT), 0, (), 1, (1,))
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **mark}]
    assert sample_of({"conversations": said}, 1) == Conversation((USER, ASSISTANT), 0, (), 1, (1,))


@pytest.mark.parametrize("options", [{"enable_thinking": False}, json.dumps({"enable_thinking": False})])
def test_a_row_may_set_variables_of_the_template(options: Any) -> None:
    assert sample_of({"messages": [USER, ASSISTANT], "chat_template_kwargs": options}, 1) == Conversation(
        (USER, ASSISTANT), 0, (), 1, (), {"enable_thinking": False}
    )


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"conversations": []}, "`conversations` is not a list of messages"),
        ({"conversations": [{"from": "human"}]}, r"`conversations\[0\]` has neither a `content` that is a string"),
        ({"conversations": spoken(("alien", "x"))}, r"`conversations\[0\]` is from 'alien'; valid are human, .*function_call"),
        ({"conversations": spoken(("function_call", "f(1)"))}, r"`conversations\[0\]` is not valid JSON"),
        ({"conversations": spoken(("function_call", "{}"))},
            r"`conversations\[0\]` is a call of a tool, but its value is not a JSON object with `name`"),
        ({"instruction": "q", "output": ""}, "`output` is empty"),
        ({"instruction": "q", "output": "a", "input": 3}, "`input` is not a string"),
        ({"instruction": "q", "output": "a", "history": [["1"]]}, "`history` is not a list of pairs"),
        ({"instruction": "q", "output": "a", "history": [[1, "2"]]}, "`history` holds values that are not strings"),
        ({"instruction": "q", "output": "a", "system": 1}, "`system` is not a string"),
        ({"messages": [ASSISTANT | {"weight": 0.5}]}, "`weight` of message 0 is 0.5, but must be true or 1"),
        ({"messages": [ASSISTANT | {"train": "no"}]}, "`train` of message 0 is 'no', but must be true or 1"),
        ({"messages": [USER | {"train": True}]},
            "message 0 is marked to be learned, but its role is user: only the assistant's messages can be learned"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": [1]}, "`chat_template_kwargs` is not an object"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": {"tools": []}},
            "`chat_template_kwargs` holds tools, which is set for every chat"),
        ({"messages": [ASSISTANT | {"content": [{"type": "image_url", "image_url": {}}]}]},
            r"`messages\[0\].content\[0\]` is of the type image_url \(it has `type`, `image_url`\), and Lockstep learns text"),
        ({"messages": [ASSISTANT | {"content": 5, "tool_calls": [FULL]}]},
            r"`messages\[0\].content\[0\]` is of the type int, and Lockstep learns text"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]},
            r"`messages\[0\]` has neither a `content` that is a string nor `tool_calls`"),
        ({"messages": [ASSISTANT | {"tool_calls": "f"}]}, r"`tool_calls` of `messages\[0\]` is not valid JSON"),
        ({"messages": [ASSISTANT | {"tool_calls": FULL}]}, r"`tool_calls` of `messages\[0\]` is not a list"),
        ({"messages": [ASSISTANT | {"tool_calls": [FULL, {"function": "f"}]}]},
            r"`messages\[0\].tool_calls\[1\]` is not an object with a `function` that has a `name`"),
        ({"messages": [ASSISTANT | {"tool_calls": [None]}]}, r"`messages\[0\].tool_calls\[0\]` is not an object with a `function`"),
        ({"messages": [ASSISTANT | {"tool_calls": [{"name": "f", "parameters": {"x": 1}}]}]},
            r"`messages\[0\].tool_calls\[0\]` has `parameters`"),
        ({"messages": [ASSISTANT | {"function_call": "f"}]}, r"`function_call` of `messages\[0\]` is not valid JSON"),
        ({"messages": [ASSISTANT | {"tool_calls": [FULL], "function_call": FUNCTION}]},
            r"`messages\[0\]` has both `tool_calls` and the older `function_call`"),
        ({"messages": [USER, ASSISTANT], "functions": 3}, "`functions` is not a list"),
        ({"messages": [USER, ASSISTANT], "tools": "["}, "`tools` is not valid JSON"),
        ({"instruction": "q", "output": None, "text": "q"}, "`output` has no value"),
        ({"prompt": None, "completion": "a", "text": "q"}, "`prompt` has no value"),
        ({"input": "x"}, "neither `messages`, nor `conversations`, nor `prompt` and `completion`, nor `instruction` and `output`, nor"
                         " `text`"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_told(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sample_of(record, 1)


def read(path: Path, content: str) -> tuple[list[AnySample], list[str]]:
    """The samples of a file, and what is broken of it."""
    path.write_bytes(content.encode())
    broken = Broken(path.name)
    return list(read_jsonl(path, broken)), broken.first


ROWS = [{"text": "a [, ] {"}, {"instruction": "q", "output": 'a"\n'}, {"text": "naïve €"}]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("around", ["{}", " \n{}\n ", "\ufeff{}"])
def test_an_array_has_the_samples_of_its_objects_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None, around: str
) -> None:
    monkeypatch.setattr(read_module, "CHUNK", chunk)
    found, broken = read(tmp_path / "x.json", around.format(json.dumps(ROWS, indent=indent, ensure_ascii=False)))
    assert (found, broken) == ([sample_of(row, number) for number, row in enumerate(ROWS, start=1)], [])


def test_an_empty_array_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "x.json", " [ ] ") == ([], [])


ENDED = 'not valid JSON (the array has ended before; a line that is a list of messages must be {"messages": […]})'


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        ('[\n{"text": "a"},\n{"text": }\n]', 3, "not valid JSON (Expecting value)"),
        ('[\n{"text": "a"}\n{"text": "b"}]', 3, "not valid JSON (a comma or ] was expected, not '{')"),
        ('[{"text": "a"}', 1, "not valid JSON (the array has no end)"),
        ('[{"text": "a"}, {"text": "b', 1, "not valid JSON (Unterminated string starting at)"),
        ('[{"text": "a"}] {"text": "b"}', 1, ENDED),
        ('[{"text": "a"},]', 1, "not valid JSON (Expecting value)"),
    ],
)
def test_an_error_of_syntax_in_an_array_is_refused_with_its_line_for_nothing_after_it_can_be_read(
    tmp_path: Path, content: str, line: int, reason: str
) -> None:
    (tmp_path / "x.json").write_text(content)
    samples = read_jsonl(tmp_path / "x.json", Broken("x.json"))
    assert next(samples) == Sample("a", None, 1)
    with pytest.raises(ConfigError, match=re.escape(f"x.json:{line}: {reason}; an array can't be read past that")):
        next(samples)


def test_an_element_that_is_no_sample_is_broken_and_the_others_are_read(tmp_path: Path) -> None:
    assert read(tmp_path / "x.json", '[{"text": "a"}, 5, {"text": "b"}]') == (
        [Sample("a", None, 1), Sample("b", None, 3)],
        ["x.json:2: not a JSON object"],
    )


def test_a_quote_that_is_never_closed_is_not_searched_in_all_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "CHUNK", 10)
    monkeypatch.setattr(read_module, "LONGEST_OBJECT", 1000)
    with pytest.raises(ConfigError, match="an object of more than 0 MiB, or a quote that is never closed"):
        read(tmp_path / "x.json", '[{"text": "a' + "b" * 100_000 + '"}]')


def test_an_object_of_an_array_may_have_64_mebibytes() -> None:
    characters = iter(['[{"text": "a' + "b" * (65 << 20), '"}]'])
    with pytest.raises(ValueError, match="an object of more than 64 MiB, or a quote that is never closed"):
        read_module._Elements(lambda: next(characters, "")).next()


def test_an_array_is_read_a_mebibyte_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO(b"[" + b'{"text": "a"},' * 250_000)
    reader = io.BufferedReader(cast(Any, content))
    monkeypatch.setattr(read_module, "_opened", lambda _: contextlib.nullcontext(reader))
    assert next(read_module.read_array(tmp_path, Broken("x"))) == Sample("a", None, 1)
    assert 1 << 20 <= content.tell() < 2 << 20


def test_bytes_that_are_not_utf8_in_an_array_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 0xff\); convert the file to UTF-8"):
        list(read_jsonl(tmp_path / "x.json", Broken("x.json")))


DEEP = "[" * 100_000


def test_what_is_nested_too_deeply_is_broken_and_the_other_lines_are_read(tmp_path: Path) -> None:
    content = f'{{"text": {DEEP}\n{{"text": "a"}}\n{json.dumps({"messages": [USER, ASSISTANT], "tools": DEEP})}\n'
    found, broken = read(tmp_path / "x.jsonl", content)
    assert found == [Sample("a", None, 2)]
    assert broken[0] == "x.jsonl:1: lists or objects nested too deeply to be read"
    assert broken[1].startswith("x.jsonl:3: `tools` is not valid JSON")


def test_what_is_nested_too_deeply_in_an_array_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.json:2: lists or objects nested too deeply"):
        read(tmp_path / "x.json", f'[{{"text": "a"}},\n{{"text": {DEEP}')


def test_plain_text_that_begins_as_an_object_of_any_depth_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(f'{{"text": {DEEP}')
    with pytest.raises(ConfigError, match="begins with a JSON object"):
        read_module.is_plain_text(tmp_path / "x.txt")


def test_records_without_a_key_are_of_the_form_they_fill() -> None:
    assert sample_of({"prompt": "about x", "text": "x"}, 1) == Sample("x", None, 1)


def test_a_mark_of_the_byte_order_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    assert read(tmp_path / "x.jsonl", '\ufeff{"text": "a"}\n{"text": "b"}') == ([Sample("a", None, 1), Sample("b", None, 2)], [])


def test_a_mark_of_the_byte_order_is_no_part_of_plain_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffa\n\n\ufeffb".encode())
    assert list(read_module.read_text(tmp_path / "x.txt", Broken("x"))) == [Sample("a", None, 1), Sample("\ufeffb", None, 3)]


def test_an_array_of_objects_under_another_name_is_never_taken_for_plain_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text('[\n {"text": "a"}]')
    with pytest.raises(ConfigError, match=r"x\.txt would be plain text by its name, but begins with a JSON object"):
        read_module.is_plain_text(tmp_path / "x.txt")
