"""Which examples are kept for evaluation: decided by content alone, so that growing, shuffling or resharding the data
never moves an example between the two sides, and duplicates stay together."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep_train.data.tokenize import Example


def is_held_out(key: str, share: float) -> bool:
    return int(key[:16], 16) < share * 16**16


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """(training, held out). Where the share is too small for the data, the example with the smallest key is held out."""
    keys = [example.key for example in examples]
    smallest = min(keys)
    chosen = [is_held_out(key, share) for key in keys]
    if not any(chosen):
        chosen = [key == smallest for key in keys]
    kept = [example for example, out in zip(examples, chosen, strict=True) if not out]
    return kept, [example for example, out in zip(examples, chosen, strict=True) if out]


def fixed_subset(held_out: Sequence[Example], samples: int) -> list[Example]:
    """At most `samples` of them, the same ones in every run, in an order that is the content's."""
    return sorted(held_out, key=lambda example: example.key)[:samples]
