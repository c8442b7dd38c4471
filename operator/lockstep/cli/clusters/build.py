"""`lockstep build IMAGE`: the operator's, the trainer's or the documentation's image, by podman, buildah or docker, or by OpenShift."""

from __future__ import annotations

import asyncio
import configparser
import os
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.names import OPERATOR_NAMESPACE
from lockstep.assets import asset
from lockstep.cli.shared.jobargs import TargetOptions, on_cluster
from lockstep.cli.shared.target import load
from lockstep.environments import cache_root
from lockstep.kube.cluster import Cluster
from lockstep.plan.ship.imagebuild import PROXIES, SITE, Build, Image, Tool, choose_tool, commands, tool_failure
from lockstep.plan.ship.openshift import BuildOutcome, next_step, objects
from lockstep.platforms.clusters.imagebuild import context, folder_of, lay_out
from lockstep.platforms.output import put, put_text, tell
from lockstep_spec.files import expanded

if TYPE_CHECKING:
    from lockstep.kube.aim import Connections

CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
PIP_VARIABLES = {"PIP_INDEX_URL": "index-url", "PIP_EXTRA_INDEX_URL": "extra-index-url", "PIP_TRUSTED_HOST": "trusted-host"}
LINES_KEPT = 60
"""Lines of a tool's error output that are shown when it fails: the reason stands near the end, if not always last."""


@on_cluster
def build(
    where: TargetOptions,
    image: Annotated[Image, typer.Argument(help="Image to build.")],
    base: Annotated[str, typer.Option(help="Base image. Default: the one that the Containerfile names.")] = "",
    tag: Annotated[str, typer.Option("--tag", "-t", help="Name and tag of the image. Default: lockstep-IMAGE:VERSION.")] = "",
    push: Annotated[bool, typer.Option("--push", help="Push it to the registry that --tag names.")] = False,
    archive: Annotated[
        Path | None, typer.Option(help="Also write it to this file, for `podman load` or `ctr images import` where there is no registry.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", help="A build argument of the Containerfile, KEY=VALUE. May be repeated.")
    ] = None,
    tool: Annotated[Tool | None, typer.Option(help="Tool to build with. Default: the first of them that is installed.")] = None,
    openshift: Annotated[
        bool,
        typer.Option("--openshift", help="Build on OpenShift, into an ImageStream of -n (lockstep-system). Needs no registry account."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands (with --openshift the objects) and run nothing.")] = False,
) -> None:
    """Build the operator's, the trainer's or the docs' image.

    It builds from the Lockstep that you type this in, and copies its files into the cache, with --dry-run, too; docs from the site that
    `make docs` left in a clone.

    The build uses this machine's pip settings and certificates. No layer of the image has them.

    Example: lockstep build operator --tag registry.example.com/team/lockstep-operator:0.1.0 --push
    """
    if image is Image.DOCS and not (asset(SITE) / "index.html").is_file():
        raise ConfigError(f"there is no site in {SITE}: make docs builds it in a clone of the repository (make build IMAGE=docs does both)")
    version = tomllib.loads(asset("pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    recipe = Build(image, version, tag=tag, base=base, arguments=tuple(arg or ()), proxies=tuple(n for n in PROXIES if n in os.environ))
    if openshift:
        if push or archive or tool:
            raise ConfigError("--openshift builds in the cluster, into the cluster's registry: leave out --push, --archive and --tool")
        if where.cluster is not None:
            load(where.verb, where.cluster)  # its API server, and no other
        _by_openshift(recipe, where.namespace or OPERATOR_NAMESPACE, where.connections, dry_run)
    else:
        _by_tool(recipe, tool, push, archive, dry_run)


def _by_tool(recipe: Build, tool_named: Tool | None, push: bool, archive: Path | None, dry_run: bool) -> None:
    tool = choose_tool(tool_named, [name for name in Tool if shutil.which(name)])
    target = str(archive.resolve()) if archive else ""
    with machine_settings() as secrets, tempfile.TemporaryDirectory(prefix="lockstep-build-") as folder:
        build = replace(recipe, secrets=secrets)
        steps = commands(build, tool, push=push, archive=target, notes="" if dry_run else folder)
        files = context(recipe.image)
        root = folder_of(files, cache_root() / "contexts")
        try:
            lay_out(files, root)
        except Failed as error:
            if not dry_run:
                raise
            tell(f"warning: {error}, where these commands look for them")
        if dry_run:
            put(shlex.join(["cd", str(root)]), *(shlex.join(step) for step in steps))
            if "pip" in secrets:
                put(f"# {secrets['pip']}: this machine's pip settings, a file that exists only while lockstep build runs")
            return
        put(f"building {recipe.reference} with {tool}", flush=True)
        for step in steps:
            run_tool(step, root)
        digests = {path.name: path.read_text(encoding="utf-8").strip() for path in Path(folder).iterdir()}
    built, pushed = digests.get("built"), digests.get("pushed")
    put(f"Ready: {recipe.reference}{f' ({built})' if built else ''}")
    if pushed:
        put(f"Pushed: {recipe.repository}@{pushed}")


@contextmanager
def machine_settings() -> Iterator[dict[str, str]]:
    """Files with this machine's pip settings and certificates, for as long as the build takes; none where it has none of its own."""
    settings = configparser.RawConfigParser()
    settings.read([expanded(path) for path in (*PIP_FILES, os.environ.get("PIP_CONFIG_FILE", os.devnull))])
    if not settings.has_section("global"):
        settings.add_section("global")
    for variable, option in PIP_VARIABLES.items():
        if variable in os.environ:
            settings.set("global", option, os.environ[variable])
    named = [*(os.environ.get(variable) for variable in CERTIFICATES), settings.get("global", "cert", fallback=None)]
    settings.remove_option("global", "cert")  # a path of this machine
    certificates = next((path for path in named if path and Path(path).is_file()), None)
    secrets = {"ca": certificates} if certificates else {}
    with tempfile.NamedTemporaryFile("w", prefix="lockstep-pip-") as file:  # readable by nobody else
        if settings.items("global"):
            settings.write(file)
            file.flush()
            secrets["pip"] = file.name
        yield secrets


def run_tool(command: list[str], root: Path) -> None:
    """Its output is seen as it comes. Raises Failed, which says why, when the command does."""
    last: deque[str] = deque(maxlen=LINES_KEPT)
    with subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        try:
            for line in process.stderr or ():
                put_text(line, error=True)
                last.append(line)
        except BaseException:  # Ctrl-C: of a terminal's the tool knows by itself
            process.terminate()
            raise
    if process.returncode != 0:
        raise Failed(tool_failure(command, process.returncode, last))


def _by_openshift(recipe: Build, namespace: str, connections: Connections, dry_run: bool) -> None:
    from lockstep.platforms.clusters.imagebuild import build, packed

    build_objects = objects(recipe)
    files = packed(context(recipe.image))
    if dry_run:
        put_text(dump_all_yaml(build_objects))
        put(f"# then {len(files) / 1e6:.1f} MB go to buildconfigs/{recipe.name}/instantiatebinary in namespace {namespace}")
        return

    async def built() -> BuildOutcome:
        async with await Cluster.connect(connections) as cluster:
            put(f"building {recipe.stream_tag} in namespace {namespace} of {cluster.server}", flush=True)
            return await build(cluster, build_objects, namespace, files, lambda line: put(line, flush=True))

    done = asyncio.run(built())
    put(f"Ready: pods of namespace {namespace} may use the image {recipe.stream_tag}{f' ({done.digest})' if done.digest else ''}")
    put(f"Next: {next_step(recipe, namespace)}")
