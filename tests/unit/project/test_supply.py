"""What the locks bring along: the SBOM has all of it, and the check of known vulnerabilities says so where it can't know."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.checkout import ROOT, script


@pytest.fixture(scope="module")
def supply() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        module = script("scripts/supply.py")
        patch.setattr(module, "LOCKS", ("bootstrap",))
        yield module
    sys.modules.pop("setup", None)


def pinned(lock: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{lock}.lock").read_text(), re.MULTILINE))


class Osv(ThreadingHTTPServer):
    """A database of vulnerabilities, of OSV's kind (https://google.github.io/osv.dev/post-v1-query/): what is known, by package."""

    known: dict[str, list[dict[str, Any]]]


class _Handler(BaseHTTPRequestHandler):
    server: Osv

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps({"vulns": self.server.known.get(asked["package"]["name"], [])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def osv(monkeypatch: pytest.MonkeyPatch) -> Iterator[Osv]:
    with Osv(("127.0.0.1", 0), _Handler) as server:
        server.known = {}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("LOCKSTEP_OSV", f"http://127.0.0.1:{server.server_port}/v1/query")
        yield server
        server.shutdown()
        thread.join()


def test_an_sbom_names_every_package_of_its_lock_and_is_the_same_every_time(supply: ModuleType, tmp_path: Path) -> None:
    [path] = supply.sbom(tmp_path / "one")
    document = json.loads(path.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", supply.SPEC)
    assert {item["name"]: item["version"] for item in document["components"]} == pinned("bootstrap")
    assert supply.sbom(tmp_path / "two")[0].read_bytes() == path.read_bytes()


def test_every_lock_that_anybody_installs_is_looked_at() -> None:
    [line] = re.findall(r"^LOCKS = (.+)$", (ROOT / "scripts" / "supply.py").read_text(), re.MULTILINE)
    locks = {path.stem for path in (ROOT / "requirements").glob("*.lock")}
    assert set(re.findall(r"\w+", line)) == locks - {"dev", "audit", "docs", "llamacpp", "lowest", "programs", "s3server", "vllm"}


def test_programs_are_laid_over_the_packages_of_dev_and_bring_none_of_them_again() -> None:
    dev, programs = (
        set(re.findall(r"^(\S+)==", (ROOT / f"requirements/{name}.lock").read_text(), re.MULTILINE)) for name in ("dev", "programs")
    )
    assert {"trl", "open-clip-torch", "lightning", "torchvision"} <= programs
    assert not programs & dev and "torch" in dev


def test_nothing_known_is_a_success(supply: ModuleType, osv: Osv) -> None:
    assert supply.audit() == supply.CLEAN


def test_what_is_known_is_named_and_fails(supply: ModuleType, osv: Osv, capfd: pytest.CaptureFixture[str]) -> None:
    name, version = next(iter(pinned("bootstrap").items()))
    affected = {
        "package": {"name": name, "ecosystem": "PyPI"},
        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}],
    }
    osv.known = {name: [{"id": "GHSA-test-test-test", "summary": "bad", "aliases": [], "affected": [affected | {"versions": [version]}]}]}
    assert supply.audit() == supply.VULNERABLE
    out = capfd.readouterr().out
    assert name in out and "GHSA-test-test-test" in out


def test_a_database_that_cannot_be_reached_is_no_success(
    supply: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_OSV", "http://127.0.0.1:9/v1/query")
    assert supply.audit() == supply.UNKNOWN
    assert "bootstrap.lock was not looked up, because the database doesn't answer" in capfd.readouterr().err


def test_a_package_that_the_database_does_not_know_is_no_success(
    supply: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip-audit's own words, which without --strict are followed by success."""
    program = tmp_path / "pip-audit"
    said = "ERROR:pip_audit._cli:uv: Dependency not found on PyPI and could not be audited: uv (1)"
    program.write_text(f"#!/bin/sh\ncase \"$*\" in *--strict*) echo '{said}' >&2; exit 1;; esac\n")
    program.chmod(0o755)
    monkeypatch.setattr(supply, "tool", lambda name: str(program))
    assert supply.audit() == supply.UNKNOWN
    assert "bootstrap.lock was not looked up" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "offline"), [(0, 0), (1, 1), (3, 0)])
def test_offline_passes_only_an_audit_that_could_not_look(
    supply: ModuleType, code: int, offline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "audit", lambda: code)
    for options, ends in (([], code), (["--offline"], offline)):
        monkeypatch.setattr("sys.argv", ["supply.py", "audit", *options])
        assert supply.main() == ends


@pytest.mark.parametrize("name", ["torchrun", "accelerate", "deepspeed"])
def test_launchers_that_shell_scripts_of_jobs_call_run_with_the_checkout_s_python(name: str) -> None:
    first, *text = (ROOT / ".venv/bin" / name).read_text().splitlines()
    module = next(line.split()[1] for line in text if line.startswith("from "))
    assert first == f"#!{ROOT}/.venv/bin/python" and importlib.util.find_spec(module.partition(".")[0]) is not None
