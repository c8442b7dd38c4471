"""Fixtures of the tests of other people's programs: a project, what torchrun makes of it, and the places where Lockstep runs it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from programs.inputs import PROGRAMS, make_project, packages
from programs.places import OnCluster, OnHosts, OnThisMachine, Place


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' packages as `pip install --target packages` leaves them, without bytecode."""
    folder = tmp_path_factory.mktemp("installed") / "packages"
    return Path(shutil.copytree(packages(), folder, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("projects") / "project"
    make_project(folder)
    return folder


@pytest.fixture(scope="session")
def expected(installed: Path, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses of a program under torchrun, in a copy of the project."""
    losses: dict[str, list[float]] = {}

    def of(name: str) -> list[float]:
        if name not in losses:
            copy = tmp_path_factory.mktemp("torchrun") / "project"
            losses[name] = PROGRAMS[name].losses(PROGRAMS[name].under_torchrun(installed, shutil.copytree(project, copy)))
            assert losses[name], f"no losses of {name}"
        return losses[name]

    return of


@pytest.fixture(scope="module", params=[OnThisMachine, OnHosts, OnCluster], ids=["this machine", "hosts", "cluster"])
def place(request: pytest.FixtureRequest, installed: Path, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place with the project and the packages in its /workspace."""
    with request.param.opened(tmp_path_factory.mktemp("typed")) as place:
        place.put(installed)
        place.put(project)
        yield place
        place.end()
