"""Write the files that are generated from the API models and the verbs, or check that they are up to date.

    scripts/generate.py crds|docs|all [--check]

--check writes nothing: it prints the differences and exits with 1 when there are any.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import PackageMetadata

ROOT = Path(__file__).resolve().parent.parent
CRDS = Path("manifests/crds")
DOCS = Path("docs/reference")
HEADER = "# Generated from operator/lockstep/api by scripts/generate.py: change the models, then `make manifests`.\n"


def crds() -> dict[Path, str]:
    """Path below the repository's root → text, of every CustomResourceDefinition."""
    from lockstep.api.crd import training_cluster_crd, training_job_crd
    from lockstep.api.files.yamltext import dump_yaml

    specs = ((definition["spec"], HEADER + dump_yaml(definition)) for definition in (training_job_crd(), training_cluster_crd()))
    return {CRDS / f"{spec['group']}_{spec['names']['plural']}.yaml": text for spec, text in specs}


def docs() -> dict[Path, str]:
    """Path below the repository's root → text, of every page of the reference."""
    from reference.fields import cluster_file_page, hosts_file_page, training_job_page
    from reference.verbs import cli_page

    pages = {"trainingjob": training_job_page, "trainingcluster": cluster_file_page, "hosts": hosts_file_page, "cli": cli_page}
    return {DOCS / f"{name}.md": page() for name, page in pages.items()}


def licenses() -> dict[Path, str]:
    """Path below the repository's root → text, of the list of packages that the images and the command line bring along."""
    import importlib.metadata
    import re

    used: dict[str, tuple[str, set[str]]] = {}
    for lock in ("operator", "cli", "train"):
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / f"{lock}.lock").read_text(), re.MULTILINE):
            used.setdefault(name, (version, set()))[1].add(lock)
    rows = []
    for name, (version, locks) in sorted(used.items()):
        metadata = importlib.metadata.metadata(name)
        rows.append(f"| {name} | {version} | {license_of(metadata)} | {', '.join(sorted(locks))} |")
    head = (
        "# Third-party packages\n\nThese packages come with an installation of Lockstep or with its images. `make manifests` writes this"
        " page from what each says of itself.\n"
    )
    middle = "None of them is part of this repository. An image has their license texts beside them, in their `.dist-info` folders.\n\n"
    table = "| package | version | license | in the lock of |\n| --- | --- | --- | --- |\n"
    return {Path("docs/reference/third-party.md"): head + middle + table + "\n".join(rows) + "\n"}


STATES = {"real": "for real", "partly": "on CPUs or a stand-in only", "never": "never run"}


def tested() -> dict[Path, str]:
    """Path below the repository's root → text, of the table of what ran for real."""
    import yaml

    rows = yaml.safe_load((ROOT / "docs/tested.yaml").read_text())["rows"]
    head = (
        "# What ran for real\n\nYou see what Lockstep has run on, and what it never has. `make manifests` writes this page from"
        " `docs/tested.yaml`. *Each change*: `make test` runs it.\n\n| what | ran | when | versions | how |\n| --- | --- | --- | --- |"
        " --- |\n"
    )
    return {DOCS / "tested.md": head + "".join(_row(row, versions()) for row in rows)}


def _row(row: dict[str, Any], locked: dict[str, str]) -> str:
    how = f"`{row['how']}`" if "how" in row else ""
    cells = [row["what"], f"**{STATES[row['state']]}**", str(row.get("when", "")), row.get("versions", "").format_map(locked), how]
    return f"| {' | '.join(cells)} |\n"


def versions() -> dict[str, str]:
    """Version of each package that tests run with, and of the embedded Kubernetes."""
    import re

    from lockstep.devcluster.binary import kubernetes_version

    locks = "".join((ROOT / f"requirements/{lock}.lock").read_text() for lock in ("s3server", "dev"))
    return {**dict(re.findall(r"^([\w.-]+)==(\S+)", locks, re.MULTILINE)), "kubernetes": kubernetes_version()}


def license_of(metadata: PackageMetadata) -> str:
    """SPDX where the package says it so, else its classifiers, else the first line of its own words."""
    stated = {name: (metadata.get_all(name) or [""])[0] for name in ("License-Expression", "License")}
    if stated["License-Expression"]:
        return str(stated["License-Expression"])
    classifiers = [text.split(" :: ")[-1] for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    words = str(stated["License"]).strip().splitlines()
    return "; ".join(classifiers) or (words[0] if words else "not stated")


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
    files = (crds() if arguments.what != "docs" else {}) | (docs() | licenses() | tested() if arguments.what != "crds" else {})
    if not arguments.check:
        write(files)
        return 0
    changed = differences(files)
    if changed:
        print(f"{changed}\nGenerated files are not up to date: run `make manifests`.", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
