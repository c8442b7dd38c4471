"""A tokenizer's chat template as samples need it, and the tokens at which its model stops writing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep_train.base.errors import ConfigError, first_line, refusal
from lockstep_train.data.tokens.turns import ChatTemplate, Message, Span

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASKS_FOR_TODAY = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1\s*\)")
TODAY = datetime(2025, 1, 1)
"""The day that templates write which ask for today's (gpt-oss, Llama 3.2): the same data must give the same tokens on every day."""


def chat_template(tokenizer: Any, stops: Sequence[int], stated: Mapping[str, Any]) -> ChatTemplate | None:
    """The tokenizer's template with the variables that the run states; None without one, or without the offsets that only fast tokenizers know."""
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {**tokenizer.special_tokens_map, **stated}

    def template(tools: Sequence[Any]) -> str:
        return on_one_day(tokenizer.get_chat_template(None, list(tools) or None))  # some tokenizers have one for tools

    def render(messages: Sequence[Message], tools: Sequence[Any], generation_prompt: bool, options: Mapping[str, Any]) -> str:
        texts, _ = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=template(tools),
            add_generation_prompt=generation_prompt,
            **{**variables, **options},
        )
        return str(texts[0])

    def marked(messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]) -> list[Span]:
        _, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=list(tools) or None,
            chat_template=template(tools),
            return_assistant_tokens_mask=True,
            **{**variables, **options},
        )
        return [(start, end) for start, end in spans[0]]

    def encode(text: str) -> tuple[list[int], list[Span]]:
        tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(tokens["input_ids"]), [(start, end) for start, end in tokens["offset_mapping"]]

    special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if str(token).strip()}
    return ChatTemplate(
        render=render,
        marked=marked if MARKS.search(template(())) else None,
        encode=encode,
        stops=tuple(special.get(stop) or str(tokenizer.decode([stop])) for stop in stops),
        special=frozenset(special.values()),
        thinks="</think>" in template(()),
    )


def own_template(path: Path) -> str:
    """The text of a template that the run states. Raises ConfigError for what is no template; another error where reading it again may help."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = path.read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except OSError as error:
        raise refusal(
            f"training.data.chatTemplate {path} can't be read: {error.strerror}; every node must see the file there", error
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"training.data.chatTemplate {path} is not UTF-8; it must be a Jinja template as tokenizers have them") from error
    except TemplateSyntaxError as error:
        raise ConfigError(f"training.data.chatTemplate {path}:{error.lineno} is not a Jinja template: {first_line(error)}") from error
    if not text.strip():
        raise ConfigError(f"training.data.chatTemplate {path} is empty; it must be a Jinja template as tokenizers have them")
    return text


def on_one_day(template: str) -> str:
    """The template with a function of its own in the place of the one that gives today's date."""
    formats = {match[2]: TODAY.strftime(match[2]) for match in ASKS_FOR_TODAY.finditer(template)}
    if "strftime_now" not in template:
        return template
    dates = json.dumps(formats, ensure_ascii=False)
    return f"{{%- macro strftime_now(format) -%}}{{{{ {dates}.get(format, '{TODAY:%Y-%m-%d}') }}}}{{%- endmacro +%}}{template}"


def stop_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Tokens that servers stop at: `eos_token_id` of generation_config.json and config.json, and the tokenizer's own. Raises ConfigError."""
    stated = {number for name in ("generation_config.json", "config.json") for number in _stated(folder / name)}
    if tokenizer.eos_token_id is not None:
        stated.add(tokenizer.eos_token_id)
    return sorted(number for number in stated if number < len(tokenizer) and str(tokenizer.decode([number])).strip())


def _stated(path: Path) -> Iterator[int]:
    """The ids that a file states for all of the model, or for its part that reads and writes text."""
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); copy the model's folder again") from error
    for section in (config, config.get("text_config")) if isinstance(config, dict) else ():
        stated = section.get("eos_token_id") if isinstance(section, dict) else None
        yield from (number for number in (stated if isinstance(stated, list) else [stated]) if isinstance(number, int))
