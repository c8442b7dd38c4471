"""The commands that build an image: by podman, buildah or docker, or by OpenShift from what is sent to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lockstep.api.errors import ConfigError


class Image(StrEnum):
    """An image that this checkout has a Containerfile for."""

    OPERATOR = "operator"
    TRAINER = "trainer"


class Tool(StrEnum):
    """What can build one, the first that is there is taken."""

    PODMAN = "podman"
    BUILDAH = "buildah"
    DOCKER = "docker"


CONTEXT = ("images", "operator", "workspace", "requirements", "pyproject.toml", "LICENSE")
"""What of the checkout an image is made from, as .containerignore has it."""

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
    def stream_tag(self) -> str:
        """Its name in an ImageStream, which pods of the namespace may use for an image."""
        return f"{self.name}:{self.reference.rpartition('/')[2].partition(':')[2] or self.version}"

    @property
    def containerfile(self) -> str:
        return f"images/{self.image}/Containerfile"

    @property
    def build_arguments(self) -> list[str]:
        """KEY=VALUE, each with an equals sign. Raises ConfigError."""
        given = [f"VERSION={self.version}", *([f"BASE={self.base}"] if self.base else []), *self.arguments]
        for argument in given:
            if not argument.partition("=")[1]:
                raise ConfigError(f"--arg {argument}: must be KEY=VALUE, as in --arg EDITORS=0")
        return given


def chosen(asked: Tool | None, there: Collection[str]) -> Tool:
    """The tool to build with. Raises ConfigError when it isn't there, or none is."""
    if asked is not None and asked not in there:
        raise ConfigError(f"{asked} is not installed (or not on PATH)")
    found = asked or next((tool for tool in Tool if tool in there), None)
    if found is None:
        raise ConfigError(
            f"none of {', '.join(Tool)} is installed: apt-get install buildah (dnf install podman), "
            "or let OpenShift build it: lockstep build IMAGE --openshift -n NAMESPACE"
        )
    return found


def commands(build: Build, tool: Tool, *, push: bool = False, archive: str = "") -> list[list[str]]:
    """The tool's commands, one after the other, in the checkout's root. `archive` is a file for `podman load` or `ctr images import`."""
    found = [_build(build, tool)]
    if push:
        if "/" not in build.reference:
            raise ConfigError(f"--push needs to know where to: --tag registry.example.com/team/{build.reference}")
        found.append([tool, "push", build.reference])
    if archive:
        found.append(_save(build.reference, tool, archive))
    return found


def _build(build: Build, tool: Tool) -> list[str]:
    command = [tool, "build", "-f", build.containerfile, "-t", build.reference]
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


def openshift_objects(build: Build) -> list[dict[str, Any]]:
    """The ImageStream that the image goes to, and the BuildConfig that makes it of what is sent: no registry, no account."""
    labels = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/component": str(build.image)}
    metadata = {"name": build.name, "labels": labels}
    arguments = [dict(zip(("name", "value"), argument.split("=", 1), strict=True)) for argument in build.build_arguments]
    return [
        # A pod of this namespace may name it as it would an image: lockstep-operator:0.1.0.
        {"apiVersion": "image.openshift.io/v1", "kind": "ImageStream", "metadata": metadata, "spec": {"lookupPolicy": {"local": True}}},
        {
            "apiVersion": "build.openshift.io/v1",
            "kind": "BuildConfig",
            "metadata": metadata,
            "spec": {
                "source": {"type": "Binary", "binary": {}},
                "strategy": {"type": "Docker", "dockerStrategy": {"dockerfilePath": build.containerfile, "buildArgs": arguments}},
                "output": {"to": {"kind": "ImageStreamTag", "name": build.stream_tag}},
                "mountTrustedCA": True,  # the cluster's own certificates and proxy, for pip
                "runPolicy": "SerialLatestOnly",
                "successfulBuildsHistoryLimit": 2,
                "failedBuildsHistoryLimit": 2,
            },
        },
    ]


def openshift_commands(build: Build, folder: str, namespace: str, context: str | None = None) -> list[list[str]]:
    """`oc`, which first takes the objects from its standard input and then sends `folder`."""
    where = ["-n", namespace, *(["--context", context] if context else [])]
    return [
        ["oc", "apply", *where, "-f", "-"],
        ["oc", "start-build", build.name, *where, f"--from-dir={folder}", "--follow", "--wait"],
    ]
