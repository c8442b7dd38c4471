"""Kubernetes objects as YAML text that every parser reads the same way.

PyYAML follows YAML 1.1, where 2e-4 is text; kubectl's parser takes it for a number, and the API server then refuses a
learningRate that was written as text. So text that any common parser would take for something else is put in quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from lockstep_spec.words import printable

FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A safe one, and ten times as fast where PyYAML was built with it."""
NUMBER = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?$|^0[xob][0-9a-fA-F_]+$")
"""Plain scalars that YAML 1.1 or YAML 1.2 parsers read as numbers."""

LINE_ENDS = re.compile("[\x85\u2028\u2029\ufeff\r]")
"""Characters that PyYAML writes as they are and reads as line ends: only an escape gives them back."""


def _is_plain_block(text: str) -> bool:
    """True if a block scalar gives `text` back: line ends of Unicode, control characters and leading blanks don't survive one."""
    lines = text.removesuffix("\n").split("\n")
    return "\n" in text and text.isascii() and not text.startswith(" ") and all(lines) and all(line.isprintable() for line in lines)


class _Dumper(yaml.SafeDumper):
    """Quotes what looks like a number; shows text of several lines as it is; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "|" if _is_plain_block(text) else '"' if LINE_ENDS.search(text) or printable(text) != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(y|Y|n|N)$"), list("yYnN"))
_Dumper.add_representer(str, _Dumper.represent_text)


def load_yaml(text: str) -> Any:
    """Value of the one document. Raises yaml.YAMLError. For files of ours, and where mistakes are explained by others (`yamlnodes`)."""
    return yaml.load(text, FastLoader)  # noqa: S506 (a safe loader)


def load_all_yaml(text: str) -> list[Any]:
    """Value of each document. Raises yaml.YAMLError."""
    return list(yaml.load_all(text, FastLoader))


def dump_yaml(document: Any) -> str:
    """One document: keys in the given order, block style, ending in a newline. Nothing in it that a terminal acts on."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return printable(text)  # (whose escapes are YAML's, too: what needs one is in double quotes)


def dump_all_yaml(documents: Iterable[Any]) -> str:
    """Documents divided by `---` lines."""
    return "---\n".join(dump_yaml(document) for document in documents)
