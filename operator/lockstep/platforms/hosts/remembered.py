"""Jobs on hosts as this machine saw them last: for when none of their hosts answers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.plan.hosts.record import JobRecord, read_record, record_text

JOBS_MAX = 256


@dataclass(frozen=True)
class Remembered:
    """A job when it was seen last."""

    record: JobRecord
    known: str
    """Sentence about its progress then."""


def _path(cluster: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lockstep" / "hosts" / f"{cluster}.json"


def remembered(cluster: str) -> dict[str, Remembered]:
    """Return the jobs of a cluster by name; none where nothing can be read."""
    try:
        stored = json.loads(_path(cluster).read_text(encoding="utf-8"))
        return dict(_read(stored))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read(stored: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Remembered]]:
    for name, entry in stored.items():
        yield name, Remembered(read_record(json.loads(entry["record"])), str(entry["known"]))


def remember(cluster: str, jobs: Mapping[str, Remembered], gone: Iterable[str] = ()) -> None:
    """Keep these jobs, and forget those that are gone. If they can't be kept, nothing is lost: the hosts know them."""
    every = {name: job for name, job in remembered(cluster).items() if name not in set(gone)} | dict(jobs)
    newest = dict(list(every.items())[-JOBS_MAX:])
    path = _path(cluster)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({name: {"record": record_text(job.record), "known": job.known} for name, job in newest.items()})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
