"""Files of environments that several hosts lack: they cross this machine's link once, and go from host to host like a copy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from lockstep.plan.hosts.setup import HostSetup
from lockstep.plan.hosts.volumes import listening_ports
from lockstep.platforms.files.transfer import TransferProgress
from lockstep.platforms.hosts.chain import Chain, Stop, stated_addresses
from lockstep.platforms.hosts.environment import Packages, Say
from lockstep.platforms.hosts.fleet import Fleet
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.hosts.wheelhouse import WheelFile

FOLDER = "wheels"
"""Folder of such files, in that of a host's environments."""


async def spread(fleet: Fleet, setups: Sequence[HostSetup], packages: Packages, say: Say) -> list[HostSetup]:
    """Send what all of these hosts lack, then what those with the same Python and processor lack. Return the setups with the files that are there now.

    A host that a chain can't serve is named, and its files are left to `set_up`, which sends them from here.
    """
    now = {one.host.name: one for one in setups}
    alike: dict[str, list[str]] = {}
    for one in setups:
        alike.setdefault(str(one.target), []).append(one.host.name)
    for names in [list(now), *(alike.values() if len(alike) > 1 else ())]:
        for one in await _chained(fleet, [now[name] for name in names], packages, say):
            now[one.host.name] = one
    return list(now.values())


async def _chained(fleet: Fleet, setups: Sequence[HostSetup], packages: Packages, say: Say) -> list[HostSetup]:
    """Send down one chain what all lack, and return those that have it now."""
    able = {one.host.name: one for one in setups if one.parts.runs_programs}
    if len(able) < 2 or not _common(able.values(), packages):
        return []
    facts, _ = await fleet.look(able)
    groups = await sharing(fleet, {name: able[name].parts.data for name in facts})
    firsts = {group[0]: facts[group[0]] for group in groups}
    files = _common((able[name] for name in firsts), packages)
    if len(firsts) < 2 or not files:
        return []
    say(f"{', '.join(firsts)}: sending {len(files)} files, {sum(file.size for file in files) / 1e6:.0f} MB, from host to host")
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


def _common(setups: Iterable[HostSetup], packages: Packages) -> list[WheelFile]:
    """Files that all of these hosts lack."""
    lacking = [{file.path.name: file for file in packages.lacking(one)} for one in setups]
    return [file for name, file in lacking[0].items() if all(name in other for other in lacking)] if lacking else []
