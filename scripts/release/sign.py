"""Sign a release with a key, by cosign: SHA256SUMS, and the provenance as an attestation of each file that it names.

No transparency log is told: whoever verifies needs the public half of the key from a place that they trust.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from getpass import getpass
from pathlib import Path

from lockstep.api.errors import ConfigError, Failed
from release.programs import program

HEAD = re.compile(r"-----BEGIN ENCRYPTED (SIGSTORE|COSIGN) PRIVATE KEY-----")
MARKS = ("SHA256SUMS", "provenance.intoto.jsonl")
SIGNATURES = ("SHA256SUMS.sigstore.json", "provenance.sigstore.json")
ALONE = ("--yes", "--use-signing-config=false", "--tlog-upload=false")
"""Options without which cosign asks servers of the public."""


def password_of(key: Path) -> str:
    """Return the password that cosign gets on its input; empty if it finds one in COSIGN_PASSWORD.

    Raises ConfigError, before anything is built, for a key that cosign couldn't read later.
    """
    if not key.is_file():
        raise ConfigError(f"KEY={key}: there is no such file; `cosign generate-key-pair` makes cosign.key and cosign.pub")
    if not HEAD.match(key.read_text(encoding="utf-8", errors="replace")):
        raise ConfigError(f"KEY={key} is no private key of cosign's, which begins with -----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----")
    if "COSIGN_PASSWORD" in os.environ:
        return ""
    if not sys.stdin.isatty():
        raise ConfigError(f"KEY={key} has a password, and there is no terminal to ask for it: set COSIGN_PASSWORD")
    return getpass(f"Password of {key}: ")


def sign(dist: Path, key: Path, password: str) -> list[Path]:
    """Sign SHA256SUMS and the provenance, and return the two signatures' paths. Raises Failed."""
    sums, statement = (str(dist / name) for name in MARKS)
    of_sums, of_statement = (dist / name for name in SIGNATURES)
    return [
        _cosign(key, password, of_sums, "sign-blob", sums),
        _cosign(key, password, of_statement, "attest-blob", "--type", "slsaprovenance1", "--statement", statement),
    ]


def _cosign(key: Path, password: str, bundle: Path, verb: str, *arguments: str) -> Path:
    command = [str(program("cosign")), verb, "--key", str(key), "--bundle", str(bundle), *ALONE, *arguments]
    done = subprocess.run(command, input=password, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise Failed(f"cosign {verb} can't sign with {key}: {reason.removeprefix('error during command execution: ')}")
    bundle.chmod(0o644)
    return bundle
