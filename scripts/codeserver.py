"""Install code-server (VS Code in a browser) for the pods of the embedded cluster: it comes from npm, and its addons are compiled here.

It goes into the volume that the pods mount, with this machine's node. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from base64 import b64encode
from pathlib import Path

VERSION = "4.100.3"
INTEGRITY = "sha512-q/Fh2DOxCRNhC/WiG/6sAhSKnj7ZACTVBaeeZ+rWjol//0FCbl/qg1ln5ecZ99jYcfqMxZZAyWcN+YBIo0DgpA=="
"""Checksum of the package, as npm states it. The package's shrinkwrap pins its dependencies."""
NODE_MAJOR = 20
"""The release of Node.js that this version is made for."""
COMPILED = ("@vscode/spdlog", "native-watchdog", "@parcel/watcher", "node-pty")
"""Addons that it needs. Two more are not compiled: kerberos, which is for proxies, and @vscode/deviceid, which is for telemetry."""
SECONDS = 1800.0
"""Longest time of one of its commands."""
LAUNCHER = """\
#!/bin/sh
home=$(dirname "$(readlink -f "$0")")/../../{folder}
exec "$home/node" "$home/package/out/node/entry.js" "$@"
"""


class NoCodeServerError(Exception):
    """code-server can't be installed on this machine; the message says why."""


def publish(cache: Path, environment: Path) -> Path:
    """Make `bin/code-server` in the environment of editors and return it. Both lie in the cache's folder python/, which pods mount. Raises
    NoCodeServerError.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise NoCodeServerError(f"code-server needs Node.js {NODE_MAJOR} and npm")
    release = _said([node, "--version"])
    if release.removeprefix("v").split(".")[0] != str(NODE_MAJOR):
        raise NoCodeServerError(f"code-server {VERSION} needs Node.js {NODE_MAJOR}, and this machine has {release}")
    folder = cache / "python" / f"code-server-{VERSION}-node-{release.removeprefix('v')}"
    if not (folder / "done").exists():
        _make(folder, node, npm)
    launcher = environment / "bin" / "code-server"
    launcher.write_text(LAUNCHER.format(folder=folder.name))
    launcher.chmod(0o755)
    return launcher


def _make(folder: Path, node: str, npm: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        [packed] = json.loads(_said([npm, "pack", f"code-server@{VERSION}", "--json", "--loglevel=error"], temporary))
        archive = Path(temporary) / packed["filename"]
        found = f"sha512-{b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()}"
        if found != INTEGRITY:
            raise NoCodeServerError(f"npm gave another code-server {VERSION} than {INTEGRITY}: {found}")
        shutil.unpack_archive(archive, folder, filter="data")
    package = folder / "package"
    for part in (package, package / "lib" / "vscode"):
        _said([npm, "ci", "--omit=dev", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund", "--loglevel=error"], part)
    program = Path(_said([npm, "root", "--global"])) / "npm/node_modules/node-gyp/bin/node-gyp.js"
    gyp = [node, str(program), "rebuild", "--loglevel=error", *_headers(node)]
    builder = package / "node_modules/@mapbox/node-pre-gyp/bin/node-pre-gyp"  # which knows the names that argon2's recipe leaves open
    _said([node, str(builder), "rebuild", "--build-from-source", *_headers(node)], package / "node_modules" / "argon2")
    for name in COMPILED:
        _said(gyp, package / "lib" / "vscode" / "node_modules" / name)
    shutil.copy2(os.path.realpath(node), folder / "node")
    (folder / "done").touch()


def _headers(node: str) -> list[str]:
    """Option that names this machine's headers of Node.js; without them node-gyp fetches some."""
    base = Path(os.path.realpath(node)).parent.parent
    return [f"--nodedir={base}"] if (base / "include" / "node" / "node.h").exists() else []


def _said(command: list[str], folder: str | Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise NoCodeServerError(f"code-server can't be made here: {' '.join(command[:3])} … took longer than {SECONDS:.0f} s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise NoCodeServerError(
            f"code-server can't be made here: {' '.join(command[:3])} … in {folder} ended with {done.returncode}:\n{last}"
        )
    return done.stdout.strip()
