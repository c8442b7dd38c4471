"""An API server that is away for a while: a verb that watches something waits for it, and says so once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Outage:
    """Knowledge of a verb about an API server that is away. `say` gets a line each time that it begins."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._is_away = say, False

    def passes(self, error: Exception) -> bool:
        """Return True if the request is worth repeating after this error."""
        from lockstep.kube.cluster import ApiError, Unreachable

        is_away = (isinstance(error, Unreachable) and not error.is_untrusted) or (isinstance(error, ApiError) and error.is_overload)
        if is_away and not self._is_away:
            self._say(f"{error}: this goes on when it answers again")
        self._is_away = is_away
        return is_away

    def over(self) -> None:
        """The API server has answered."""
        self._is_away = False

    def ask(self, look: Callable[[], T], before: T) -> T:
        """Return what `look` returns; `before` while the API server is away. Raises what `look` raises for another reason."""
        try:
            seen = look()
        except Exception as error:
            if not self.passes(error):
                raise
            return before
        self.over()
        return seen
