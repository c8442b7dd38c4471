"""Takes secrets out of objects and text before they are handed to somebody (pure).

By name (variables, keys and options that are called like one), by form (tokens that are known by how they begin, keys in PEM, passwords in
URLs, and what a scanner knows besides), and by value: what a variable or an option of such a name held is taken out wherever it stands. Of
variables, only those that are known to be harmless keep their values. What none of these can tell stays, so a bundle is to be looked
through before it is made public.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from lockstep_spec.words import any_of

REDACTED = "(redacted)"
LEAST_CHARACTERS = 6
"""Length from which a value is taken out wherever it stands, or after a name in free text: shorter ones would hit ordinary words."""
_WORDS = frozenset({
    "token", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey", "auth", "authorization",
    "cookie", "dsn", "webhook", "webhooks", "signature",
})  # fmt: skip
_LAST = frozenset({"key", "keys", "pass", "license", "licence", "pat", "pin", "salt"})
"""Words that mean a secret at the end of a name of several words, as in LICENSE_KEY."""
_BEFORE = frozenset({
    "topology", "public", "primary", "foreign", "partition", "sort", "cache", "hash", "dict", "state", "config", "column", "text",
})  # fmt: skip
"""Words after which a key is none: it finds something."""
_HARMLESS = re.compile(
    r"(?:NCCL|UCX|FI|GLOO|TORCH|PYTORCH|TORCHELASTIC|CUDA|NVIDIA|OMP|MKL|KMP|LOCKSTEP|TOKENIZERS|LC|DEEPSPEED)_[A-Z0-9_]+|PYTHON[A-Z]+"
    r"|HF_(?:HOME|HUB_OFFLINE|HUB_CACHE)|TRANSFORMERS_OFFLINE|(?:NODE_|LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|NNODES|GPUS_PER_NODE"
    r"|MASTER_(?:ADDR|PORT)|PATH|LD_LIBRARY_PATH|HOME|USER|HOSTNAME|LANG|TZ|TMPDIR|SHELL|PWD"
)
"""Variables whose values a bundle shows, unless they look like a secret's."""
_NAME = r"[A-Za-z][\w.-]{1,63}"
_ASSIGNED = re.compile(rf"""(?P<name>{_NAME})(?P<between>["']?\s*[:=]\s*["']?)(?P<value>[^\s"',;&}}\])]{{{LEAST_CHARACTERS},}})""")
_SEGMENT = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NUMBER = re.compile(r"[\d.,:eE+-]+%?")
_FORMS = any_of(
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}",
    r"nvapi-[\w-]{16,}|dop_v1_[0-9a-f]{16,}|ya29\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}",
    r"https?://[^\s\"'<>]{0,100}(?:\bhooks?\b|webhook)[^\s\"'<>]*",
    r"(?<=wandb: )[0-9a-f]{40}\b|(?<=logged with )[0-9a-f]{40}\b",
    r"sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # a JSON web token
    r"(?<=[Bb]earer )[\w.~+/=-]{8,}|(?<=[Bb]asic )[\w+/=]{8,}",
    r"(?<=://)[^/\s:@]*:(?!\d+/)[^\s@\"'<>]+(?=@)",  # (an object store's key may have a slash)
    r"(?:(?<=[?&]sig=)|(?<=-Signature=))[^&\s\"'<>]+",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    flags=re.DOTALL,
)
_DROPPED_KEYS = ("managedFields",)
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def looks_secret(name: str) -> bool:
    """True if a variable, key or option of this name is likely to hold a secret. `tokens` and `tokenizer` are not, `HF_TOKEN` is."""
    words = [word.lower() for word in _SEGMENT.findall(name)]
    return not _WORDS.isdisjoint(words) or (len(words) > 1 and words[-1] in _LAST and words[-2] not in _BEFORE)


def is_harmless(name: str) -> bool:
    """True if the value of a variable of this name may be shown."""
    return _HARMLESS.fullmatch(name) is not None and not looks_secret(name)


class Redactor:
    """Remover of secrets that knows the values of the job's own variables and options with secret-looking names."""

    def __init__(self, values: Iterable[str] = (), scan: Callable[[str], Iterable[str]] = lambda _: ()) -> None:
        """`scan` finds more secrets in a text, by a scanner's rules."""
        self._known = tuple(values)
        self._scan = scan

    def text(self, text: str) -> str:
        distinct = sorted({value for value in (*self._known, *self._scan(text)) if len(value) >= LEAST_CHARACTERS}, key=len, reverse=True)
        for value in distinct:
            text = text.replace(value, REDACTED)
        return _ASSIGNED.sub(_assigned, _FORMS.sub(REDACTED, text))

    def object(self, value: Any) -> Any:
        """Copy of plain JSON, or of text that is a JSON object, without secrets, and without what only machines read."""
        if isinstance(value, str):
            with suppress(RecursionError):  # (a pod nests its files as it likes)
                document = _parsed(value)
                return json.dumps(self.object(document)) if isinstance(document, dict) else self.text(value)
            return self.text(value)
        if isinstance(value, list):
            return [self.object(item) for item in _without_option_values(value)]
        if not isinstance(value, dict):
            return value
        if isinstance(value.get("name"), str) and isinstance(value.get("value"), str) and not is_harmless(value["name"]):
            return {**value, "value": REDACTED}
        rest = {key: item for key, item in value.items() if key not in (*_DROPPED_KEYS, _LAST_APPLIED)}
        return {key: self._item(key, item) for key, item in rest.items()}

    def _item(self, key: str, item: Any) -> Any:
        if key == "environment" and isinstance(item, dict):
            return {name: self.object(value) if is_harmless(name) else REDACTED for name, value in item.items()}
        return REDACTED if isinstance(item, str) and _holds_secret(key, item) else self.object(item)


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
    except (ValueError, RecursionError):
        return None


def _option_values(arguments: list[Any]) -> Iterator[str]:
    """Values that follow `--hf-token`, or stand to the right of `--hf-token=`. A path only tells where the secret is."""
    texts = [item if isinstance(item, str) else "" for item in arguments]
    for option, after in pairwise([*texts, ""]):
        name, assigned, right = option.partition("=")
        value = right if assigned else after
        if name.startswith("-") and looks_secret(name) and not value.startswith(("-", "/")):
            yield value
