"""Commits of a job on hosts: each host's trainer reads those on its own disk, so that only answers travel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.plan.hosts.commits import merged_list, merged_verdicts, read_commits
from lockstep.platforms.files.results import BAD_NEWS, inspected
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.places.values import Volume
from lockstep_spec.words import named

Json = dict[str, Any]


async def commits_on_hosts(
    fleet: Fleet, volumes: Mapping[str, Volume], job: str, away: dict[str, str], verb: str, options: Sequence[str]
) -> tuple[str, int]:
    """Return the answer about the commits of one run on the disks of its hosts as the trainer's `inspect` gives it for folders of one
    machine, and its exit code. `away`: by host, why it has none to show.

    Raises ConfigError where there is no commit, Failed where no host answers.
    """

    async def ask(verb: str, below: str = "", hosts: Iterable[str] = volumes) -> dict[str, Json]:
        async def one(host: str) -> Json:
            try:
                text, _ = await inspected(volumes[host].place, verb, f"{volumes[host].run_folder(job)}/{below}".rstrip("/"), ())
            except ConfigError as error:  # (its folder is none of a run, which says nothing of the others)
                raise Failed(str(error)) from error
            try:
                answer = json.loads(text)
            except (ValueError, RecursionError):
                answer = None
            return read_commits(host, verb, answer)

        answers, problems = await fleet.all(hosts, one)
        away.update(problems)
        if not answers:
            raise Failed("; ".join(away.values()))
        return answers

    listed = merged_list(await ask("list"), away)
    if verb == "list":
        return json.dumps(listed), 0
    names = [str(row["name"]) for row in listed["commits"] if row["onChain"]]
    if not names:
        raise ConfigError(f"{_folders(volumes, job)} holds no commit that a start would choose")
    names = names if "--all" in options else names[:1]
    each = [await ask("verify", f"checkpoints/{name}", _hosts_of(listed, name)) for name in names]
    verdicts = [merged_verdicts(answers, away, [name])["commits"][0] for name, answers in zip(names, each, strict=True)]
    whole = not any(row["problems"] for row in verdicts)
    return json.dumps({"commits": verdicts, "whole": whole}), 0 if whole else BAD_NEWS


def _folders(volumes: Mapping[str, Volume], job: str) -> str:
    hosts_of: dict[str, list[str]] = {}
    for host, volume in volumes.items():
        hosts_of.setdefault(volume.run_folder(job), []).append(host)
    return ", ".join(f"{folder} on {named('host', hosts)}" for folder, hosts in hosts_of.items())


def _hosts_of(listed: Json, name: str) -> list[str]:
    (row,) = (row for row in listed["commits"] if row["name"] == name)
    return list(dict.fromkeys(folder.partition(":")[0] for folder in row["folders"]))
