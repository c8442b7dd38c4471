"""Environments that have the wheel alone, as an installer makes them, and the lines that are typed in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import supply
from installed.typed import Ended, Installed, Story, tell
from lockstep.environments import cache_root, installer, packages, site_packages

LOCKS = ("cli", "lowest")
"""What the client is installed with: the newest versions that its ranges allow, and the oldest."""
AT_ONCE = 3
"""Lines typed at the same time: most wait for a part of theirs."""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return supply.wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="session")
def environments(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Installed]]:
    """An environment for each lock. Its packages are those in the cache, and the installer has put the wheel before them."""
    root, cache = tmp_path_factory.mktemp("installed"), cache_root()
    uv = installer(cache)
    packages("local", cache, print)  # with this process's variables and time, which a typed line has not
    try:
        made = {lock: _installed(wheel, root, lock, uv, cache) for lock in LOCKS}
        with ExitStack() as stack:
            for installed in made.values():
                stack.enter_context(installed.serving())
            yield made
    finally:
        for full in (cache / "full").glob("*"):  # for code that is removed now
            code = full / "code/lockstep"
            if code.is_symlink() and code.readlink().is_relative_to(root):
                shutil.rmtree(full)
        shutil.rmtree(root)


def _installed(wheel: Path, root: Path, lock: str, uv: str, cache: Path) -> Installed:
    folder = root / lock
    subprocess.run([uv, "venv", "--quiet", "--offline", "--python", sys.executable, str(folder)], check=True)
    options = ["--quiet", "--offline", "--no-deps", "--link-mode", "copy", "--python", str(folder / "bin/python")]
    subprocess.run([uv, "pip", "install", *options, str(wheel)], check=True)
    (site_packages(folder) / "packages.pth").write_text(f"{site_packages(packages(lock, cache, print))}\n")
    return Installed(folder, cache)


@pytest.fixture(scope="session")
def ended(
    request: pytest.FixtureRequest, environments: Mapping[str, Installed], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Story, str], Ended]]:
    """Return how a story ended. All that this run of pytest has are typed side by side, those that take longest first."""
    chosen = {item.callspec.id: item.callspec.params for item in request.session.items if hasattr(item, "callspec")}  # type: ignore[attr-defined]
    stories = sorted((params["story"].takes, params["lock"], params["story"]) for params in chosen.values() if "story" in params)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends: dict[tuple[str, str], Future[Ended]] = {
            (story.name, lock): pool.submit(partial(tell, story, environments[lock], tmp_path_factory.mktemp("story")))
            for _, lock, story in reversed(stories)
        }
        try:
            yield lambda story, lock: ends[story.name, lock].result()
        finally:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(autouse=True)
def nothing_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert os.environ.get("PYTHONHOME") is None
