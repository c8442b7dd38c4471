"""Commits of a run whose shards are spread over the disks of hosts: what each host says of its own, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.plan.hosts.facts import BadAnswer

Json = dict[str, Any]
ROTATED_BUT = 2
"""Newest commits that are kept whatever `checkpoint.keep` is."""


def read_commits(host: str, verb: str, answer: Any) -> Json:
    """Return what a host's trainer answered to this verb of `inspect`. Raises BadAnswer for what is no such answer."""
    lists = {
        "list": ("name", "step", "attempt", "folders", "onChain", "best", "kept", "problems", "shards"),
        "verify": ("name", "bytes", "problems", "shards"),
    }
    try:
        is_valid = all(set(lists[verb]) <= row.keys() and isinstance(row["shards"], dict) for row in answer["commits"])
        is_valid = is_valid and (verb != "list" or isinstance(answer["problems"], list))
    except (KeyError, TypeError, AttributeError):
        is_valid = False
    if not is_valid:
        raise BadAnswer(f"host {host}: its trainer describes no commits as this version's does: use one version of Lockstep everywhere")
    read: Json = answer
    return read


def merged_list(answers: Mapping[str, Json], away: Mapping[str, str]) -> Json:
    """All commits, newest first, those that no start would choose last.

    `answers`: of the trainer's `inspect list`, by host. `away`: by host, why it did not answer. A shard is whole where any host has it
    whole; a host whose records are older than another's doesn't know that a commit was left behind, so all that have one must count it.
    """
    rows = [_merged(rows, away) for rows in _by_name(answers).values()]
    rows.sort(key=lambda row: (row["onChain"], row["attempt"], row["step"]), reverse=True)
    for number, row in enumerate(rows):
        newest = ["newest"] if row["onChain"] and number < ROTATED_BUT else []
        row["kept"] = newest + [reason for reason in row["kept"] if reason != "newest"]
    problems = [f"host {host}: {problem}" for host, answer in answers.items() for problem in answer["problems"]]
    return {"commits": rows, "problems": problems + [f"{_away(host, why)}" for host, why in away.items()]}


def _merged(rows: Mapping[str, Json], away: Mapping[str, str]) -> Json:
    """One row of those that the hosts have for a commit."""
    whole: Json = {}
    for row in rows.values():  # (one whose manifest can't be read says less)
        whole = {**whole, **row} if "bytes" in row or not whole else {**row, **whole}
    return {
        **whole,
        "folders": [f"{host}:{folder}" for host, row in rows.items() for folder in row["folders"]],
        "onChain": all(row["onChain"] for row in rows.values()),
        "best": any(row["best"] for row in rows.values()),
        "kept": list(dict.fromkeys(reason for row in rows.values() for reason in row["kept"])),
        **_shards(rows, away),
    }


def merged_verdicts(answers: Mapping[str, Json], away: Mapping[str, str], names: Sequence[str]) -> Json:
    """Verdict of each of these commits, of what `inspect verify` says on each host."""
    by_name = _by_name(answers)
    rows = []
    for name in names:
        found = by_name.get(name, {})
        size = max((row["bytes"] for row in found.values()), default=0)
        rows.append({"name": name, "bytes": size, **_shards(found, away)} if found else _nowhere(name, away))
    return {"commits": rows, "whole": bool(rows) and not any(row["problems"] for row in rows)}


def _nowhere(name: str, away: Mapping[str, str]) -> Json:
    return {
        "name": name,
        "bytes": 0,
        "problems": ["no host that answers has it", *(_away(host, why) for host, why in away.items())],
        "shards": {},
    }


def _by_name(answers: Mapping[str, Json]) -> dict[str, dict[str, Json]]:
    """Rows by commit and host."""
    found: dict[str, dict[str, Json]] = {}
    for host, answer in answers.items():
        for row in answer["commits"]:
            found.setdefault(str(row["name"]), {})[host] = row
    return found


def _shards(rows: Mapping[str, Json], away: Mapping[str, str]) -> Json:
    """Problems of a commit: the shards that no host has whole; or, where no manifest can be read, why."""
    readable = {host: row for host, row in rows.items() if row["shards"]}
    if not readable:
        return {"problems": [f"host {host}: {problem}" for host, row in rows.items() for problem in row["problems"]], "shards": {}}
    shards: dict[str, str | None] = {}
    for file in dict.fromkeys(file for row in readable.values() for file in row["shards"]):
        found = {host: row["shards"][file] for host, row in readable.items() if file in row["shards"]}
        bad = next((f"host {host}: {problem}" for host, problem in found.items() if not str(problem).endswith("missing")), None)
        shards[file] = None if None in found.values() else bad or f"{file} is on no host that answers"
    problems = [problem for problem in shards.values() if problem is not None]
    return {"problems": problems + ([_away(host, why) for host, why in away.items()] if problems else []), "shards": shards}


def _away(host: str, why: str) -> str:
    return why if host in why else f"host {host}: {why}"
