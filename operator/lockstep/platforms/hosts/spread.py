"""Files of environments that several hosts lack: they cross this machine's link once, and go from host to host like a copy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lockstep.plan.hosts.setup import HostSetup
from lockstep.plan.hosts.volumes import listening_ports
from lockstep.platforms.files.transfer import TransferProgress
from lockstep.platforms.hosts.chain import Chain, Stop, stated_addresses
from lockstep.platforms.hosts.environment import Packages, Say, not_there, python_archive
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.hosts.wheelhouse import WheelFile
from lockstep_spec.words import number_of

FilesOf = Callable[[str], Sequence[WheelFile]]
"""Files that a host needs, by its name."""
FOLDER = "wheels"
"""Folder of such files, in that of a host's environments."""


async def spread(fleet: Fleet, setups: Sequence[HostSetup], packages: Packages, say: Say) -> list[HostSetup]:
    """Send what all of these hosts lack, then what those with the same Python and processor lack, then the archives of the Pythons that hosts get.

    Return the setups with the files that are there now. A host that a chain can't serve is named, and its files are left to `set_up`, which sends them from here.
    """
    now = {one.host.name: one for one in setups}
    await _spread(fleet, now, packages.of, say)
    brought = [one for one in now.values() if packages.brings_python(one) and packages.uv[one.host.name].path.name in one.parts.files]
    archives, _ = await fleet.all([one.host.name for one in brought], lambda name: python_archive(fleet, now[name], packages))
    await _spread(fleet, now, lambda name: [archives[name].file] if name in archives else [], say)
    return list(now.values())


async def _spread(fleet: Fleet, now: dict[str, HostSetup], files: FilesOf, say: Say) -> None:
    """Send what all hosts lack of their files, then what those lack that have the same Python and processor, and note in `now` what is there."""
    alike: dict[str, list[str]] = {}
    for one in now.values():
        alike.setdefault(str(one.target), []).append(one.host.name)
    for names in [list(now), *(alike.values() if len(alike) > 1 else ())]:
        for one in await _chained(fleet, [now[name] for name in names], files, say):
            now[one.host.name] = one


async def _chained(fleet: Fleet, setups: Sequence[HostSetup], files_of: FilesOf, say: Say) -> list[HostSetup]:
    """Send down one chain what all lack that lack anything, and return those that have it now."""
    able = {one.host.name: one for one in setups if one.parts.runs_programs and not_there(files_of(one.host.name), one.parts.files)}
    if len(able) < 2 or not _common(able.values(), files_of):
        return []
    facts, _ = await fleet.look(able)
    groups = (await sharing(fleet, {name: able[name].parts.data for name in facts})).groups
    firsts = {group[0]: facts[group[0]] for group in groups}
    files = _common((able[name] for name in firsts), files_of)
    if len(firsts) < 2 or not files:
        return []
    size = sum(file.size for file in files) / 1e6
    say(f"{', '.join(firsts)}: sending {number_of(len(files), 'file')}, {size:.0f} MB, from host to host")
    with _together(files) as source:
        stops = [
            Stop(name, fleet.place(name), f"{able[name].parts.data}/", (able[name].parts.data,), address)
            for name, address in zip(firsts, stated_addresses(fleet, firsts), strict=True)
        ]
        ports = listening_ports(fleet.cluster, firsts.values())
        results = await Chain(stops, str(source), ports, {name: TransferProgress() for name in firsts}, say, private=True).run()
    there = {file.path.name: file.size for file in files}
    now = []
    for group in groups:
        result = results[group[0]]
        if isinstance(result, Exception):
            say(f"{group[0]}: {result}; its files go from this machine")
        else:
            now += [replace(able[name], parts=replace(able[name].parts, files={**able[name].parts.files, **there})) for name in group]
    return now


@contextmanager
def _together(files: Iterable[WheelFile]) -> Iterator[Path]:
    """Folder that leads to these files."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        source = Path(folder, FOLDER)
        source.mkdir()
        for file in files:
            (source / file.path.name).symlink_to(file.path.resolve())
        yield source


def _common(setups: Iterable[HostSetup], files_of: FilesOf) -> list[WheelFile]:
    """Files that all of these hosts lack."""
    lacking = [{file.path.name: file for file in not_there(files_of(one.host.name), one.parts.files)} for one in setups]
    return [file for name, file in lacking[0].items() if all(name in other for other in lacking)] if lacking else []
