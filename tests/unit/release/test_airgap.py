"""The mirror's script, with a `skopeo` that only writes down what it is asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from release import airgap, bundle, installyaml
from release.parts import Images
from support.release.files import REGISTRY, mirror

IMAGES = Images(*(f"{REGISTRY}/lockstep-{name}:0.1.0@sha256:{'0' * 64}" for name in ("operator", "trainer")))
COPIES = 'echo "$@" >> asked\n'
REFUSES = 'echo \'time="…" level=fatal msg="pinging \\"registry\\": connection refused"\' >&2\nexit 1\n'


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    for form in (installyaml, bundle, airgap):
        form.write(folder, IMAGES)
    return folder


@pytest.fixture
def dist(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release's files, beside a folder that is first in PATH."""
    shutil.copytree(written, tmp_path / "dist")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "dist"


def skopeo(dist: Path, does: str) -> None:
    program = dist.parent / "bin/skopeo"
    program.write_text(f"#!/bin/sh\n{does}")
    program.chmod(0o755)


def test_each_image_is_copied_with_its_digest_to_its_name_in_the_registry(dist: Path) -> None:
    skopeo(dist, COPIES)
    assert mirror(dist, "mirror:5000/team/", "--dest-tls-verify=false").returncode == 0
    assert (dist / "asked").read_text().splitlines() == [
        f"copy --dest-tls-verify=false --all --preserve-digests oci:images/{name} docker://mirror:5000/team/lockstep-{name}:0.1.0"
        for name in ("operator", "trainer")
    ]


def test_all_files_name_the_registry_afterwards_and_another_one_after_the_next_time(dist: Path) -> None:
    skopeo(dist, COPIES)
    files = [path for path in dist.rglob("*") if path.is_file()]
    before = {path: path.read_text() for path in files}
    assert sum(REGISTRY in text for text in before.values()) == 4  # images.txt, two of install.yaml, the ClusterServiceVersion
    for registry in ("mirror:5000/team", "other/lockstep"):
        assert mirror(dist, registry).returncode == 0
        assert {path: path.read_text() for path in files} == {
            path: text.replace(f"{REGISTRY}/lockstep-", f"{registry}/lockstep-") for path, text in before.items()
        }


def test_a_registry_that_refuses_is_said_in_a_sentence_and_no_file_names_it(dist: Path) -> None:
    skopeo(dist, REFUSES)
    done = mirror(dist, "mirror:5000/team")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'mirror.sh: mirror:5000/team doesn\'t take lockstep-operator:0.1.0: pinging "registry": connection refused\n'
    assert (dist / "images.txt").read_text().count(REGISTRY) == 2


def test_no_skopeo_is_said_in_a_sentence(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sh", "dirname"):
        (dist.parent / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(dist.parent / "bin"))
    done = mirror(dist, "mirror:5000/team")
    assert (done.returncode, done.stderr) == (
        1,
        "mirror.sh: skopeo is missing: install it (apt-get install skopeo, or dnf install skopeo)\n",
    )


def test_a_release_without_the_trainer_lists_the_operator_s_image_alone(tmp_path: Path) -> None:
    airgap.write(tmp_path, Images(IMAGES.operator, ""))
    assert (tmp_path / "images.txt").read_text() == f"images/operator {IMAGES.operator}\n"
