"""Jobs on hosts as this machine saw them last: for when none of their hosts answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.api.errors import ConfigError
from lockstep.environments import cache_root
from lockstep.plan.hosts.record import JobRecord, read_record, record_text
from lockstep_spec.files import write_durably

JOBS_MAX = 256


@dataclass(frozen=True)
class Remembered:
    """A job when it was seen last."""

    record: JobRecord
    known: str
    """Sentence about its progress then."""


def remembered(cluster: str) -> dict[str, Remembered]:
    """Return the jobs of a cluster by name; none where nothing can be read."""
    try:
        return dict(_read(json.loads((cache_root() / "hosts" / f"{cluster}.json").read_text(encoding="utf-8"))))
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _read(stored: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, Remembered]]:
    for name, entry in stored.items():
        yield name, Remembered(read_record(json.loads(entry["record"])), str(entry["known"]))


def remember(cluster: str, jobs: Mapping[str, Remembered], gone: Iterable[str] = ()) -> None:
    """Keep these jobs, and forget those that are gone. If they can't be kept, nothing is lost: the hosts know them."""
    every = {name: job for name, job in remembered(cluster).items() if name not in set(gone)} | dict(jobs)
    newest = dict(list(every.items())[-JOBS_MAX:])
    text = json.dumps({name: {"record": record_text(job.record), "known": job.known} for name, job in newest.items()})
    with contextlib.suppress(ConfigError, OSError):
        path = cache_root() / "hosts" / f"{cluster}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, text.encode())
