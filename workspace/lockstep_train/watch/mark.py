"""Why an attempt ends before its time: said once, in the store that all ranks read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Protocol

KEY = "watch/end"


class Reason(Enum):
    """What a rank that sees the mark does."""

    STOP = "stop"
    """Asked to stop before there is anything to save: end, saved and stopped."""
    FAILED = "failed"
    """A rank has failed: end soon, unless the main thread notices by itself."""
    HANG = "hang"
    """A rank hangs: end as hung."""


@dataclass(frozen=True)
class Mark:
    reason: Reason
    rank: int
    message: str


class Store(Protocol):
    """The part of torch's stores that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set_timeout(self, timeout: timedelta) -> None: ...
    def clone(self) -> Store: ...


def make_mark(store: Store, mark: Mark) -> None:
    """Only the first one counts."""
    store.compare_set(KEY, "", json.dumps({"reason": mark.reason.value, "rank": mark.rank, "message": mark.message}))


def read_mark(store: Store) -> Mark | None:
    if not store.check([KEY]):
        return None
    value = json.loads(store.get(KEY))
    return Mark(Reason(value["reason"]), value["rank"], value["message"])
