"""An image to build, and the commands of podman, buildah or docker that do. openshift_build.py has what OpenShift is sent instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.api.errors import ConfigError


class Image(StrEnum):
    """An image that this checkout has a Containerfile for."""

    OPERATOR = "operator"
    TRAINER = "trainer"


class Tool(StrEnum):
    """Tools that build an image, in the order of preference."""

    PODMAN = "podman"
    BUILDAH = "buildah"
    DOCKER = "docker"


CONTEXT = ("images", "operator", "workspace", "requirements", "pyproject.toml", "LICENSE")
"""Parts of the checkout that an image is made from, as .containerignore has it."""

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""docker doesn't hand these on by itself, as the others do. Arguments of these names are in no image's history."""


@dataclass(frozen=True)
class Build:
    """One image to build. `arguments` are build arguments; `secrets` files by the name that the Containerfile knows them by."""

    image: Image
    version: str
    tag: str = ""
    base: str = ""
    arguments: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    proxies: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"lockstep-{self.image}"

    @property
    def reference(self) -> str:
        return self.tag or f"{self.name}:{self.version}"

    @property
    def repository(self) -> str:
        """The reference without its tag, which a digest can stand for."""
        folder, slash, name = self.reference.rpartition("/")
        return f"{folder}{slash}{name.partition(':')[0]}"

    @property
    def stream_tag(self) -> str:
        """Its name in an ImageStream, which pods of the namespace may use for an image."""
        return f"{self.name}:{self.reference.rpartition('/')[2].partition(':')[2] or self.version}"

    @property
    def containerfile(self) -> str:
        return f"images/{self.image}/Containerfile"

    @property
    def build_arguments(self) -> list[str]:
        """KEY=VALUE, each with an equals sign. Raises ConfigError."""
        arguments = [f"VERSION={self.version}", *([f"BASE={self.base}"] if self.base else []), *self.arguments]
        for argument in arguments:
            if not argument.partition("=")[1]:
                raise ConfigError(f"--arg {argument}: must be KEY=VALUE, as in --arg EDITORS=0")
        return arguments


def choose_tool(requested: Tool | None, installed: Collection[str]) -> Tool:
    """Return the tool to build with. Raises ConfigError when it isn't there, or none is."""
    if requested is not None and requested not in installed:
        raise ConfigError(f"{requested} is not installed (or not on PATH)")
    tool = requested or next((tool for tool in Tool if tool in installed), None)
    if tool is None:
        raise ConfigError(
            f"none of {', '.join(Tool)} is installed: apt-get install buildah (dnf install podman), "
            "or let OpenShift build it: lockstep build IMAGE --openshift -n NAMESPACE"
        )
    return tool


def commands(build: Build, tool: Tool, *, push: bool = False, archive: str = "", notes: str = "") -> list[list[str]]:
    """The tool's commands, one after the other, in the checkout's root. `archive` is a file for `podman load` or `ctr images import`.

    Into the folder `notes` go the image's digest as the tool knows it here, `built`, and the registry's, which compresses layers, `pushed`
    (docker prints that one itself).
    """
    result = [_build(build, tool, notes)]
    if push:
        if "/" not in build.reference:
            raise ConfigError(f"--push needs to know where to: --tag registry.example.com/team/{build.reference}")
        noted = ["--digestfile", f"{notes}/pushed"] if notes and tool is not Tool.DOCKER else []
        result.append([tool, "push", *noted, build.reference])
    if archive:
        result.append(_save(build.reference, tool, archive))
    return result


def _build(build: Build, tool: Tool, notes: str) -> list[str]:
    command = [tool, "build", "-f", build.containerfile, "-t", build.reference, *(["--iidfile", f"{notes}/built"] if notes else [])]
    if tool is Tool.BUILDAH:
        command.append("--layers")  # the others keep them without being asked
    for argument in build.build_arguments:
        command += ["--build-arg", argument]
    for name in build.proxies if tool is Tool.DOCKER else ():
        command += ["--build-arg", name]
    for name, path in build.secrets.items():
        command += ["--secret", f"id={name},src={path}"]
    return [*command, "."]


def _save(reference: str, tool: Tool, archive: str) -> list[str]:
    if tool is Tool.BUILDAH:
        return [tool, "push", reference, f"docker-archive:{archive}:{reference}"]
    return [tool, "save", "-o", archive, reference]
