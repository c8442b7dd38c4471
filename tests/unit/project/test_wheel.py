"""The wheel: all that the client needs but the packages, in the same bytes wherever it is built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.assets import PACKAGES
from support.checkout import ROOT

PARTS = (
    "LICENSE",
    "README.md",
    "pyproject.toml",
    ".gitignore",
    "clusters",
    "images",
    "manifests",
    "operator",
    "requirements",
    "scripts",
    "workspace",
)
BYTES_MAX = 4 * 10**6
LOCKS = ("bootstrap", "cli", "editors", "llamacpp", "local", "operator", "train", "vllm")


def _build(folder: Path, mode: str) -> Path:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / part)
    (folder / "images" / "__pycache__").mkdir(exist_ok=True)
    (folder / "images" / "__pycache__" / "install.cpython-311.pyc").touch()
    subprocess.run(["chmod", "-R", mode, str(folder)], check=True)
    (folder / "dist").mkdir()
    (folder / "dist" / "lockstep_trainer-0.0.9-py3-none-any.whl").touch()
    done = [
        subprocess.run([sys.executable, "scripts/supply.py", what], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        for what in ("sdist", "wheel")
    ]
    return folder / done[-1].stdout.splitlines()[0]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("wheels")
    yield [_build(folder / "one", "u=rwX,go=rX"), _build(folder / "another" / "place", "u=rwX,go=")]
    shutil.rmtree(folder)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_two_checkouts_make_the_same_bytes(wheels: list[Path]) -> None:
    assert wheels[0].name == wheels[1].name == "lockstep_trainer-0.1.0-py3-none-any.whl"
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert len(wheels[0].read_bytes()) <= BYTES_MAX
    sdists = [next(wheel.parent.glob("*.tar.gz")) for wheel in wheels]
    assert sdists[0].name == "lockstep_trainer-0.1.0.tar.gz"
    assert sdists[0].read_bytes() == sdists[1].read_bytes()


def test_it_has_the_code_and_the_parts_of_a_checkout_that_verbs_read_and_nothing_else(wheels: list[Path]) -> None:
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    parents = {name: ROOT / ("operator" if name == "lockstep" else "workspace") for name in PACKAGES}
    code = {f"{name}/{file}" for name, parent in parents.items() for file in _files(parent / name)}
    clusters = {f"clusters/{name}.yaml" for name in ("local", "template", "template-hosts")}
    single = {
        "LICENSE",
        "pyproject.toml",
        "workspace/ds_config.json",
        "workspace/train_multi_node.py",
        *(f"requirements/{name}.lock" for name in LOCKS),
    }
    folders = {f"{part}/{file}" for part in ("images", "manifests") for file in _files(ROOT / part)}
    info = {f"lockstep_trainer-0.1.0.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert names == code | {f"lockstep/assets/{name}" for name in clusters | single | folders} | info
    assert {"lockstep/devcluster/kube/go.sum", "lockstep/devcluster/kube/pause/main.go", "lockstep/cli/topics/words.txt"} <= names


def test_its_needs_are_the_client_s_as_ranges_and_there_are_no_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "optional-dependencies" not in project
    assert not {"torch", "kopf", "kubernetes", "cryptography"} & {need.partition(">")[0] for need in project["dependencies"]}
    locks = {name: (ROOT / "requirements" / f"{name}.lock").read_text() for name in ("cli", "lowest")}
    for need in project["dependencies"]:
        name, _, lowest = need.partition(",")[0].partition(">=")
        assert f"\n{name}=={lowest}" in f"\n{locks['lowest']}" and f"\n{name}==" in f"\n{locks['cli']}"


def test_the_trainer_beside_the_client_is_that_of_dev() -> None:
    pins = [set((ROOT / "requirements" / f"{name}.lock").read_text().split()) for name in ("local", "dev")]
    local, dev = ({word for word in words if "==" in word} for words in pins)
    assert local <= dev and any(word.startswith("torch==") for word in local)
