"""`python3 agent.pyz --run run.json [--node N]`: the first process of a node. `agent.pyz run|stop|env`: what people type beside it; `sweep`
and `probe`: a look at a cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lockstep_gang.agent.agent import Agent
from lockstep_gang.agent.claims import Claims, GpuTaken
from lockstep_gang.agent.host import listen_on, remove_inputs, tidy_up
from lockstep_gang.agent.link import LAST_WORDS
from lockstep_gang.agent.log import Console, Journal
from lockstep_gang.agent.preflight import facts
from lockstep_gang.agent.preflight.allreduce_rank import sweep
from lockstep_gang.agent.ranks.environment import SECRET, isolate, place_secret, place_start
from lockstep_gang.agent.ranks.ranks import LocalNode
from lockstep_gang.agent.ranks.reports import make_folder, remove_folder
from lockstep_gang.agent.session import client
from lockstep_gang.contract.preflight import PROBE, SWEEP
from lockstep_gang.contract.proof import parse_key, ranks_secret
from lockstep_gang.contract.run import HostPlace, Run, parse_run
from lockstep_gang.coordinator.coordinator import Coordinator, Output
from lockstep_gang.coordinator.owner import Replaced
from lockstep_gang.coordinator.server import Server
from lockstep_gang.lifecycle.preflight.rounds import ends_with_it
from lockstep_machine.readings import user_name
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import CONFIGURATION, INTERNAL, UNREACHABLE

POD_UMASK = 0o002
"""Pods over RDMA are UID 0 without the right to pass over modes, others a user of their own: their group is what they share on a volume."""
PROMPT = "PS1='lockstep@\\h:\\w\\$ '\n"
SOCKET_FOLDER_CHARACTERS = 60  # a Unix socket's path has at most 107


def main(arguments: Sequence[str] | None = None) -> int:
    """The agent's exit code: 0 complete, 1 failed, 75 saved and stopped as asked, 78 what it was given can't be used; 70 a fault of its
    own, which is no verdict on the job.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] and words[0] in client.VERBS:
        return client.main(words)
    if words[:1] == [SWEEP]:
        return sweep(words[1:])
    if words[:1] == [PROBE]:
        return facts.probe()
    try:
        return _agent(_parse(words))
    except Exception:  # Python's own exit code for it, 1, would say that the job has failed
        traceback.print_exc()
        return INTERNAL


def _agent(options: argparse.Namespace) -> int:
    if options.parent is None:
        isolate()
    try:
        run = parse_run(Path(options.run).read_text(encoding="utf-8"))
        key = parse_key(Path(run.key_file).read_text(encoding="ascii"))
        index = node_index(options.node, os.environ.get("LOCKSTEP_NODE"), run.nodes)
    except (ContractError, OSError, UnicodeDecodeError) as error:
        print(f"lockstep agent: {options.run}: {error}", file=sys.stderr)
        return CONFIGURATION
    if run.host is not None:
        return _on_a_host(options, run, key, index, run.host)
    if options.parent is None:  # the first process of a pod; on somebody's own machine their umask counts
        os.umask(POD_UMASK)
        name_the_prompt(Path(os.environ.get("HOME", "/")))
    return _agent_of(options, run, key, index)


def _on_a_host(options: argparse.Namespace, run: Run, key: bytes, index: int, host: HostPlace) -> int:
    listen_on(run.addresses[index])
    try:
        claims = Claims(host.claims, run.job.name)
    except GpuTaken as error:
        print(f"lockstep agent: {error}", file=sys.stderr)
        return CONFIGURATION
    except OSError as error:
        print(f"lockstep agent: the GPUs of this machine can't be claimed: {error.strerror or error}", file=sys.stderr)
        return CONFIGURATION
    with claims:
        return _agent_of(options, run, key, index)


def _agent_of(options: argparse.Namespace, run: Run, key: bytes, index: int) -> int:
    console = Console(sys.stdout.fileno())
    if index != 0 and not ends_with_it(run):  # a preflight alone leaves the job's folder as it is, and node 0 waits until it is the job's
        console.keep_in(Journal(run, index, console.say))
    try:
        folder, start = _own_folder(_temporary(), ranks_secret(key, run.job.uid or run.job.name))
    except OSError as error:  # a full disk: whoever keeps the agent starts it again, until there is room
        console.say(f"this agent can't start: {error.filename or _temporary()}: {error.strerror}")
        console.close(2.0)
        return INTERNAL
    node = LocalNode(run, index, options.run, folder / "report.sock", folder, start=start, secret_file=str(folder / SECRET))
    try:
        code, has_ended = asyncio.run(_serve(run, key, node, (console, options.parent)))
        if has_ended and run.host is not None:
            tidy_up(run.host, Path(run.key_file), console.say)
        return code
    except (ContractError, OSError) as error:
        console.say(f"the agent of node {index} cannot continue: {error}")
        return CONFIGURATION
    except Exception as error:
        console.say(f"the agent of node {index} ends with an internal error, which says nothing about the job: {error!r}")
        raise
    finally:
        remove_folder(folder)
        if options.parent not in (None, os.getppid()):
            remove_inputs(Path(options.run), Path(run.key_file))
        console.close(2.0)


def _own_folder(parent: Path, secret: str) -> tuple[Path, str]:
    """This agent's folder, and the one in it that ranks import from first. Raises OSError, and leaves neither then."""
    folder = make_folder(parent)
    try:
        place_secret(folder, secret)
        return folder, place_start(folder)
    except OSError:
        remove_folder(folder)
        raise


def name_the_prompt(home: Path, last_words: Path = LAST_WORDS) -> None:
    """Give shells a prompt in a pod whose user number has no name in the image, instead of `I have no name!`."""
    with contextlib.suppress(OSError):
        if last_words.exists() and user_name() == str(os.getuid()) and not (home / ".bashrc").exists():
            (home / ".bashrc").write_text(PROMPT, encoding="ascii")


def node_index(option: str | None, variable: str | None, nodes: int) -> int:
    """Index from --node, else from LOCKSTEP_NODE. Raises ContractError."""
    text = option if option is not None else variable
    if text is None or not text.isdecimal() or int(text) >= nodes:
        raise ContractError(f"the index of this node is {text!r}, must be 0 to {nodes - 1}, by --node or LOCKSTEP_NODE")
    return int(text)


async def _serve(run: Run, key: bytes, node: LocalNode, around: tuple[Console, int | None]) -> tuple[int, bool]:
    """The agent's exit code, and True if the job has ended."""
    console, parent = around
    agent = Agent(run, key, node, console)
    if parent is not None:
        agent.end_with(parent)
    if node.index != 0:
        code = await agent.run()
        _end_if_cut_off(agent, node, console)
        return code, agent.job_has_ended
    output = Output(console.say, console.tail, console.write, lambda: console.keep_in(Journal(run, 0, console.say)))
    coordinator = Coordinator(run, key, output)
    server = Server(run, key, coordinator, output)
    hosting = asyncio.ensure_future(coordinator.run())  # before an agent can be heard
    agent.link.address = await server.start()
    agent.unheard_trouble = lambda: coordinator.unheard_trouble
    serving = asyncio.ensure_future(agent.run())
    try:
        await asyncio.wait([hosting, serving], return_when=asyncio.FIRST_COMPLETED)
        if hosting.done() and isinstance(error := hosting.exception(), Replaced):
            console.say(f"this node 0 was replaced, and ends its ranks: {error.strerror}")
            await server.stop()
            agent.retire()
            return await serving, agent.job_has_ended
        if hosting.done():
            hosting.result()  # it never ends by itself: raises what ended it
        _end_if_cut_off(agent, node, console)
        await coordinator.settle()
    finally:
        hosting.cancel()
        serving.cancel()
        await asyncio.wait([hosting, serving])
        await server.stop()
    return serving.result(), agent.job_has_ended


def _end_if_cut_off(agent: Agent, node: LocalNode, console: Console) -> None:
    """End the process at once: Python's own end waits up to 20 s for threads that ask a name server which doesn't answer. Nothing runs
    yet.
    """
    if agent.cut_off is not None:
        remove_folder(node.folder)
        console.close(1.0)
        os._exit(UNREACHABLE)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agent.pyz", description="Starts and watches the ranks of one node of a Lockstep job.")
    parser.add_argument("--run", required=True, metavar="FILE", help="run.json")
    parser.add_argument("--parent", type=int, metavar="PID", help="save and stop when this process is no longer the parent")
    parser.add_argument("--node", metavar="N", help="index of this node (default: the variable LOCKSTEP_NODE)")
    return parser.parse_args(arguments)


def _temporary() -> Path:
    folder = Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 (the folder in it is ours alone)
    return folder if len(str(folder)) <= SOCKET_FOLDER_CHARACTERS else Path("/tmp")  # noqa: S108


if __name__ == "__main__":
    raise SystemExit(main())
