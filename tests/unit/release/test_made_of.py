"""What a release says that it is made of: its commit, its notes, and a statement about every file."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lockstep.api.errors import ConfigError
from release import provenance
from release.layouts import Layout, digest_of
from release.notes import notes
from release.parts import version
from support.checkout import ROOT

CHANGELOG = "# Changelog\n\n## 1.2.0 (soon)\n\n- New.\n\n### Part\n\n## 1.1.0\n\n- Old.\n"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    for name, value in (("NAME", "a"), ("EMAIL", "a@example.com"), ("DATE", "1700000000 +0000")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_a_release_has_the_time_of_its_commit(clone: Path) -> None:
    assert provenance.source() == provenance.Source(git(clone, "rev-parse", "HEAD"), 1_700_000_000)


def test_files_that_no_commit_has_are_refused(clone: Path) -> None:
    (clone / "draft").touch()
    with pytest.raises(ConfigError, match=r"^a release is made of a commit, and 1 files of this checkout are in none \(draft, …\): commit"):
        provenance.source()


def test_a_folder_without_a_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match=rf"^a release is made in a clone of the repository, and {tmp_path} is none: "):
        provenance.source()


def test_without_git_the_package_is_named(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(clone))
    with pytest.raises(ConfigError, match=r"git is not installed: apt-get install git$"):
        provenance.source()


def test_the_notes_are_the_section_of_the_version_and_name_the_commit() -> None:
    text = notes(CHANGELOG, "1.2.0", "abc")
    assert text.startswith("# Lockstep 1.2.0\n\n- New.\n\n### Part\n\nMade from commit abc.") and "Old" not in text


def test_a_version_of_which_the_change_log_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^CHANGELOG\.md says nothing of version 1\.3\.0, which pyproject\.toml has"):
        notes(CHANGELOG, "1.3.0", "abc")


def test_the_change_log_has_a_section_of_this_version() -> None:
    assert "The gang." in notes((ROOT / "CHANGELOG.md").read_text(), version(), "abc")


def test_every_file_of_every_folder_has_its_sum_as_sha256sum_reads_it(tmp_path: Path) -> None:
    (tmp_path / "images/blobs").mkdir(parents=True)
    (tmp_path / "images/blobs/b").write_text("b")
    (tmp_path / "a").write_text("a")
    (tmp_path / "SHA256SUMS").write_text(provenance.sums(provenance.digests(tmp_path, [tmp_path / "images", tmp_path / "a"])))
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "a: OK\nimages/blobs/b: OK\n"


def test_the_statement_names_every_file_and_all_that_it_was_made_from() -> None:
    layout = Layout(Path("images/operator"), "r/o:1@sha256:aa", "base:1", "sha256:bb")
    times = (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), datetime(2026, 1, 2, 3, 5, tzinfo=UTC))
    line = provenance.statement({"a": "cc"}, "abc", [layout], {"registry": "r"}, times)
    assert line.count("\n") == 1
    said = json.loads(line)
    assert said["subject"] == [{"name": "a", "digest": {"sha256": "cc"}}]
    assert (said["_type"], said["predicateType"]) == ("https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1")
    build, run = said["predicate"]["buildDefinition"], said["predicate"]["runDetails"]
    made_from = {item["name"]: item["digest"] for item in build["resolvedDependencies"]}
    assert made_from["commit"] == {"gitCommit": "abc"} and made_from["base:1"] == {"sha256": "bb"}
    locks = {f"requirements/{path.name}" for path in (ROOT / "requirements").glob("*.lock")}
    assert made_from.keys() == locks | {"commit", "base:1"} and build["externalParameters"] == {"registry": "r"}
    assert run["metadata"] == {"startedOn": "2026-01-02T03:04:05Z", "finishedOn": "2026-01-02T03:05:00Z"}


def test_the_digest_of_an_image_is_that_of_the_one_manifest_in_its_layout(tmp_path: Path) -> None:
    manifest = {"digest": "sha256:aa"}
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    assert digest_of(tmp_path) == "sha256:aa"
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [manifest, manifest]}))
    with pytest.raises(ValueError, match="too many values"):
        digest_of(tmp_path)
