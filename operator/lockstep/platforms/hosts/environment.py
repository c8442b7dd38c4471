"""Environments for ranks on hosts: look at what is there, send what is lacking, from host to host where several lack it, and let the host
make the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lockstep.api.errors import Failed
from lockstep.assets import package
from lockstep.plan.hosts.place import absolute
from lockstep.plan.hosts.setup import HostParts, HostSetup, read_parts
from lockstep.plan.hosts.volumes import listening_ports
from lockstep.plan.hosts.wheels import Pin, is_source, lock_of, normalized
from lockstep.platforms.files.transfer import Carried, TransferProgress, put
from lockstep.platforms.hosts.copies import stated_addresses
from lockstep.platforms.hosts.fleet import Fleet, old_source_of
from lockstep.platforms.hosts.place import HostPlace
from lockstep.platforms.hosts.spread import Spread, Stop
from lockstep.platforms.hosts.volumes import sharing
from lockstep.platforms.hosts.wheelhouse import WheelFile, digest_of, fetch
from lockstep.platforms.inpod import carry, source_of
from lockstep.platforms.onhost import gputest, install
from lockstep.platforms.places.values import Say
from lockstep.programs import ProgramFailed, answer_of, lines_in, python_output, python_program
from lockstep_spec.files import write_durably
from lockstep_spec.words import number_of

LOOK_SECONDS = 30.0
MAKE_SECONDS = 4 * 3600.0
GPU_SECONDS = 300.0
SOURCE_ONLY = ("deepspeed",)
"""Packages of requirements/train.lock that have no wheel: a host builds theirs, with what else the lock brings."""
TRAINER = ("lockstep_gang", "lockstep_machine", "lockstep_spec", "lockstep_train")
_ARCHIVE = re.compile(r"https://[^\s?#]+/(?P<release>\d{8})/(?P<name>cpython-[A-Za-z0-9._+-]{1,200}\.tar\.(?:gz|zst))")
_TIME = (1980, 1, 1, 0, 0, 0)
FilesOf = Callable[[str], Sequence[WheelFile]]
"""Files that a host needs, by its name."""
FOLDER = "wheels"
"""Folder of such files, in that of a host's environments."""


@dataclass(frozen=True)
class Packages:
    """Parts that an environment is made of."""

    pins: Sequence[Pin]
    trainer: WheelFile
    """Archive of Lockstep's own packages."""
    uv: Mapping[str, WheelFile]
    """Wheel of uv, by host."""
    files: Mapping[str, Sequence[WheelFile]] | None
    """Files of the packages, by host; None: the hosts reach an index."""
    index: str | None = None

    def of(self, name: str) -> list[WheelFile]:
        """Return the files that go to a host."""
        return [self.uv[name], self.trainer, *(self.files or {}).get(name, ())]

    def brings_python(self, setup: HostSetup) -> bool:
        """Return True if the archive of a Python goes to this host, too."""
        return setup.makes and self.files is not None and not setup.python.path


def not_there(files: Iterable[WheelFile], there: Mapping[str, int]) -> list[WheelFile]:
    """Return the files that aren't there whole. `there`: sizes by name."""
    return [file for file in files if there.get(file.path.name) != file.size]


def trainer_archive(version: str) -> bytes:
    """Lockstep's own packages for ranks, as an archive of files: same sources, same bytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name in TRAINER:
            folder = package(name)
            for path in sorted(folder.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.writestr(zipfile.ZipInfo(f"{name}/{path.relative_to(folder).as_posix()}", _TIME), path.read_bytes())
        info, text = f"lockstep_trainer-{version}.dist-info", f"Metadata-Version: 2.1\nName: lockstep-trainer\nVersion: {version}\n"
        archive.writestr(zipfile.ZipInfo(f"{info}/METADATA", _TIME), text)
        archive.writestr(zipfile.ZipInfo(f"{info}/INSTALLER", _TIME), "lockstep\n")
    return written.getvalue()


def trainer_file(folder: Path, version: str) -> WheelFile:
    """Write the archive into a folder, and return it."""
    data = trainer_archive(version)
    digest = hashlib.sha256(data).hexdigest()
    path = folder / f"lockstep-trainer-{digest[:16]}.zip"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size != len(data):
        write_durably(path, data)
    return WheelFile(path, digest)


async def look(fleet: Fleet, names: Iterable[str]) -> tuple[dict[str, HostParts], dict[str, str]]:
    """Ask every host what it has of an environment; by host why one gave no answer."""

    async def one(name: str) -> HostParts:
        host = fleet.cluster.host(name)
        async with asyncio.timeout(LOOK_SECONDS):
            return read_parts(name, await _asked(fleet.place(name), {"do": "facts", "folders": [host.workspace, host.datasets]}))

    return await fleet.all(names, one)


async def set_up(fleet: Fleet, setup: HostSetup, packages: Packages, say: Say) -> bool:
    """Make the host ready, and return whether its user's units go on without a login. Raises Failed with the host's reason."""
    name = setup.host.name
    place = fleet.place(name)
    files: list[WheelFile] = []
    request: dict[str, Any] = {
        "do": "make", "environment": setup.environment, "linger": setup.lingers, "keep": [], "files": [], "archive": None,
        "folders": [absolute(folder, setup.parts.home) for folder in setup.folders],
    }  # fmt: skip
    if setup.makes:
        files = packages.of(name)
        await _send(place, setup, files, say)
        if packages.brings_python(setup):
            release, file = await python_archive(fleet, setup, packages)
            await _send(place, setup, [file], say)
            files.append(file)
            request["archive"] = [release, file.path.name]
        request |= _making(setup, packages, files)
    async with asyncio.timeout(MAKE_SECONDS):
        return bool((await _asked(place, request, lambda step: say(f"{name}: {step}")))["linger"])


def _making(setup: HostSetup, packages: Packages, files: Sequence[WheelFile]) -> dict[str, Any]:
    offline = packages.files is not None
    names = [file.path.name for file in files]
    sources = {pin.name for pin in packages.pins if pin.name in SOURCE_ONLY}
    if packages.files is not None:
        own = [file.path.name for file in packages.files[setup.host.name]]
        sources = {normalized(name.rpartition("-")[0]) for name in own if is_source(name)}
    return {
        "uv": packages.uv[setup.host.name].path.name,
        "trainer": packages.trainer.path.name,
        "folders_of_trainer": TRAINER,
        "python": setup.python.path,
        "version": setup.python.version,
        "offline": offline,
        "index": "" if offline else packages.index or "",
        "wheels": lock_of(pin for pin in packages.pins if pin.name not in sources),
        "sources": lock_of(pin for pin in packages.pins if pin.name in sources),
        "built": ", ".join(sorted(sources)),
        "packages": len(packages.pins),
        "files": [[file.path.name, file.sha256] for file in files],
        "keep": names,
    }


async def python_archive(fleet: Fleet, setup: HostSetup, packages: Packages) -> tuple[str, WheelFile]:
    """Download the archive of the Python that a host's uv, which must be there, brings; uv knows its digest, and refuses another one.
    Return the release that its name stands in, as uv looks for it, and the file. Raises Failed.
    """
    uv = packages.uv[setup.host.name].path
    answer = await _asked(fleet.place(setup.host.name), {"do": "archive", "uv": uv.name, "version": setup.python.version})
    release, name = address_of_python(setup.host.name, url := str(answer["url"]))
    path = uv.parent / name
    await fetch(url, path)
    return release, WheelFile(path, await asyncio.to_thread(digest_of, path))


def address_of_python(host: str, url: str) -> tuple[str, str]:
    """Return the release and the file's name of an address that a host answers. Raises ProgramFailed: whoever owns a host decides what it
    answers.
    """
    match = _ARCHIVE.fullmatch(unquote(url))
    if match is None:
        raise ProgramFailed(f"host {host}: {url[:200]!r} is no address of a Python: it is https://…/RELEASE/cpython-….tar.gz")
    return match["release"], match["name"]


async def _send(place: HostPlace, setup: HostSetup, files: Sequence[WheelFile], say: Say) -> None:
    """Send the files that aren't there; of one that came in part, the rest. Raises Failed with the host's reason."""
    lacking, data = not_there(files, setup.parts.files), setup.parts.data
    if not lacking:
        return
    size = sum(file.size for file in lacking)
    say(f"{setup.host.name}: sending {number_of(len(lacking), 'file')}, {size / 1e6:.0f} MB")
    with _together(lacking) as source:
        try:
            await put(place, source, f"{data}/", [data], TransferProgress(), on_host=old_source_of(carry))
        except Failed as error:
            raise Failed(f"{place.name}: {str(error).removeprefix(f'{place.name}: ')}") from None


async def _asked(place: HostPlace, request: Mapping[str, Any], step: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Return the last answer to a request; `step` hears what is done meanwhile. Raises ProgramFailed with the host's reason."""
    async with python_program(place, old_source_of(install)) as program:
        await program.write(json.dumps(request).encode() + b"\n")
        async for line in lines_in(program):
            answer = answer_of(line, place.name)
            if "step" in answer:
                step(str(answer["step"])[:200])
            elif "done" in answer:
                return answer
            else:
                raise ProgramFailed(f"{place.name}: {answer.get('problem', answer)}")
        raise program.failure()


async def spread(fleet: Fleet, setups: Sequence[HostSetup], packages: Packages, say: Say) -> list[HostSetup]:
    """Send what hosts with the same Python and processor lack, from host to host, then the archives of the Pythons that hosts get.

    Return the setups with the files that are there now. A host that gets nothing this way is named, and its files are left to `set_up`,
    which sends them from here.
    """
    now = {one.host.name: one for one in setups}
    await _spread(fleet, now, packages.of, say)
    brought = [one for one in now.values() if packages.brings_python(one) and packages.uv[one.host.name].path.name in one.parts.files]
    archives, _ = await fleet.all([one.host.name for one in brought], lambda name: python_archive(fleet, now[name], packages))
    await _spread(fleet, now, lambda name: [archives[name][1]] if name in archives else [], say)
    return list(now.values())


async def _spread(fleet: Fleet, now: dict[str, HostSetup], files_of: FilesOf, say: Say) -> None:
    """Send the files of hosts of each kind, and note in `now` what is there."""
    kinds: dict[str, list[str]] = {}
    for name, one in now.items():
        if one.parts.runs_programs and not_there(files_of(name), one.parts.files):
            kinds.setdefault(str(one.target), []).append(name)
    for names in kinds.values():
        if len(names) > 1:
            for name, result in (await _sent(fleet, now, names, files_of(names[0]), say)).items():
                if isinstance(result, Exception):
                    say(f"{name}: {result}; its files go from this machine")
                else:
                    there = {file.path.name: file.size for file in files_of(name)}
                    now[name] = replace(now[name], parts=replace(now[name].parts, files={**now[name].parts.files, **there}))


async def _sent(
    fleet: Fleet, now: Mapping[str, HostSetup], names: Sequence[str], files: Sequence[WheelFile], say: Say
) -> dict[str, Carried | Exception]:
    """Send these files to hosts of one kind; one of each group that shares a folder gets them for all of it."""
    facts, _ = await fleet.look(names)
    groups = (await sharing(fleet, {name: now[name].parts.data for name in facts})).groups
    leaders = {group[0]: facts[group[0]] for group in groups}
    size = sum(file.size for file in files) / 1e6
    say(f"{', '.join(leaders)}: sending {number_of(len(files), 'file')}, {size:.0f} MB, from host to host")
    with _together(files) as source:
        data = {name: now[name].parts.data for name in leaders}
        stops = [
            Stop(name, fleet.place(name), f"{data[name]}/", [data[name]], address, TransferProgress())
            for name, address in zip(leaders, stated_addresses(fleet, leaders), strict=True)
        ]
        results = await Spread(stops, str(source), listening_ports(fleet.cluster, leaders.values()), say, None).run()
    return {name: results[group[0]] for group in groups for name in group}


@contextmanager
def _together(files: Iterable[WheelFile]) -> Iterator[Path]:
    """Folder that leads to these files."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        source = Path(folder, FOLDER)
        source.mkdir()
        for file in files:
            (source / file.path.name).symlink_to(file.path.resolve())
        yield source


async def try_gpus(fleet: Fleet, setup: HostSetup) -> list[str]:
    """Let every GPU of the host compute, with the packages of its environment. Return a line for each; no line where the lock has no torch.

    Raises Failed naming the GPUs that can't.
    """
    name = setup.host.name
    python = f"{setup.path}/bin/python"
    place = HostPlace(fleet.place(name).shared, (python,))
    answer = answer_of(await python_output(place, source_of(gputest), seconds=GPU_SECONDS), place.name)
    if answer.get("torch") is None:
        return []
    gpus = [dict(gpu) for gpu in answer.get("gpus", [])]
    broken = [f"GPU {index} ({gpu['name']}): {gpu['problem']}" for index, gpu in enumerate(gpus) if "problem" in gpu]
    if len(gpus) < setup.parts.gpus:
        broken.append(f"torch {answer['torch']} sees {len(gpus)} of {setup.parts.gpus} GPUs: its driver may be too old for these packages")
    if broken:
        raise Failed(f"host {name}: {'; '.join(broken)}")
    return [f"GPU {index}: {gpu['name']}, {gpu['teraflops']:.0f} TFLOP/s in {gpu['kind']}" for index, gpu in enumerate(gpus)]
