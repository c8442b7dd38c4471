"""Takes secrets out of objects and text before they are handed to somebody (pure).

By name (variables, keys and options that are called like one), by form (tokens that are known by how they begin, keys in PEM, passwords in
URLs), and by value: what a variable or an option of such a name held is taken out wherever it stands. What none of the three can tell
stays, so a bundle is to be looked through before it is made public.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from lockstep_spec.words import any_of

REDACTED = "(redacted)"
LEAST_CHARACTERS = 6
"""Length from which a value is taken out wherever it stands, or after a name in free text: shorter ones would hit ordinary words."""
_WORDS = frozenset({
    "token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey", "auth", "authorization",
    "cookie", "dsn",
})  # fmt: skip
_PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("signing", "key"), ("account", "key")})
_NAME = r"[A-Za-z][\w.-]{1,63}"
_ASSIGNED = re.compile(rf"""(?P<name>{_NAME})(?P<between>["']?\s*[:=]\s*["']?)(?P<value>[^\s"',;&}}\])]{{{LEAST_CHARACTERS},}})""")
_SEGMENT = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NUMBER = re.compile(r"[\d.,:eE+-]+%?")
_FORMS = any_of(
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # a JSON web token
    r"(?<=[Bb]earer )[\w.~+/=-]{8,}|(?<=[Bb]asic )[\w+/=]{8,}",
    r"(?<=://)[^/\s:@]*:(?!\d+/)[^\s@\"'<>]+(?=@)|(?<=[?&]sig=)[^&\s\"'<>]+",  # (an object store's key may have a slash)
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    flags=re.DOTALL,
)
_DROPPED_KEYS = ("managedFields",)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def looks_secret(name: str) -> bool:
    """True if a variable, key or option of this name is likely to hold a secret. `tokens` and `tokenizer` are not, `HF_TOKEN` is."""
    words = [word.lower() for word in _SEGMENT.findall(name)]
    return not _WORDS.isdisjoint(words) or any(pair in _PAIRS for pair in pairwise(words))


class Redactor:
    """Remover of secrets that knows the values of the job's own variables and options with secret-looking names."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        distinct = sorted({value for value in values if len(value) >= LEAST_CHARACTERS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, distinct))) if distinct else None

    def text(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        return _ASSIGNED.sub(_assigned, _FORMS.sub(REDACTED, text))

    def object(self, value: Any) -> Any:
        """Copy of plain JSON without secrets, and without what only machines read."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.object(item) for item in _without_option_values(value)]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str) and looks_secret(value["name"]):
            return {**value, "value": REDACTED}
        rest = {key: item for key, item in value.items() if key not in (*_DROPPED_KEYS, _LAST_APPLIED)}
        return {key: REDACTED if isinstance(item, str) and _holds_secret(key, item) else self.object(item) for key, item in rest.items()}


def _holds_secret(key: str, value: str) -> bool:
    return looks_secret(key) and len(value) >= LEAST_CHARACTERS and not value.startswith("/")


def _assigned(match: re.Match[str]) -> str:
    if not looks_secret(match["name"]) or _NUMBER.fullmatch(match["value"]) or match["value"].startswith(("/", REDACTED[:-1])):
        return match[0]
    return f"{match['name']}{match['between']}{REDACTED}"


def _without_option_values(items: list[Any]) -> Iterator[Any]:
    """A command's arguments: what follows `--hf-token` goes, too."""
    after = False
    for item in items:
        yield REDACTED if after and isinstance(item, str) and not item.startswith("-") else item
        after = isinstance(item, str) and item.startswith("-") and "=" not in item and looks_secret(item)


def secret_values(value: Any) -> Iterator[str]:
    """Values of variables and options with secret-looking names, anywhere in an object, and in strings of it that are JSON (run.json of a
    ConfigMap).
    """
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        name, text = value.get("name"), value.get("value")
        if isinstance(name, str) and isinstance(text, str) and looks_secret(name):
            yield text
        for item in value.values():
            yield from secret_values(item)
    elif isinstance(value, list):
        yield from _option_values(value)
        for item in value:
            yield from secret_values(item)


def _parsed(text: str) -> Any:
    """None where it isn't JSON."""
    try:
        return json.loads(text) if text.startswith(("{", "[")) else None
    except ValueError:
        return None


def _option_values(arguments: list[Any]) -> Iterator[str]:
    """Values that follow `--hf-token`, or stand to the right of `--hf-token=`. A path only tells where the secret is."""
    texts = [item if isinstance(item, str) else "" for item in arguments]
    for option, after in pairwise([*texts, ""]):
        name, assigned, right = option.partition("=")
        value = right if assigned else after
        if name.startswith("-") and looks_secret(name) and not value.startswith(("-", "/")):
            yield value
