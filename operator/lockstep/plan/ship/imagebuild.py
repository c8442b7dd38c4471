"""An image to build, the commands of podman, buildah or docker that do, and why they failed. openshift.py has what OpenShift is sent
instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lockstep.api.errors import ConfigError
from lockstep_spec.words import any_of


class Image(StrEnum):
    """An image that Lockstep has a Containerfile for."""

    OPERATOR = "operator"
    TRAINER = "trainer"
    DOCS = "docs"


class Tool(StrEnum):
    """Tools that build an image, in the order of preference."""

    PODMAN = "podman"
    BUILDAH = "buildah"
    DOCKER = "docker"


SITE = "dist/site"
_SHARED = [f"workspace/{name}" for name in ("lockstep_gang", "lockstep_machine", "lockstep_spec")]
_CODE = ("LICENSE", "images/install.py", "pyproject.toml", *_SHARED)
CONTEXTS = {
    Image.OPERATOR: (*_CODE, "images/operator", "operator/lockstep", "requirements/operator.lock"),
    Image.TRAINER: (*_CODE, "images/trainer", "requirements/editors.lock", "requirements/train.lock", "workspace/lockstep_train"),
    Image.DOCS: ("LICENSE", "images/docs", SITE),
}
"""Files and folders that each image is made from, by their paths in a checkout; .containerignore lets them all through."""

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
    """Return the tool's commands, one after the other, in the folder of the build's files. `archive` is a file for `podman load` or `ctr
    images import`.

    Into the folder `notes` go the image's digest as the tool knows it here, `built`, and the registry's, which compresses layers, `pushed`
    (docker prints that one itself).
    """
    result = [_build(build, tool, notes)]
    if push:
        if "/" not in build.reference:
            raise ConfigError(f"--push needs a registry: --tag registry.example.com/team/{build.reference}")
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


PRUNE = {Tool.PODMAN: "podman system prune", Tool.BUILDAH: "buildah rmi --prune", Tool.DOCKER: "docker system prune"}
"""Commands that free the layers that no image uses."""
SHOWN = 300
"""Characters of a line of the tool's output that an error repeats."""
CAUSES = (
    (any_of("no space left on device", "disk quota exceeded"),
        "the disk that holds {tool}'s images (or TMPDIR) is full: {prune} frees what no image uses; "
        "docs/how-to/images.md says what a build takes"),
    (any_of("cannot connect to the docker daemon", "docker daemon is not running", r"docker\.sock"),
        "docker's engine doesn't answer: start it (systemctl start docker), or use --tool podman or --tool buildah"),
    (any_of("unknown flag: --secret", "buildx component"),
        "this docker has no BuildKit: install its buildx component (apt-get install docker-buildx), "
        "or use --tool podman or --tool buildah"),
    (any_of("do not match the hashes"),
        "the package index gave another file than requirements/*.lock names, so nothing was installed: use another index"),
    (any_of(
        "no matching distribution", "failed to establish a new connection", "max retries exceeded", "read timed out",
        "newconnectionerror",
    ), "pip inside the build can't get a package: it uses this machine's pip.conf, PIP_INDEX_URL, certificates and proxies "
        "(docs/how-to/images.md)"),
    (any_of(
        "unable to fetch some archives", "unable to locate package", "failed to fetch", "no package .* available",
        "cannot download repomd",
    ), "the base's own packages can't be fetched: is its repository reachable from here, and does it have them? "
        "(--arg APT_TOOLS=…, DNF_TOOLS=…)"),
    (any_of("newuidmap", "cannot clone", "user namespace", r"unshare\(", "operation not permitted"),
        "this user may not create containers on this machine: see docs/how-to/images.md, Without the rights that builders want"),
    (any_of(
        "unauthorized", "authentication required", "access denied", "access to the resource is denied", "denied: ", "no basic auth",
    ), "the registry requires a login: {tool} login REGISTRY"),
    (any_of(
        "initializing source", "pinging container registry", "failed to resolve source metadata", "manifest unknown", "short-name",
        "pull access", "no such image", "error creating build container",
    ), "the base image can't be pulled: name one that this machine has or can reach with --base IMAGE"),
)  # fmt: skip
"""The first that is found in the tool's last lines, in lower case, counts."""


def tool_failure(command: Sequence[str], code: int, lines: Sequence[str]) -> str:
    """One sentence: the command, what its error output ended with, and what to do. `lines` have been on the screen already."""
    tool, verb = Tool(command[0]), command[1]
    head = f"{tool} {verb} failed with exit code {code}"
    for pattern, advice in CAUSES:
        matches = [line.strip() for line in lines if pattern.search(line.lower())]
        if matches:
            return f"{head}: {_short(matches[-1])}: {advice.format(tool=tool, prune=PRUNE[tool])}"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{head}: {_short(last)}; more is above" if last else f"{head}; its output is above"


def _short(line: str) -> str:
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} …"
