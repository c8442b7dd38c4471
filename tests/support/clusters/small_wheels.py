"""Folders of wheels with a lock, for the environments of the tests' hosts: packages of one file each, or those that this machine has
installed.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import itertools
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

from lockstep.plan.hosts.wheels import HostTarget, normalized, read_lock
from lockstep.platforms.hosts.wheelhouse import cache_folder, gather
from support.checkout import ROOT

TIME = (2020, 1, 1, 0, 0, 0)


def write_wheel(folder: Path, name: str, version: str, text: str) -> Path:
    """Write the wheel of a package with one module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(zipfile.ZipInfo(file, TIME), content)
    return path


def write_lock(path: Path, wheels: list[Path]) -> Path:
    """Pin the wheels, each by its digest, as uv writes it."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    path.write_text("".join(lines))
    return path


def uv_wheel(machine: str = "x86_64") -> Path:
    """The wheel of uv that requirements/bootstrap.lock pins, downloaded once and kept with other downloads."""
    lock = ROOT / "requirements/bootstrap.lock"
    text, target = lock.read_text(), HostTarget((3, 11), machine, (2, 17))
    files = asyncio.run(gather(read_lock(text, str(lock)), [target], cache_folder(), None, print))
    return files[target][0].path


def make_wheelhouse(folder: Path, packages: Mapping[str, str]) -> Path:
    """Make a folder with uv and these packages, version 1.0, beside a lock of them, and return the lock. `packages`: text of each by
    name.
    """
    house = _house(folder)
    wheels = [write_wheel(house, name, "1.0", text) for name, text in packages.items()]
    return write_lock(folder / "small.lock", wheels)


def installed_wheelhouse(folder: Path, names: Path) -> Path:
    """Make a folder with uv and the packages of the lock `names`, packed from what is installed here, beside a lock of them, and return
    that.

    Nothing is downloaded: `make setup` has the very versions of requirements/train.lock. A package that this machine's Python leaves out is
    left out.
    """
    house, wanted = _house(folder), {pin.name for pin in read_lock(names.read_text(), str(names))}
    found = {normalized(one.metadata["Name"]): one for one in importlib.metadata.distributions()}
    return write_lock(folder / "installed.lock", [_packed(house, found[name]) for name in sorted(wanted & set(found))])


def _house(folder: Path) -> Path:
    house = folder / "wheels"
    house.mkdir(parents=True, exist_ok=True)
    uv = uv_wheel(os.uname().machine)
    if not (house / uv.name).exists():
        os.link(uv, house / uv.name) if uv.stat().st_dev == house.stat().st_dev else (house / uv.name).write_bytes(uv.read_bytes())
    return house


def _packed(house: Path, package: importlib.metadata.Distribution) -> Path:
    """Pack an installed package as a wheel again, without its scripts. Nothing is compressed: that would take minutes."""
    files = [file for file in package.files or [] if ".." not in file.parts and file.suffix != ".pyc" and file.locate().is_file()]
    info = next(file.parts[0] for file in files if file.parts[0].endswith(".dist-info"))
    tags = [line.partition(": ")[2].split("-") for line in (package.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    python, abi, platform = (".".join(dict.fromkeys(tag[part] for tag in tags)) for part in range(3))
    path = house / f"{info.removesuffix('.dist-info')}-{python}-{abi}-{platform}.whl"
    record = f"{info}/RECORD"
    with zipfile.ZipFile(path, "w", strict_timestamps=False) as archive:
        for file in files:
            if file.as_posix() != record:
                archive.write(file.locate(), file.as_posix())
        archive.writestr(record, "".join(f"{name},,\n" for name in itertools.chain(archive.namelist(), [record])))
    return path
