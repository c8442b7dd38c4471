"""Writes the files that are generated from the API models and the verbs, or checks that they are as they would be written.

    scripts/generate.py crds|docs|all [--check]

--check writes nothing: it prints the differences and exits with 1 when there are any.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CRDS = Path("manifests/crds")
DOCS = Path("docs/reference")
HEADER = "# Generated from operator/lockstep/api by scripts/generate.py: change the models, then `make manifests`.\n"


def crds() -> dict[Path, str]:
    """Path below the repository's root → text, of every CustomResourceDefinition."""
    from lockstep.api.crd import cluster_profile_crd, training_job_crd
    from lockstep.api.yamltext import dump_yaml

    definitions = (training_job_crd(), cluster_profile_crd())
    return {
        CRDS / f"{definition['spec']['group']}_{definition['spec']['names']['plural']}.yaml": HEADER + dump_yaml(definition)
        for definition in definitions
    }


def docs() -> dict[Path, str]:
    """Path below the repository's root → text, of every page of the reference."""
    from lockstep.api.reference import cluster_file_page, training_job_page
    from lockstep.cli.reference import cli_page

    return {DOCS / "trainingjob.md": training_job_page(), DOCS / "clusterprofile.md": cluster_file_page(), DOCS / "cli.md": cli_page()}


def differences(files: dict[Path, str]) -> str:
    """A unified diff from what is on the disk to `files`; empty when they are the same."""
    parts: list[str] = []
    for path, wanted in files.items():
        found = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        parts += difflib.unified_diff(found.splitlines(keepends=True), wanted.splitlines(keepends=True), str(path), f"{path} (generated)")
    return "".join(parts)


def write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["crds", "docs", "all"])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    files = (crds() if arguments.what != "docs" else {}) | (docs() if arguments.what != "crds" else {})
    if not arguments.check:
        write(files)
        return 0
    changed = differences(files)
    if changed:
        print(f"{changed}\nGenerated files are not up to date: run `make manifests`.", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
