"""Engines in the cache: found where they are whole, made where they aren't, and named with the line that makes them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.platforms.engines import environments
from lockstep.platforms.engines.environments import Engine, converter, install, reader
from lockstep.platforms.hosts.wheelhouse import WheelFile

FILES = ("vendor/llama.cpp/convert_lora_to_gguf.py", "vendor/llama.cpp/gguf-py/gguf/gguf.py", "vendor/llama.cpp/src/llama.cpp", "setup.py")


@pytest.fixture
def installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was installed, where packages and downloads are stood in for."""
    names: list[str] = []
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "source.tar.gz", "w:gz") as archive:
        for name in FILES:
            archive.addfile(tarfile.TarInfo(f"llama_cpp_python-0.3.36/{name}"), io.BytesIO())

    def packages(name: str, cache: Path, *_: Any, **variables: str) -> Path:
        names.append(name)
        home = environments.cache_root() / "python" / environments.environment_key(environments.asset(f"requirements/{name}.lock"))
        home.mkdir(parents=True, exist_ok=True)
        (home / "done").touch()
        return home

    async def gather(_pins: Any, targets: Any, *_: Any) -> Any:
        names.append("source")
        return {targets[0]: [WheelFile(tmp_path / "source.tar.gz", "")]}

    monkeypatch.setattr(environments, "packages", packages)
    monkeypatch.setattr(environments, "gather", gather)
    return names


@pytest.mark.parametrize("engine", Engine)
def test_an_engine_that_is_not_there_is_named_with_the_line_that_installs_it(installs: list[str], engine: Engine) -> None:
    with pytest.raises(ConfigError, match=rf"{engine.value} isn't installed .*`make engines`"):
        reader(engine)


def test_engines_are_made_once_with_llama_cpp_s_converters_and_nothing_else_of_its_source(installs: list[str]) -> None:
    install(str)
    assert installs == ["source", "llamacpp", "local", "vllm"]
    install(str)
    assert installs[4:] == ["vllm"]
    python, program = converter()
    sources = program.parent
    assert sorted(path.name for path in sources.rglob("*") if path.is_file()) == ["convert_lora_to_gguf.py", "gguf.py"]
    assert python.exists() and (python, reader(Engine.LLAMA_CPP)[1].exists()) == (reader(Engine.LLAMA_CPP)[0], True)


def test_an_environment_without_its_mark_is_half_made_and_made_anew(installs: list[str]) -> None:
    install(str)
    home = converter()[1].parents[1]
    (home / "done").unlink()
    with pytest.raises(ConfigError, match="isn't installed"):
        converter()
    install(str)
    assert converter()[1].is_file()
