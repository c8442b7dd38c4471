"""Commits of a job on hosts: each host's trainer reads those on its own disk, so that only answers travel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.api.errors import ConfigError, Failed
from lockstep.plan.hosts.commits import merged_list, merged_verdicts, read_commits
from lockstep.platforms.files.results import BAD_NEWS, inspected
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.programs import Place
from lockstep_spec.words import named

Json = dict[str, Any]


class HostsCommits:
    """The commits of one run on the disks of its hosts. `folders`: the run's folder on each; `away`: by host, why it has none to show."""

    def __init__(self, fleet: Fleet, places: Mapping[str, Place], folders: Mapping[str, str], away: Mapping[str, str]) -> None:
        self._fleet, self._places, self._folders, self._away = fleet, places, folders, dict(away)

    async def answer(self, verb: str, options: Sequence[str]) -> tuple[str, int]:
        """Answer as the trainer's `inspect` gives it for folders of one machine, and its exit code.

        Raises ConfigError where there is no commit, Failed where no host answers.
        """
        listed = merged_list(await self._ask("list"), self._away)
        if verb == "list":
            return json.dumps(listed), 0
        names = [str(row["name"]) for row in listed["commits"] if row["onChain"]]
        if not names:
            raise ConfigError(f"{self._where()} holds no commit that a start would choose")
        names = names if "--all" in options else names[:1]
        each = [await self._ask("verify", f"checkpoints/{name}", _hosts_of(listed, name)) for name in names]
        verdicts = [merged_verdicts(answers, self._away, [name])["commits"][0] for name, answers in zip(names, each, strict=True)]
        whole = not any(row["problems"] for row in verdicts)
        return json.dumps({"commits": verdicts, "whole": whole}), 0 if whole else BAD_NEWS

    def _where(self) -> str:
        hosts_of: dict[str, list[str]] = {}
        for host, folder in self._folders.items():
            hosts_of.setdefault(folder, []).append(host)
        return ", ".join(f"{folder} on {named('host', hosts)}" for folder, hosts in hosts_of.items())

    async def _ask(self, verb: str, below: str = "", hosts: Sequence[str] | None = None) -> dict[str, Json]:
        async def one(host: str) -> Json:
            folder = f"{self._folders[host]}/{below}".rstrip("/")
            try:
                text, _ = await inspected(self._places[host], verb, folder, ())
            except ConfigError as error:  # (its folder is none of a run, which says nothing of the others)
                raise Failed(str(error)) from error
            try:
                answer = json.loads(text)
            except (ValueError, RecursionError):
                answer = None
            return read_commits(host, verb, answer)

        answers, problems = await self._fleet.all(self._places if hosts is None else hosts, one)
        self._away |= problems
        if not answers:
            raise Failed("; ".join(self._away.values()))
        return answers


def _hosts_of(listed: Json, name: str) -> list[str]:
    (row,) = (row for row in listed["commits"] if row["name"] == name)
    return list(dict.fromkeys(folder.partition(":")[0] for folder in row["folders"]))
