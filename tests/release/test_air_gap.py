"""An air gap: images go from the release's folder into a registry with their digests, and every form then names that registry."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.release.files import REGISTRY, mirror

pytestmark = pytest.mark.long


def test_each_image_is_in_the_registry_under_the_name_and_the_digest_of_the_list(mirrored: Path, registry: str) -> None:
    names = [line.split()[1] for line in (mirrored / "images.txt").read_text().splitlines()]
    assert [name.partition(":0")[0] for name in names] == [f"{registry}/team/lockstep-{image}" for image in ("operator", "trainer")]
    for name in names:
        tagged, _, digest = name.partition("@")
        command = ["skopeo", "inspect", "--tls-verify=false", "--format", "{{.Digest}}", f"docker://{tagged}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == digest


def test_no_file_names_another_registry_afterwards(dist: Path, mirrored: Path, registry: str) -> None:
    before = {path.relative_to(dist): path.read_text() for path in dist.rglob("*.*") if path.is_file() and "images" not in path.parts}
    assert sum(REGISTRY in text for text in before.values()) == 4  # images.txt, two of install.yaml, the ClusterServiceVersion
    for path, text in before.items():
        assert (mirrored / path).read_text() == text.replace(f"{REGISTRY}/lockstep-", f"{registry}/team/lockstep-"), path


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "mirror.sh: name your registry and a folder in it: sh mirror.sh registry.example.com/team\n"),
        (["127.0.0.1:1/team"], "mirror.sh: 127.0.0.1:1/team doesn't take lockstep-operator:0.1.0: "),
    ],
)
def test_no_registry_is_said_in_a_sentence_and_changes_no_file(dist: Path, arguments: list[str], sentence: str) -> None:
    listed = (dist / "images.txt").read_text()
    done = mirror(dist, *arguments)
    assert done.returncode == 1 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    assert (dist / "images.txt").read_text() == listed
