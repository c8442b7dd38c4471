"""What guards the supply chain: keys before a release is made, secrets in files, the hosted CI's workflows, third parties' licenses."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import leaks
from lockstep.api.errors import ConfigError
from lockstep.platforms.jobs.bundle import scanner
from release.sign import password_of
from support.checkout import ROOT

WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yaml"))}
STEPS = [(name, step) for name, flow in WORKFLOWS.items() for job in flow["jobs"].values() for step in job["steps"]]
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
LICENSES = {
    "0BSD", "3-Clause BSD License", "Academic Free License (AFL)", "Apache 2.0 License", "Apache Software License",
    "Apache Software License 2.0", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD License", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "ISC License (ISCL)", "MIT", "MIT License", "MIT-0", "MIT-CMU", "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0", "Python Software Foundation License", "Zlib",
}  # fmt: skip
"""Licenses that let an image be passed on, with their texts."""
NVIDIA = {"LicenseRef-NVIDIA-Proprietary", "NVIDIA Proprietary Software"}
"""CUDA's libraries, which its end user license lets an application bring along."""
UNSTATED = {"cuda-toolkit"}
"""NVIDIA's package without files, which asks for those of CUDA that have a license each."""
SECRET = "-----BEGIN OPENSSH " + "PRIVATE KEY-----"


def targets(step: str, matrix: dict[str, list[str]]) -> list[str]:
    """Return the targets of make that a step of a workflow runs, each value of the matrix in its place."""
    lines = [step]
    for name, values in matrix.items():
        lines = [line.replace(f"${{{{ matrix.{name} }}}}", value) for line in lines for value in (values if name in line else [""])]
    return lines


def test_every_step_of_the_hosted_ci_is_a_target_of_make_or_an_action_by_its_commit() -> None:
    assert {"ci", "release"} <= WORKFLOWS.keys()
    for flow in WORKFLOWS.values():
        for job in flow["jobs"].values():
            for step in job["steps"]:
                for line in targets(step.get("run", ""), job.get("strategy", {}).get("matrix", {})):
                    match = re.fullmatch(
                        r"make ([a-z-]+)(?: [A-Z]+=\S+(?: \}\})?)*|make release REGISTRY=ghcr\.io/\$\{\{ github\.repository \}\}", line
                    )
                    assert ("uses" in step and not line) or (match and (match[1] or "release") in TARGETS), line
                assert "uses" not in step or re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), step


def test_the_hosted_ci_runs_what_ci_run_does_and_lets_no_audit_pass_that_could_not_look() -> None:
    [parts] = re.findall(r"^for part in (.+); do$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(parts.replace('"audit OFFLINE=1" ', "").split()) == set(WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["part"])
    assert "audit OFFLINE=1" in parts
    audits = [(name, step["run"]) for name, step in STEPS if "audit" in step.get("run", "")]
    assert audits == [("ci", "make audit"), ("release", "make audit")]


def test_no_workflow_may_write_anything_or_gets_a_secret() -> None:
    for name, flow in WORKFLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, name
        assert all("permissions" not in job for job in flow["jobs"].values())
        assert "secrets." not in (ROOT / f".github/workflows/{name}.yaml").read_text()
    assert all(step["with"]["persist-credentials"] is False for _, step in STEPS if "checkout" in step.get("uses", ""))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file; `cosign generate-key-pair` makes cosign.key and cosign.pub"),
        ("-----BEGIN PUBLIC KEY-----", "is no private key of cosign's"),
        ("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----", "has a password, and there is no terminal to ask for it: set COSIGN_PASSWORD$"),
    ],
)
def test_a_key_that_cannot_sign_is_refused_before_anything_is_built(
    content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    key = tmp_path / "cosign.key"
    if content:
        key.write_text(content)
    with pytest.raises(ConfigError, match=rf"^KEY={key}:? .*{message}" if content else f"^KEY={key}: {message}"):
        password_of(key)


def test_a_password_that_cosign_finds_by_itself_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "word")
    (tmp_path / "cosign.key").write_text("-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----")
    assert password_of(tmp_path / "cosign.key") == ""


def found(text: str, allowed: Any = ()) -> list[str]:
    return leaks.leaks([("a.py", text)], dict(allowed), scanner(leaks.ADDRESSES))


def test_a_secret_in_a_file_is_named_by_its_file_and_not_repeated_whole() -> None:
    [message] = found(f"KEY = '{SECRET}'")
    assert message.startswith("a.py: BEGIN …") and "OPENSSH" not in message and "scripts/leaks.yaml" in message
    assert found("address = '203.0.113.9'") == []


def test_a_secret_with_a_reason_passes_and_a_reason_without_its_secret_does_not() -> None:
    allowed = {"made up": {"a.py": [SECRET.strip("-")]}}
    assert found(SECRET, allowed) == []
    [message] = found("nothing", allowed)
    assert message == f"scripts/leaks.yaml: a.py has no {SECRET.strip('-')!r} any more: take out its line"


def test_every_text_that_git_tracks_is_looked_at_but_the_list_of_exceptions() -> None:
    names = {name for name, _ in leaks.tracked()}
    assert {"README.md", ".ci/run", "requirements/dev.lock", "operator/lockstep/cli/main.py"} <= names
    assert str(leaks.ALLOWED) not in names


def unusual(page: str) -> set[tuple[str, str]]:
    """Return packages of the page whose license is none of those, each with it."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| ")][2:]
    return {
        (name, part)
        for name, _, license, _ in rows
        for part in re.split(r" AND | OR |; ", license)
        if part not in LICENSES and not (name.startswith(("nvidia-", "cuda-")) and part in NVIDIA)
    }


def test_every_package_of_the_images_and_the_client_has_a_license_that_lets_it_be_passed_on() -> None:
    """The page is generated from what each package says of itself, and lint compares it."""
    page = (ROOT / "docs/reference/third-party.md").read_text()
    assert unusual(page) == {(name, "not stated") for name in UNSTATED}


@pytest.mark.parametrize("license", ["not stated", "UNKNOWN", "GPL-3.0-only", "Other/Proprietary License", "LicenseRef-NVIDIA-Proprietary"])
def test_a_license_that_is_unknown_or_asks_for_more_is_named(license: str) -> None:
    head = "| package | version | license | in |\n| --- | --- | --- | --- |\n"
    page = f"{head}| good | 1 | MIT AND Zlib | cli |\n| odd | 1 | MIT AND {license} | cli |\n"
    assert unusual(page) == {("odd", license)}
