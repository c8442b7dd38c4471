"""Lists of `lockstep cp` and `sync`: which entries a giver may send, and which answers a taker may give.

Neither end trusts the other: every value is checked before it is used, and a name leads only to where the person at the keyboard said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep_machine.wire import CarryError, Wire, no_protocol

if TYPE_CHECKING:
    from typing import TypeAlias, TypeGuard

NAME_BYTES_MAX = 4096
DEPTH_MAX = 200
DRAFT = ".lockstep-cp-"
"""Beginning of the names of files that are not complete yet."""
Entry: TypeAlias = "dict[str, Any]"


def stays_below(name: str, target: str) -> bool:
    """Return True if a link `name` to `target` can't lead above the folder that `name` counts from: ".." only at its beginning, and no more
    of them than `name` has folders. One in the middle would go up from wherever another link has led.
    """
    parts = target.split("/")
    ups = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return target != "" and not target.startswith("/") and ups <= name.count("/") and ".." not in parts[ups:]


def hear_held(wire: Wire, files: Mapping[int, Entry]) -> dict[int, tuple[int, str, bool]]:
    """Map of a file's number to what the taker has of it: bytes, their SHA-256, and whether it has its name. Raises CarryError."""
    held: dict[int, tuple[int, str, bool]] = {}
    for item, _ in wire.hear_all("have"):
        number, have, digest, complete = item if isinstance(item, list) and len(item) == 4 else (None, None, None, None)
        if not (_is_count(number) and number in files and number not in held and _is_count(have) and have <= files[number]["size"]):
            raise no_protocol("it has what wasn't offered")
        held[number] = (have, str(digest), complete is True)
    return held


def hear_entries(wire: Wire) -> tuple[list[Entry], object]:
    """Entries that the giver has, the file or folder itself first, and its name for that. Raises CarryError unless all of them can be
    taken.
    """
    entries: list[Entry] = []
    offered: object = None
    names: set[str] = set()
    for item, line in wire.hear_all("entries"):
        entry = _entry_of(item, first=not entries)
        if entry["name"] in names:
            raise no_protocol(f"it has {entry['name']!r} twice")
        if entries and "dir" not in entries[0]:
            raise no_protocol("there is more than the one file")
        offered = line.get("name") if not entries else offered
        names.add(entry["name"])
        entries.append(entry)
    if not entries:
        raise no_protocol("it has nothing")
    return entries, offered


def _entry_of(item: object, *, first: bool) -> Entry:
    """A file ("size", "mode", "sha256" or ""), folder ("dir") or link ("link"), and nothing else of what was sent. Raises CarryError."""
    entry = item if isinstance(item, dict) else {}
    name, link, size, mode = (entry.get(key) for key in ("name", "link", "size", "mode"))
    sha256 = entry.get("sha256", "")
    if not isinstance(name, str) or (name == "") != first or (name and not is_plain(name)):
        raise CarryError(f"{shown(name)} would be outside of the target: no part of a name may be empty, '.', '..' or a draft's")
    if entry.get("dir") is True and "size" not in entry and "link" not in entry:
        return {"name": name, "dir": True}
    if _is_count(size) and _is_count(mode) and isinstance(sha256, str) and "link" not in entry and "dir" not in entry:
        return {"name": name, "size": size, "mode": mode, "sha256": sha256}
    if not first and isinstance(link, str) and "size" not in entry and "dir" not in entry:
        if not (_fits(link) and stays_below(name, link)):
            raise CarryError(f"{name!r} would be a link to {link[:200]!r}, outside of the target")
        return {"name": name, "link": link}
    raise no_protocol(f"{name[:200]!r} is neither a file nor a folder nor a link")


def is_plain(name: str) -> bool:
    """Return True if a relative path has only components that are names of files, and none of a draft."""
    parts = name.split("/")
    return _fits(name) and len(parts) <= DEPTH_MAX and {"", ".", ".."}.isdisjoint(parts) and f"/{DRAFT}" not in f"/{name}"


def shown(name: object) -> str:
    return repr(name[:200]) if isinstance(name, str) else f"something of type {type(name).__name__}"


def _fits(path: str) -> bool:
    """Return True if the system takes the path at all."""
    try:
        return "\0" not in path and len(os.fsencode(path)) <= NAME_BYTES_MAX
    except ValueError:  # (half of a surrogate pair)
        return False


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def hear_plan(wire: Wire, files: Mapping[int, Entry], begun: Mapping[int, int]) -> list[tuple[int, int]]:
    """Number and offset of every file that will come: from its beginning, or from the end of what the taker has (`begun`: its size). Raises
    CarryError.
    """
    plan: dict[int, int] = {}
    for item, _ in wire.hear_all("plan"):
        number, offset = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not (_is_count(number) and number in files and number not in plan and _is_count(offset)):
            raise no_protocol("it plans to send what it didn't offer")
        if offset and offset != begun.get(number):
            raise no_protocol("it plans to go on where nothing was begun")
        plan[number] = offset
    return list(plan.items())
