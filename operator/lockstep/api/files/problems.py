"""Problems of a file, so that its writer can correct them: where, what, and what is valid."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import ErrorDetails

from lockstep.api import model
from lockstep.api.errors import ConfigError
from lockstep_spec.modelnames import holds_password


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to correct. `path` is the key as the file writes it, for example network.rdma.rails[0].network."""

    line: int
    path: str
    text: str


@dataclass
class Problems:
    """Everything that is wrong with one file."""

    source: str
    entries: set[Problem] = field(default_factory=set)

    def add(self, line: int, path: str, text: str) -> None:
        self.entries.add(Problem(line, path, text))

    def error(self) -> ConfigError:
        """One line a problem, in the order of the file."""
        ordered = sorted(self.entries, key=lambda p: (p.line, _by_number(p.path), p.text))
        return ConfigError(*(f"{self.source}:{p.line}: {f'{p.path}: ' if p.path else ''}{p.text}" for p in ordered))


def _by_number(path: str) -> list[tuple[int, str]]:
    """A path's order: args[2] comes before args[10]."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid word that `word` was most likely meant to be, whatever its case and underscores; lr is learningRate."""
    by_folded = {_folded(name): name for name in valid}
    close = difflib.get_close_matches(_folded(word), by_folded, n=1, cutoff=0.6)
    short = [name for name in by_folded.values() if "".join(re.findall(r"^.|[A-Z]|(?<=[_-]).", name)).lower() == word.lower()]
    return by_folded[close[0]] if close else short[0] if len(short) == 1 else None


def _folded(word: str) -> str:
    return word.replace("_", "").replace("-", "").lower()


def unknown(word: str, valid: Iterable[str], what: str = "unknown key") -> str:
    """The text for a word that is none of the valid ones."""
    words = sorted(valid)
    close = nearest(word, words)
    return f"{what}{f'; did you mean {close}?' if close else ''} (valid here: {', '.join(words)})"


def explain(error: ErrorDetails) -> str:
    """Text of a pydantic error in the words of a person who writes YAML."""
    context: dict[str, Any] = error.get("ctx", {})
    kind = error["type"]
    if kind in _TEXTS:
        return _TEXTS[kind].format_map(context)
    if kind == "string_pattern_mismatch":
        from lockstep.api.files.patterns import PATTERN_WORDS  # (which imports models that most verbs don't need)

        pattern = str(context["pattern"])
        value = "an address with a password or a port" if holds_password(str(error["input"])) else repr(error["input"])
        return f"{value} is not valid: must be {PATTERN_WORDS.get(pattern, f'text that matches {pattern}')}"
    if kind in ("enum", "literal_error") and isinstance(error["input"], bool):
        return (
            f"{str(error['input']).lower()} is not valid (valid: {context['expected']}): YAML reads On, Off, Yes and No without quotes as"
            " true or false"
        )
    if kind in ("enum", "literal_error"):
        close = nearest(str(error["input"]), re.findall(r"'([^']+)'", context["expected"]))
        return f"{error['input']!r} is not valid{f'; did you mean {close}?' if close else ''} (valid: {context['expected']})"
    if kind == "string_type":
        return _text_expected(error["input"])
    return error["msg"]


_TEXTS: Mapping[str, str] = {
    "missing": "is required",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than_equal": "must be less than or equal to {le}",
    "string_too_long": "must be at most {max_length} characters",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entry",
    "int_type": "must be a whole number, without quotes",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false, without quotes",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
}


def _text_expected(value: object) -> str:
    if isinstance(value, bool):
        return "must be text, but YAML reads it as true or false: write it in quotes"
    if isinstance(value, int | float):
        return "must be text, but YAML reads it as a number: write it in quotes"
    if value is None:
        return "must be text, but has no value: leave it out, or write '' for an empty text"
    return f"must be text, not a {'list' if isinstance(value, list) else 'mapping'}"


def broken_rules(error: ErrorDetails) -> tuple[model.Rule, ...]:
    """The rules of ours behind a pydantic error; none when it is pydantic's own."""
    cause = error.get("ctx", {}).get("error")
    return cause.rules if isinstance(cause, model.RulesBroken) else ()
