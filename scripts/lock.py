"""Write requirements/*.lock from pyproject.toml: every package pinned with hashes, no index named."""

from __future__ import annotations

import re
import subprocess
import sys

from setup import REQUIREMENTS, ROOT, cache_root, installer

EXTRAS = ("operator", "cli", "train", "dev")
UV = "uv==0.13.8"  # fetches in parallel and compiles bytecode at install


def compile_lock(source: str, output: str, *options: str, stdin: str | None = None) -> None:
    command = [
        str(installer(cache_root())),
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
        "--no-emit-index-url",
        "--no-header",
        "--no-annotate",
        "--python-version",
        "3.11",
    ]
    subprocess.run([*command, *options, source, "-o", str(REQUIREMENTS / output)], check=True, cwd=ROOT, input=stdin, text=True)


def main() -> int:
    compile_lock("-", "bootstrap.lock", stdin=UV + "\n")
    for extra in EXTRAS:
        compile_lock("pyproject.toml", f"{extra}.lock", "--extra", extra)
    compile_lock("pyproject.toml", "audit.lock", "--extra", "audit")
    compile_lock("pyproject.toml", "docs.lock", "--extra", "docs")
    compile_lock("pyproject.toml", "s3server.lock", "--extra", "s3server")
    # In the trainer's image beside the trainer's packages: where both have one, it is the same.
    compile_lock("pyproject.toml", "editors.lock", "--extra", "editors", "--constraint", "requirements/train.lock")
    # Laid over dev's environment: what both need is dev's, and isn't installed twice.
    present = re.findall(r"^(\S+)==", (REQUIREMENTS / "dev.lock").read_text(), re.MULTILINE)
    unneeded = [option for name in present for option in ("--no-emit-package", name)]
    compile_lock("pyproject.toml", "programs.lock", "--extra", "programs", "--constraint", "requirements/dev.lock", *unneeded)
    return 0


if __name__ == "__main__":
    sys.exit(main())
