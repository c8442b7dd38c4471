"""`lockstep build IMAGE`: the operator's or the trainer's image, by podman, buildah or docker, or by OpenShift."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.jobargs import ContextOption
from lockstep.plan.imagebuild import Image, Tool

if TYPE_CHECKING:
    from lockstep.plan.imagebuild import Build

CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
PIP_VARIABLES = {"PIP_INDEX_URL": "index-url", "PIP_EXTRA_INDEX_URL": "extra-index-url", "PIP_TRUSTED_HOST": "trusted-host"}


def build(
    image: Annotated[Image, typer.Argument(help="Which of the images in images/.")],
    base: Annotated[str, typer.Option(help="The image to build on. Default: what the Containerfile names.")] = "",
    tag: Annotated[str, typer.Option("--tag", "-t", help="What to call it. Default: lockstep-IMAGE:VERSION.")] = "",
    push: Annotated[bool, typer.Option("--push", help="Push it to the registry that --tag names.")] = False,
    archive: Annotated[
        Path | None, typer.Option(help="Also write it to this file, for `podman load` or `ctr images import` where there is no registry.")
    ] = None,
    arg: Annotated[
        list[str] | None, typer.Option("--arg", help="A build argument of the Containerfile, KEY=VALUE. May be repeated.")
    ] = None,
    tool: Annotated[Tool | None, typer.Option(help="What builds it. Default: the first of them that is installed.")] = None,
    openshift: Annotated[
        bool, typer.Option("--openshift", help="Let OpenShift build it from this checkout into an ImageStream: needs no registry account.")
    ] = False,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where OpenShift builds it, and pods may use it.")
    ] = "lockstep-system",
    context: ContextOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands (with --openshift the objects, too) and run nothing.")
    ] = False,
) -> None:
    """Build the operator's or the trainer's image from this checkout.

    pip's settings and certificates of this machine are used while building, and are in no layer of the image.

    Example: lockstep build operator --tag registry.example.com/team/lockstep-operator:0.1.0 --push
    """
    from dataclasses import replace

    from lockstep.cli.paths import checkout
    from lockstep.plan.imagebuild import PROXIES, Build, chosen, commands

    root = checkout()
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    wanted = Build(image, version, tag=tag, base=base, arguments=tuple(arg or ()), proxies=tuple(n for n in PROXIES if n in os.environ))
    if openshift:
        _by_openshift(wanted, root, namespace, context, dry_run)
        return
    tool = chosen(tool, [name for name in Tool if shutil.which(name)])
    with _machine_settings() as secrets:
        steps = commands(replace(wanted, secrets=secrets), tool, push=push, archive=str(archive.resolve()) if archive else "")
        if not dry_run:
            print(f"building {wanted.reference} with {tool}", flush=True)
        for step in steps:
            _run(step, root, dry_run)


@contextmanager
def _machine_settings() -> Iterator[dict[str, str]]:
    """Files with this machine's pip settings and certificates, for as long as the build takes; none where it has none of its own."""
    settings = configparser.RawConfigParser()
    settings.read([Path(path).expanduser() for path in (*PIP_FILES, os.environ.get("PIP_CONFIG_FILE", os.devnull))])
    if not settings.has_section("global"):
        settings.add_section("global")
    for variable, option in PIP_VARIABLES.items():
        if variable in os.environ:
            settings.set("global", option, os.environ[variable])
    named = [*(os.environ.get(variable) for variable in CERTIFICATES), settings.get("global", "cert", fallback=None)]
    settings.remove_option("global", "cert")  # a path of this machine
    certificates = next((path for path in named if path and Path(path).is_file()), None)
    found = {"ca": certificates} if certificates else {}
    with tempfile.NamedTemporaryFile("w", prefix="lockstep-pip-") as file:  # readable by nobody else
        if settings.items("global"):
            settings.write(file)
            file.flush()
            found["pip"] = file.name
        yield found


def _run(command: list[str], root: Path, dry_run: bool, given: str = "") -> None:
    """Raises Failed when the command does."""
    if dry_run:
        print(shlex.join(command))
        return
    done = subprocess.run(command, cwd=root, input=given or None, text=True, check=False)
    if done.returncode != 0:
        raise Failed(f"{command[0]} {command[1]} failed with exit code {done.returncode}; what it said is above")


def _by_openshift(wanted: Build, root: Path, namespace: str, context: str | None, dry_run: bool) -> None:
    from lockstep.api.yamltext import dump_all_yaml
    from lockstep.plan.imagebuild import CONTEXT, openshift_commands, openshift_objects

    objects = dump_all_yaml(openshift_objects(wanted))
    if dry_run:
        print(objects, end="")
    elif shutil.which("oc") is None:
        raise ConfigError("oc is not installed (or not on PATH): OpenShift's page Command Line Tools (the question mark) has it")
    with tempfile.TemporaryDirectory(prefix="lockstep-build-") as folder:
        sent = "." if dry_run else folder
        apply, start = openshift_commands(wanted, sent, namespace, context)
        if not dry_run:
            _stage(root, Path(folder), CONTEXT)
        _run(apply, root, dry_run, objects)
        _run(start, root, dry_run)
    if not dry_run:
        print(f"Ready: pods of namespace {namespace} may use the image {wanted.stream_tag}")


def _stage(root: Path, folder: Path, names: tuple[str, ...]) -> None:
    """What the image is made from, and nothing else of the checkout: it travels to the cluster."""
    for name in names:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
