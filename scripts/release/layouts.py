"""Images as folders in OCI's layout, which any registry takes: built by buildah with the commands of `lockstep build`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.cli.clusters.build import machine_settings, run_tool
from lockstep.environments import cache_root
from lockstep.plan.ship.imagebuild import Build, Image, Tool, choose_tool, commands
from lockstep.platforms.clusters.imagebuild import context, folder_of, lay_out
from release.parts import version
from setup import ROOT, say

DEFAULT_BASE = re.compile(r"^ARG BASE=(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Layout:
    """An image in dist/images, and the base that it was made from."""

    folder: Path
    reference: str
    base: str
    base_digest: str


def lay_image(image: Image, base: str, registry: str, epoch: int, folder: Path) -> Layout:
    """Build one image into `folder`, with `epoch` for the time of everything in it. Raises Failed, and ConfigError without buildah."""
    choose_tool(Tool.BUILDAH, [Tool.BUILDAH] if shutil.which(Tool.BUILDAH) else [])
    name, base_id, digest = _pulled(base or _default_base(image))
    with machine_settings() as secrets:
        # By its id: between the pull and the build nobody moves it.
        recipe = Build(image, version(), tag=f"{registry}/lockstep-{image}:{version()}", base=base_id, secrets=secrets)
        files = context(image)
        root = folder_of(files, cache_root() / "contexts")
        lay_out(files, root)
        say(f"building {recipe.reference} on {name}")
        [[program, verb, *arguments]] = commands(recipe, Tool.BUILDAH)
        arguments.remove("--layers")  # a history of layers that an earlier build left has the time of that build
        label = ["--label", f"org.opencontainers.image.base.name={name}", "--label", f"org.opencontainers.image.base.digest={digest}"]
        run_tool([program, verb, "--timestamp", str(epoch), *label, *arguments], root)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_tool([Tool.BUILDAH, "push", "--quiet", recipe.reference, f"oci:{folder}:{version()}"], root)
    return Layout(folder, f"{recipe.reference}@{digest_of(folder)}", name, digest)


def digest_of(folder: Path) -> str:
    """Return the digest of the one manifest in an OCI layout, by which registries know the image, too."""
    [manifest] = json.loads((folder / "index.json").read_text(encoding="utf-8"))["manifests"]
    return str(manifest["digest"])


def _default_base(image: Image) -> str:
    [base] = DEFAULT_BASE.findall((ROOT / f"images/{image}/Containerfile").read_text(encoding="utf-8"))
    return str(base)


def _pulled(base: str) -> tuple[str, str, str]:
    """Return a base image's name, id and digest; pull it if it isn't there. An archive's name is its id. Raises Failed."""
    name, facts = base, _facts(base)
    if not facts:
        pulled = _buildah("pull", "--quiet", base)
        if pulled.returncode:
            reason = (pulled.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise Failed(f"the base image {base} can't be pulled: {reason}: name one that this machine has or can reach with BASE=")
        image_id = pulled.stdout.split()[-1]
        name, facts = base if _facts(base) else image_id, _facts(image_id)
    base_id, digest = facts
    return name, base_id, digest


def _facts(image: str) -> list[str]:
    """Return the id and the digest of an image that buildah has; nothing if it has none of that name."""
    done = _buildah("inspect", "--type", "image", "--format", "{{.FromImageID}} {{.FromImageDigest}}", image)
    return [] if done.returncode else done.stdout.split()


def _buildah(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([Tool.BUILDAH, *arguments], capture_output=True, text=True, check=False)
