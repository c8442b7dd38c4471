"""What every landed version wrote is read by this one, and what this one writes is recorded for the next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from recorded.recorder import KINDS, LINES, RECORDED, SEALED, main, newest, recorded, texts, written

UNREAD: Mapping[str, str] = {"reply.orders": "was always empty, and nothing reads it"}
"""KIND.KEY of what earlier versions wrote and no reader looks for any more → why."""
BYTES_MAX = 60_000
GONE = object()
TEXTS = [(folder, *key, text) for folder, lines in recorded().items() for key, text in lines.items()]


def lost(before: Any, after: Any, path: str) -> Iterator[str]:
    """Paths of keys and values of `before` that `after` has not."""
    if path in UNREAD:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key, GONE), f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif before != after:
        yield path if after is GONE else f"{path}: {before!r} is read as {after!r}"


@pytest.mark.parametrize(("folder", "kind", "name", "text"), TEXTS, ids=[" ".join(one[:3]) for one in TEXTS])
def test_a_recorded_text_is_read_without_loss(folder: str, kind: str, name: str, text: Any) -> None:
    understood = KINDS[kind][1](text if kind in SEALED else json.dumps(text))
    before = {key: value for key, value in json.loads(text).items() if key != "sha256"} if kind in SEALED else text
    assert list(lost(before, json.loads(written(kind, understood)), kind)) == [], f"{name} of {folder}"


def test_what_this_version_writes_is_recorded() -> None:
    there = newest(recorded())
    missing = [" ".join(key) for key, text in texts().items() if there.get(key) != text]
    command = "PYTHONPATH=operator:workspace:tests .venv/bin/python -m recorded.recorder NUMBER-WORD"
    assert missing == [], f"this version writes them otherwise, or is the first to: record them with {command} (CONTRIBUTING, Versions)"


def test_recordings_stay_small() -> None:
    assert sum(path.stat().st_size for path in RECORDED.glob(f"*/{LINES}")) <= BYTES_MAX


def test_a_landing_records_what_differs_and_leaves_earlier_folders_alone(tmp_path: Path) -> None:
    main("1-base", tmp_path)
    first = tmp_path / "1-base" / LINES
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[1:]) + '["report","of old",{}]\n')
    earlier = first.read_text()
    for name in ("3-later", "later", "2"):
        with pytest.raises(SystemExit, match="must be 2, a hyphen and a word"):
            main(name, tmp_path)
    main("2-later", tmp_path)
    assert (tmp_path / "2-later" / LINES).read_text() == lines[0] and first.read_text() == earlier


def test_a_key_that_no_reader_knows_and_a_value_that_is_read_otherwise_are_lost() -> None:
    assert list(lost({"a": 1, "b": [{"c": 2}]}, {"b": [{"c": 3}]}, "x")) == ["x.a", "x.b[0].c: 2 is read as 3"]
