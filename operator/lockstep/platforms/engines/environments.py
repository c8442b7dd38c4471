"""Engines that read what was trained, each in a locked environment of its own in this machine's cache; run as a program, it makes them."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import sys
import tarfile
from enum import Enum
from pathlib import Path

from lockstep.api.errors import ConfigError
from lockstep.assets import asset
from lockstep.environments import Say, cache_root, environment_key, is_whole, made, packages, site_packages, thin_venv
from lockstep.plan.hosts.wheels import HostTarget, read_lock
from lockstep.platforms.hosts.wheelhouse import cache_folder, gather, index_here

CMAKE = "-DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1"
"""Options of llama.cpp's build: without pictures, and compiled in half the time, since it serves no one."""
_SOURCES = "llama.cpp"
_CONVERTERS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion/", "gguf-py/", "models/ggml-vocab-gpt-2.gguf")


class Engine(Enum):
    """A program that serves models, by its lock."""

    VLLM = "vllm"
    LLAMA_CPP = "llamacpp"


def reader(engine: Engine) -> tuple[Path, Path]:
    """Return an engine's Python, and the program that prints the log-probabilities which the engine gives. Raises ConfigError."""
    return _installed(engine) / "bin" / "python", Path(__file__).with_name(f"read_{engine.value}.py")


def converter() -> tuple[Path, Path]:
    """Return a Python, and llama.cpp's own program that makes a GGUF file of an adapter's folder. Raises ConfigError."""
    home = _installed(Engine.LLAMA_CPP)
    return home / "bin" / "python", home / _SOURCES / "convert_lora_to_gguf.py"


def _installed(engine: Engine) -> Path:
    home = _home(engine, cache_root())
    if not is_whole(home):
        raise ConfigError(f"{engine.value} isn't installed in {cache_root()}: type `make engines` in a checkout, or `python -m {__name__}`")
    return home


def _home(engine: Engine, cache: Path) -> Path:
    keys = [environment_key(asset(f"requirements/{name}.lock")) for name in (engine.value, "local")]
    if engine is Engine.VLLM:
        return cache / "python" / keys[0]
    return cache / "engines" / hashlib.sha256(" ".join([*keys, CMAKE]).encode()).hexdigest()[:16]


def install(say: Say) -> None:
    """Make the environments that aren't there. llama.cpp's has the trainer's packages, too, which its converters use. Raises Failed."""
    cache, lock = cache_root(), asset("requirements/llamacpp.lock")
    target = HostTarget(sys.version_info[:2], platform.machine(), (2, int(platform.libc_ver()[1].split(".")[1])))
    home = _home(Engine.LLAMA_CPP, cache)
    if not is_whole(home):
        pins = [pin for pin in read_lock(lock.read_text(encoding="utf-8"), str(lock)) if pin.name == "llama-cpp-python"]
        [[source]] = asyncio.run(gather(pins, [target], cache_folder(), index_here(None), say)).values()
        own = packages(Engine.LLAMA_CPP.value, cache, say, CMAKE_ARGS=CMAKE, UV_FIND_LINKS=str(cache_folder()))
        others = site_packages(packages("local", cache, say))

        def make(draft: Path) -> None:
            thin_venv(draft, own, [others], home)
            with tarfile.open(source.path) as archive:
                for member in archive:
                    member.name = member.name.partition("/vendor/llama.cpp/")[2]
                    if member.name.startswith(_CONVERTERS):
                        archive.extract(member, draft / _SOURCES, filter="data")

        made(home, cache, say, make)
    packages(Engine.VLLM.value, cache, say)
    say(f"vLLM and llama.cpp are ready ({_home(Engine.VLLM, cache)}, {home})")


if __name__ == "__main__":
    install(lambda text: print(f"engines: {text}", flush=True))
