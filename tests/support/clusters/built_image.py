"""Images, really built: by `lockstep build`, with buildah, on the base that the embedded cluster makes of the distribution's packages.

No registry is asked. What is built is kept by a hash of all that goes into it, in the project's cache and never in the checkout.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from lockstep.devcluster import images
from lockstep.devcluster.hosts import needs
from lockstep.environments import cache_root
from lockstep.plan.ship.imagebuild import Image
from lockstep.platforms.clusters.imagebuild import context
from support.checkout import ROOT

KEPT = 2
# Apart from images that people have. The embedded cluster's nodes need overlay mounts, too.
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{store}"\nrunroot = "{run}"\n'


def built(image: str) -> tuple[str, Path]:
    """Name and archive, which containerd imports, of an image; built if anything in it has changed."""
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = images.base_archive(cache_root(), print)
        key = _key(image, base)
        reference, archive = f"localhost/lockstep/{image}:{key}", folder / f"{image}-{key}.tar"
        if not archive.exists():
            _build(image, reference, archive, base)
        return reference, archive


def _key(image: str, base: Path) -> str:
    digest = hashlib.sha256(base.name.encode())
    for name, path in context(Image(image)).items():
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(image: str, reference: str, archive: Path, base: Path) -> None:
    """Layers of earlier builds are used again: with another code only that is new."""
    if shutil.which("buildah") is None:
        needs.install(["buildah"], print)
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(_storage(archive.parent))}
    base_image = _run(["buildah", "pull", "--quiet", f"docker-archive:{base}"], environment).split()[-1]
    temporary = archive.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    arguments = [image, "--tool", "buildah", "--base", base_image, "--tag", reference, "--archive", str(temporary)]
    _run([sys.executable, "-m", "lockstep.cli.main", "build", *arguments], environment)
    temporary.replace(archive)
    _forget_older(image, archive, environment)


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _storage(folder: Path) -> Path:
    path = folder / "storage.conf"
    path.write_text(STORAGE.format(store=folder / "store", run=folder / "run"))
    return path


def _forget_older(image: str, archive: Path, environment: dict[str, str]) -> None:
    for old in sorted(archive.parent.glob(f"{image}-*.tar"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
        old.unlink()
        subprocess.run(
            ["buildah", "rmi", f"localhost/lockstep/{image}:{old.stem.removeprefix(f'{image}-')}"],
            env=environment,
            capture_output=True,
            check=False,
        )
