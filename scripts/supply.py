"""Build the wheel or sdist, list the packages in the locks, or look them up: scripts/supply.py wheel | sdist | sbom | audit

`wheel` and `sdist` write into dist/: the same files give the same bytes; what hatchling needs is fetched once.

`sbom` writes a CycloneDX document for each lock that an image or a laptop is made of, into dist/sbom/. `audit` looks the same locks up in a
database of known vulnerabilities, by default PyPI's (LOCKSTEP_OSV names another, of OSV's kind). Exit codes of audit: 0 nothing is known, 1
something is, 3 a package was not found or the database not reached, so that nothing can be said; --offline makes 0 of 3.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from lockstep.environments import cache_root, installer, packages, run
from setup import ROOT, exit_with, say

LOCKS = ("operator", "train", "editors", "cli", "local", "bootstrap")
REQUIREMENTS = ROOT / "requirements"
SBOM = ROOT / "dist" / "sbom"
CLEAN, VULNERABLE, UNKNOWN = 0, 1, 3
SPEC = "1.6"
"""CycloneDX's version: https://cyclonedx.org/docs/1.6/json/."""


def tool(name: str) -> str:
    return str(packages("audit", cache_root(), say) / "bin" / name)


def wheel(folder: Path) -> Path:
    return _built("wheel", folder, "*.whl")


def sdist(folder: Path) -> Path:
    return _built("sdist", folder, "*.tar.gz")


def _built(kind: str, folder: Path, pattern: str) -> Path:
    """Build it into a folder, without the network if that is possible, and return its path. Raises Failed."""
    command = [installer(cache_root()), "build", f"--{kind}", "--quiet", "--out-dir", str(folder), str(ROOT)]
    if subprocess.run([*command, "--offline"], capture_output=True, check=False).returncode:
        run(*command)
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def sbom(folder: Path) -> list[Path]:
    """Write `<lock>.cdx.json` for every lock: each package with its version, purl and hashes. The same locks give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    program, written = tool("cyclonedx-py"), {lock: folder / f"{lock}.cdx.json" for lock in LOCKS}
    options = ("requirements", "--output-reproducible", "--spec-version", SPEC, "--of", "JSON")
    for lock, path in written.items():
        run(program, *options, "-o", str(path), str(REQUIREMENTS / f"{lock}.lock"))
    return [*written.values()]


def audit() -> int:
    """Print what is known of each lock's packages; see the module for the exit code."""
    program, worst = tool("pip-audit"), CLEAN
    service = ["--vulnerability-service", "osv", "--osv-url", url] if (url := os.environ.get("LOCKSTEP_OSV")) else []
    for lock in LOCKS:
        path = REQUIREMENTS / f"{lock}.lock"
        command = [program, "--strict", "--require-hashes", "--disable-pip", "--progress-spinner", "off", *service, "-r", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"== {path.relative_to(ROOT)}\n{ended.stdout}", end="")
        if ended.returncode != 0 and "known vulnerabilit" not in ended.stderr:
            reason = (ended.stderr.strip().splitlines() or ["no reason was given"])[-1]
            print(
                f"audit: {lock}.lock was not looked up, because the database doesn't answer: {reason}; "
                "run `make audit` where it can, or name a mirror of OSV by LOCKSTEP_OSV",
                file=sys.stderr,
            )
            return UNKNOWN
        print(ended.stderr, end="", file=sys.stderr)
        worst = max(worst, VULNERABLE if ended.returncode else CLEAN)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["wheel", "sdist", "sbom", "audit"])
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    what = options.what
    if what == "audit":
        code = audit()
        return CLEAN if options.offline and code == UNKNOWN else code
    for path in sbom(SBOM) if what == "sbom" else [(wheel if what == "wheel" else sdist)(SBOM.parent)]:
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    exit_with(main)
