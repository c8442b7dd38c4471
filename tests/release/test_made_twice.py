"""`make release`, made twice from one commit on one base, signed with a key, and verified by the lines of docs/releases.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.devcluster import images
from lockstep.environments import cache_root
from release.programs import program
from support.checkout import ROOT
from support.clusters.built_image import STORAGE

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
OWN_EACH = {"SHA256SUMS.sigstore.json", "provenance.sigstore.json", "provenance.intoto.jsonl"}
"""Files that two releases of one commit don't share: a signature is another one each time, and the provenance has times."""
ZONES = ("UTC", "Asia/Kathmandu")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("releases")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def key(work: Path) -> Path:
    subprocess.run([str(program("cosign")), "generate-key-pair"], cwd=work, env=os.environ | {"COSIGN_PASSWORD": "word"}, check=True)
    return work / "cosign.key"


@pytest.fixture(scope="module")
def dists(work: Path, key: Path) -> list[Path]:
    for number in range(len(ZONES)):
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(work / str(number) / "clone")], check=True)
    base = images.base_archive(cache_root(), print)
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda number: _made(work / str(number), ZONES[number], key, base), range(len(ZONES)))]


def _made(folder: Path, zone: str, key: Path, base: Path) -> Path:
    """Make a release of a clone, with no layer of another one's to begin with."""
    (folder / "storage.conf").write_text(STORAGE.format(store=folder / "store", run=folder / "run"))
    path = ":".join(str(folder / "clone" / name) for name in ("scripts", "operator", "workspace"))
    environment = os.environ | {
        "BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "PYTHONPATH": path, "TZ": zone,
        "COSIGN_PASSWORD": "word",
    }  # fmt: skip
    command = [sys.executable, "-m", "release", "--no-trainer", "--base", f"docker-archive:{base}", "--key", str(key)]
    done = subprocess.run(command, cwd=folder / "clone", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Nothing was published" in done.stdout
    return folder / "clone/dist"


def _files(dist: Path) -> dict[str, bytes]:
    return {str(path.relative_to(dist)): path.read_bytes() for path in dist.rglob("*") if path.is_file() and path.name != ".gitignore"}


def test_two_releases_of_one_commit_on_one_base_are_the_same_bytes_but_for_signatures_and_times(dists: list[Path]) -> None:
    one, two = (_files(dist) for dist in dists)
    assert one.keys() == two.keys()
    assert {name for name in one if one[name] != two[name]} <= OWN_EACH
    statements = [json.loads(files["provenance.intoto.jsonl"]) for files in (one, two)]
    for statement in statements:
        statement["predicate"]["runDetails"]["metadata"] = {}
    assert statements[0] == statements[1]


def test_every_file_has_its_sum_and_its_line_in_the_provenance(dists: list[Path]) -> None:
    dist = dists[0]
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    subjects = {item["name"]: item["digest"]["sha256"] for item in json.loads((dist / "provenance.intoto.jsonl").read_text())["subject"]}
    assert sums == subjects and sums.keys() == _files(dist).keys() - OWN_EACH - {"SHA256SUMS"}


def _lines() -> list[list[str]]:
    """The lines of the page by which people verify a release."""
    [section] = re.findall(r"^## Verify a signature\n(.*?)^## ", (ROOT / "docs/releases.md").read_text(), re.MULTILINE | re.DOTALL)
    [block] = re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def _verified(dist: Path) -> list[bool]:
    path = f"{program('cosign').parent}:{os.environ['PATH']}"
    runs = [subprocess.run(line, cwd=dist, env=os.environ | {"PATH": path}, capture_output=True, check=False) for line in _lines()]
    return [run.returncode == 0 for run in runs]


def test_the_page_s_lines_verify_a_release_and_see_one_wrong_byte(dists: list[Path], key: Path) -> None:
    dist = dists[0]
    shutil.copy(key.with_suffix(".pub"), dist)
    assert _verified(dist) == [True, True, True]
    for name, seen in (("SHA256SUMS", [False, False, True]), ("lockstep_trainer-0.1.0-py3-none-any.whl", [True, False, False])):
        whole = (dist / name).read_bytes()
        (dist / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert _verified(dist) == seen, name
        (dist / name).write_bytes(whole)
    subprocess.run([str(program("cosign")), "generate-key-pair"], cwd=dist / "images", env=os.environ | {"COSIGN_PASSWORD": ""}, check=True)
    shutil.copy(dist / "images/cosign.pub", dist)
    assert _verified(dist) == [False, True, False], "another key"
