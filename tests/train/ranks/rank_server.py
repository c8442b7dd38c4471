"""Forks ranks from a process that has everything imported, so a rank starts in milliseconds instead of seconds.

`rank_server.py SOCKET DESCRIPTOR` returns once it serves: in the background, each connection to SOCKET, and as the first one the socket
that it inherits as DESCRIPTOR. It ends with the last of them. A connection begins with {"folder": where ranks run}, which is answered by
{"ready": true}. Then it is one JSON request a line: {"target": "main" | "<function of rank_cases.py or of a cases_*.py>", "arguments": {…},
"ranks": [{"environment": {…}, "output": path}, …]}; answers {"pids": […]} and, as each rank ends, {"pid": …, "code": …} (negative: the
signal).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any


def preload() -> None:
    gc.disable()
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import peft.tuners.lora.bnb
    import peft.utils.transformers_weight_conversion  # noqa: F401
    import rank_cases
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from lockstep_train.zero.start import import_muon

    import_muon()
    get_checkpoint_conversion_mapping("llama")  # compiles 900 patterns, once in a process: a third of a short run
    rank_cases.case_modules()  # the tests' own functions, and with them the trainer
    gc.collect()
    gc.enable()
    gc.freeze()  # else every rank's first collection writes into, and so copies, all that is shared with this process


def run_rank(request: dict[str, Any], rank: dict[str, Any]) -> None:
    """In the forked child: become a rank. Never returns."""
    code = 1
    try:
        os.setsid()
        output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ.update(rank["environment"])
        import rank_cases

        code = rank_cases.call(request["target"], request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def serve(client: socket.socket) -> None:
    """Serve one connection until the client closes it, or dies: its ranks end with it."""
    running: set[int] = set()
    try:
        serve_requests(client, running)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def serve_requests(client: socket.socket, running: set[int]) -> None:
    """Start ranks, and keep in `running` the processes of those that aren't waited for yet."""
    requests = client.makefile("r")

    def answer(message: dict[str, Any]) -> None:
        client.sendall(json.dumps(message).encode() + b"\n")

    folder = Path(json.loads(requests.readline())["folder"])
    os.chdir(folder)
    log = os.open(folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    selector = selectors.DefaultSelector()
    selector.register(client, selectors.EVENT_READ)
    answer({"ready": True})
    while True:
        for key, _ in selector.select():
            if key.fileobj is client:
                line = requests.readline()
                if not line:
                    return
                request = json.loads(line)
                pids = []
                for rank in request["ranks"]:
                    pid = os.fork()
                    if pid == 0:
                        run_rank(request, rank)
                    pids.append(pid)
                    running.add(pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                answer({"pids": pids})
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                running.remove(key.data)
                answer({"pid": key.data, "code": os.waitstatus_to_exitcode(status)})


def serve_all(listener: socket.socket, first: socket.socket) -> None:
    """Fork a process for each connection, until none is left."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)

    def fork_for(client: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            selector.close()
            listener.close()
            try:
                serve(client)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        client.close()
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    fork_for(first)
    while len(selector.get_map()) > 1:
        for key, _ in selector.select():
            if key.fileobj is listener:
                fork_for(listener.accept()[0])
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                os.waitpid(key.data, 0)


def main(path: str, descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's
    preload()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    if os.fork() == 0:
        os.setsid()
        serve_all(listener, socket.socket(fileno=descriptor))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
