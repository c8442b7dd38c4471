"""Make a folder of what a GPU machine without network lacks for `tests/gpu` and `tests/bench/gpu.py`: DeepSpeed and what it imports, and
Liger's kernels, which the benchmark compares.

    scripts/gpu_carry.py [--python 3.12] [--output .gpu-carry]

DeepSpeed and other packages of pure Python are copied from this environment; compiled ones come as wheels for the other machine's Python,
of the versions in requirements/train.lock. Liger is no dependency of Lockstep: its version stands here alone. torch with Triton,
transformers, peft and safetensors must be there. Run it again to make it anew.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("deepspeed", "hjson", "einops", "py-cpuinfo", "pydantic", "annotated-types", "typing-inspection", "typing-extensions")
COMPILED = ("pydantic-core", "msgpack", "psutil")
LIGER = "liger-kernel==0.8.5"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux2010_x86_64")
MOST_BYTES = 64 << 20


def copy_package(name: str, folder: Path) -> None:
    """The files of an installed package, without bytecode, programs and sources of operators that nobody compiles here."""
    for file in importlib.metadata.files(name) or []:
        if ".." in file.parts or "__pycache__" in file.parts or "csrc" in file.parts:
            continue
        source, target = Path(str(file.locate())), folder / file
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def unpack_wheels(python: str, folder: Path) -> None:
    """Compiled packages for another Python, and Liger. Raises CalledProcessError with what pip says."""
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/train.lock").read_text(), re.MULTILINE))
    wanted = [*(f"{name}=={versions[name]}" for name in COMPILED), LIGER]
    with tempfile.TemporaryDirectory() as temporary:
        options = f"--quiet --no-deps --only-binary=:all: --implementation cp --python-version {python}".split()
        options += [*(f"--platform={platform}" for platform in PLATFORMS), "--dest", temporary]
        subprocess.run([getattr(sys, "_base_executable", sys.executable), "-m", "pip", "download", *options, *wanted], check=True)
        for wheel in sorted(Path(temporary).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    parser.add_argument("--output", type=Path, default=ROOT / ".gpu-carry")
    options = parser.parse_args()
    folder: Path = options.output
    if folder.exists() and not (folder / "deepspeed").is_dir() and any(folder.iterdir()):
        print(f"{folder} holds other things than this program makes; name an empty folder with --output", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in COPIED:
        copy_package(name, folder)
    unpack_wheels(options.python, folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.0f} MB for Python {options.python}")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
