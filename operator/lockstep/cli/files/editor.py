"""`lockstep shell|jupyter|tensorboard|vscode|debug`: a shell in a pod of a job or on its host, and editors and notebooks there, reached by
port-forward.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import WORKSPACE
from lockstep.cli.shared.jobargs import DEFAULT_JOB, NodeOption, OptionalJobArgument, TargetOptions, find_job, on_cluster
from lockstep.platforms.jobs.terminal import shell as open_shell
from lockstep.platforms.output import put, put_json, put_link, put_text, say

if TYPE_CHECKING:
    from lockstep.platforms.places.values import Spot

JUPYTER_PORT, TENSORBOARD_PORT, CODE_PORT, DEBUG_PORT = 8888, 6006, 8443, 5678
T = TypeVar("T")


@on_cluster
def shell(where: TargetOptions, job: OptionalJobArgument = DEFAULT_JOB, node: NodeOption = 0) -> None:
    """Open a shell in a job's pod, or on its host.

    The shell has the variables that every run there has. The exit code is the shell's.

    Without a terminal it runs the commands on its standard input: echo 'nvidia-smi' | lockstep shell

    Example: lockstep shell ml-dev-env --node 1
    """
    raise typer.Exit(_at(job, node, where, lambda spot: open_shell(spot.volume.place, spot.volume.workspace), ports=False))


@on_cluster
def jupyter(
    where: TargetOptions,
    job: OptionalJobArgument = DEFAULT_JOB,
    node: NodeOption = 0,
) -> None:
    """Run a notebook server in a job's pod, or on its host.

    It runs until Ctrl-C, behind a token, and prints the address on this machine that leads to it.

    The server listens on the pod's loopback only. The image needs jupyterlab, notebook or jupyter_server.

    Example: lockstep jupyter ml-dev-env
    """
    _serve("jupyter", job, node, where, JUPYTER_PORT)


@on_cluster
def tensorboard(
    where: TargetOptions,
    job: OptionalJobArgument = DEFAULT_JOB,
    node: NodeOption = 0,
    folder: Annotated[str, typer.Option("--folder", help="Folder that holds the events of runs, in the pod.")] = f"{WORKSPACE}/runs",
) -> None:
    """Run TensorBoard in a job's pod, or on its host.

    It runs until Ctrl-C, behind a token, and prints the address on this machine that leads to it.

    Example: lockstep tensorboard ml-dev-env
    """
    _serve("tensorboard", job, node, where, TENSORBOARD_PORT, folder=folder)


@on_cluster
def vscode(
    where: TargetOptions,
    job: OptionalJobArgument = DEFAULT_JOB,
    node: NodeOption = 0,
    folder: Annotated[str, typer.Option("--folder", help="Folder to open, in the pod.")] = WORKSPACE,
) -> None:
    """Open a job's files in VS Code.

    It serves VS Code to your browser until Ctrl-C, behind a token, and prints the address on this machine that leads to it.

    The image needs code-server, openvscode-server or code (`code serve-web`) on its PATH. VS Code listens on the pod's loopback only. The
    verb also prints a command that opens the folder in this machine's own VS Code. `lockstep debug` starts a script under a debugger.

    Example: lockstep vscode ml-dev-env --node 1
    """
    _serve("vscode", job, node, where, CODE_PORT, folder=folder)


@on_cluster
def debug(
    where: TargetOptions,
    job: Annotated[str, typer.Argument(help="The job's name.")],
    script: Annotated[
        str | None,
        typer.Argument(
            help="The script's path in the pod; a relative path begins at /workspace. Leave it out with --attach.", show_default=False
        ),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments, after --.")] = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Start nothing. Connect to a script there that waits for a debugger already.")
    ] = False,
    node: NodeOption = 0,
) -> None:
    """Start a script under debugpy and let VS Code attach.

    It runs in one pod, or on one host, and waits until VS Code attaches. Ctrl-C ends it. The image needs debugpy.

    The script is one process beside the job, not one of its ranks. To debug a rank, let your code wait for VS Code:
    debugpy.listen(("127.0.0.1", 5678)); debugpy.wait_for_client(). Then --attach forwards that port until Ctrl-C.

    Example: lockstep debug ml-dev-env train.py -- --epochs 1

    Example: lockstep debug ml-dev-env --attach --node 1
    """
    if attach == (script is not None):
        raise ConfigError(
            "name either a script to start, or --attach for one that waits already: lockstep debug JOB train.py, or lockstep debug JOB"
            " --attach"
        )
    if script is not None:
        return _serve("debug", job, node, where, DEBUG_PORT, command=(script, *(arguments or [])))

    async def forward(spot: Spot) -> None:
        from lockstep.platforms.jobs.editor import piped

        if spot.host is not None:
            say(
                f"every user of {spot.name} can run code as you by port {DEBUG_PORT} there while the script runs, since debugpy asks for no"
                f" password: where others log in, end the script now, and start it by `lockstep debug {job} SCRIPT`, which opens no port"
            )
        async with piped(spot.volume.place, str(DEBUG_PORT), DEBUG_PORT, say) as local:
            _print_launch(spot, local)
            put(f"Port {local} of this machine leads to port {DEBUG_PORT} of {spot.name}. Press Ctrl-C to end.", flush=True)
            await spot.until_gone()

    _at(job, node, where, forward)


def _serve(
    kind: str,
    job: str,
    node: int,
    where: TargetOptions,
    usual: int,
    *,
    folder: str = WORKSPACE,
    command: Sequence[str] = (),
) -> None:
    """Serve and forward until either ends or Ctrl-C ends both."""

    async def serve(spot: Spot) -> None:
        from lockstep.platforms.jobs.editor import EditorRequest, ProgramMissing, piped, served

        volume = spot.volume
        request = EditorRequest(kind, volume.path(folder), tuple(command), cwd=volume.path(WORKSPACE), on_host=spot.host is not None)
        if kind == "vscode" and (words := await spot.desktop(request.folder)):
            extension = "Dev Containers" if spot.host is None else "Remote - SSH"
            put(f"With the VS Code of this machine and its extension {extension}:", f"  {words}", flush=True)
        try:
            async with (
                served(volume.place, request, _echo) as (there, ended),
                piped(volume.place, there, usual, say) if isinstance(there, str) else spot.forwarded(there, usual) as local,
            ):
                if kind == "debug":
                    _print_launch(spot, local)
                    put(f"{command[0]} in {spot.name} waits for that. Ctrl-C ends it.", flush=True)
                else:
                    put_link(request.address(local))
                    put(f"{kind} in {spot.name}, {request.folder}. Ctrl-C ends it.", flush=True)
                    await asyncio.to_thread(say_unknown, request.name)
                why = await ended
        except ProgramMissing:
            if kind != "vscode" or spot.host is None or not await _opened_there(spot, request.folder):
                raise
            return
        if why:
            raise Failed(f"{kind} in {volume.place.name}: {why}")

    _at(job, node, where, serve)


def say_unknown(name: str) -> None:
    """Say what to do where this machine doesn't find the name of its own loopback. Chrome, Edge and Firefox know it by themselves."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        say(f"open it in Chrome, Edge or Firefox; another browser finds it once your hosts file has the line: 127.0.0.1 {name}")


def _at(job: str, node: int, where: TargetOptions, work: Callable[[Spot], Coroutine[Any, Any, T]], *, ports: bool = True) -> T:
    """Do the work at a node of the job."""
    found = find_job(job, where)

    async def done() -> T:
        async with found.spot(node, ports=ports) as spot:
            return await work(spot)

    return asyncio.run(done())


async def _opened_there(spot: Spot, folder: str) -> bool:
    """Open the folder in the VS Code of this machine, where there is a `code`; whether there is."""
    assert spot.host is not None  # noqa: S101 (the caller looks)
    unknown = [key for key in ("identity", "jump") if getattr(spot.host, key)]
    if unknown:
        say(f"VS Code reads ~/.ssh/config alone: give {spot.name} there the {' and the '.join(unknown)} that the cluster file states")
    command = shlex.split(await spot.desktop(folder))
    program = shutil.which(command[0])
    if program is None:
        return False
    process = await asyncio.create_subprocess_exec(program, *command[1:], stdin=asyncio.subprocess.DEVNULL)
    if code := await process.wait():
        raise Failed(f"{program} ended with exit code {code}")
    return True


def _print_launch(spot: Spot, port: int) -> None:
    here, there = Path("workspace"), spot.volume.path(WORKSPACE)
    entry = {
        "name": f"Lockstep: {spot.name}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "pathMappings": [{"localRoot": "${workspaceFolder}/workspace" if here.is_dir() else "${workspaceFolder}", "remoteRoot": there}],
    }
    put("Into .vscode/launch.json, configurations:")
    put_json(entry)


def _echo(text: str) -> None:
    put_text(text.replace("\r\n", "\n").replace("\r", "\n"), error=True)
