"""Things that a job needs of its hosts before it starts, each with what to do: a start refuses without them, `plan` and `doctor` tell them
(pure).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from lockstep.api.hosts import Host
from lockstep.api.job import TrainingJob
from lockstep.plan.hosts.facts import HostFacts
from lockstep.plan.hosts.place import path_of_job
from lockstep_spec.words import decimal_size, named

OLDEST_PYTHON = (3, 10)
"""Oldest Python that agents and programs of Lockstep run on."""
PYTHON_MIN = (3, 11)
"""Oldest Python that the trainer runs on."""
LEAST_TEMPORARY = 1 << 20
"""Free bytes for temporary files below which no agent starts."""
LEAST_RECORDS = 16 << 20
"""Free bytes of a workspace below which a job's records and logs have no room."""


def oldest_python(job: TrainingJob | None) -> tuple[int, int]:
    """Return the oldest version of Python that the job runs on."""
    return OLDEST_PYTHON if job is None or job.spec.training is None else PYTHON_MIN


def unmet_python(host: Host, facts: HostFacts, cluster: str, oldest: tuple[int, int] = OLDEST_PYTHON) -> Iterator[tuple[str, str]]:
    """Yield what keeps a host from running agents and ranks, and what to do. `cluster`: as one types it. `oldest`: version that the job
    runs on.
    """
    setup = f"lockstep hosts setup {cluster}"
    other = f"state another one, or leave it out, and {setup} makes an environment"
    if facts.system != "Linux":
        yield f"it runs {facts.system}, and agents need Linux", "leave it out of the file"
    if facts.stated_problem:
        yield f"its hosts[].python {host.python} can't be run: {facts.stated_problem}", other
    elif facts.stated_python is not None and facts.stated_python < oldest:
        version, needed = (".".join(map(str, one)) for one in (facts.stated_python, oldest))
        yield f"its hosts[].python {host.python} is Python {version}, and {needed} or newer is needed", other
    elif facts.python < OLDEST_PYTHON:
        version = ".".join(map(str, facts.python))
        yield f"its Python {version} is too old: 3.10 or newer is needed", f"{setup} brings one, or state hosts[].python"
    if not host.python and not facts.environment_python:
        yield "it has no Python environment for ranks", f"{setup} makes it, or state hosts[].python"


def unmet_folders(facts: HostFacts, room: int = LEAST_RECORDS) -> Iterator[tuple[str, str]]:
    """Yield what keeps a host from having a job's files, and what to do. `room`: free bytes that its workspace should have at least."""
    workspace, temporary = facts.workspace, facts.temporary
    if workspace.problem:
        yield f"its workspace {workspace.path}: {workspace.problem}", f"state another hosts[].workspace, or let {facts.user} write there"
    elif workspace.free < room:
        words = f"its workspace {workspace.path} has {decimal_size(workspace.free)} free"
        yield words, "free some, or state a hosts[].workspace on another disk"
    if temporary is not None and temporary.problem:
        fix = f"let {facts.user} write there (as root: chmod 1777 {temporary.path})"
        yield f"its folder of temporary files {temporary.path}: {temporary.problem}", fix
    elif temporary is not None and temporary.free < LEAST_TEMPORARY:
        words = f"its folder of temporary files {temporary.path} has {decimal_size(temporary.free)} free"
        yield words, "remove what is not needed there"


def lacking_inputs(
    name: str, answers: Mapping[str, HostFacts], again: str, local: Callable[[str], str] = lambda path: "PATH"
) -> Iterator[tuple[list[str], str, str]]:
    """Yield (hosts, what is missing there, the command that brings it) for every input of the job that isn't there. `local`: where this
    machine has a path, as a word of a command line.
    """
    lacks: dict[tuple[str, str, str], list[str]] = {}
    for host, facts in answers.items():
        for entry in facts.missing:
            lacks.setdefault(entry, []).append(host)
    for (field, path, kind), hosts in lacks.items():
        noun = "file or folder" if kind == "any" else kind
        there = shlex.quote(f"{name}:{path_of_job(path, answers[hosts[0]])}")
        yield hosts, f"{field}: there is no {noun} {path}", f"lockstep cp {local(path)} {there} {again}"


def refusals(
    job: TrainingJob, hosts: Sequence[Host], answers: Mapping[str, HostFacts], cluster: str, again: str, local: Callable[[str], str]
) -> list[str]:
    """Return why the job can't start on these hosts, of which all have answered: a sentence a reason, with the hosts that it is about."""
    lacks: dict[tuple[str, str], list[str]] = {}
    for host in hosts:
        facts = answers[host.name]
        for need in (*unmet_python(host, facts, cluster, oldest_python(job)), *unmet_folders(facts)):
            lacks.setdefault(need, []).append(host.name)
    return [
        *(
            f"{named('host', names)}: {message}: {fix}; lockstep doctor {cluster} says what else is wrong"
            for (message, fix), names in lacks.items()
        ),
        *(
            f"{message} on {named('host', names)}: {command}"
            for names, message, command in lacking_inputs(job.metadata.name, answers, again, local)
        ),
    ]
