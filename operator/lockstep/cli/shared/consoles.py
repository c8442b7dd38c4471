"""Consoles for tables: colored in a terminal, without any escape code where NO_COLOR is set or nobody looks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_plain() -> bool:
    """Return True if NO_COLOR is set, and not to nothing (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


PIPED_WIDTH = 240
"""A pipe has no width: neither paths nor lines are cut for whoever reads it, short of this."""


def console(**options: Any) -> Console:
    """rich's own NO_COLOR leaves bold and underlined text, which a log or a plain terminal shows as rubbish.

    Text stands as it is, brackets and colons too, and what a terminal would act on as escapes (`output.py`).
    """
    from rich.console import Console
    from rich.text import Text

    from lockstep_spec.words import printable_line

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable_line(text), **options)

    plain = Plain(color_system=None if is_plain() else "auto", markup=False, emoji=False, **options)
    if not plain.is_terminal:
        plain.width = PIPED_WIDTH
    return plain
