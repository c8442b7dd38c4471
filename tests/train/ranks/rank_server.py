"""Forks ranks from a process that has everything imported, so a rank starts in milliseconds instead of seconds.

Reads one JSON request a line: {"target": "main" | "<function of rank_cases.py or of a cases_*.py>", "arguments": {…}, "ranks": [{"environment": {…}, "output": path}, …]};
answers {"pids": […]} and, as each rank ends, {"pid": …, "code": …} (negative: the signal).
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
from typing import Any


def preload() -> None:
    import deepspeed  # noqa: F401
    import peft  # noqa: F401
    import rank_cases
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    from lockstep_train.zero.start import import_muon

    import_muon()
    rank_cases.case_modules()  # the tests' own functions, and with them the trainer
    gc.collect()
    gc.freeze()  # else every rank's first collection writes into, and so copies, all that is shared with this process


def run_rank(request: dict[str, Any], rank: dict[str, Any]) -> None:
    """In the forked child: become a rank. Never returns."""
    os.setsid()
    output = os.open(rank["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.update(rank["environment"])
    code = 1
    try:
        import rank_cases

        code = rank_cases.call(request["target"], request["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    answers.write(json.dumps({"ready": True}) + "\n")
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                request = json.loads(line)
                pids = []
                for rank in request["ranks"]:
                    pid = os.fork()
                    if pid == 0:
                        run_rank(request, rank)
                    pids.append(pid)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                answers.write(json.dumps({"pids": pids}) + "\n")
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                answers.write(json.dumps({"pid": key.data, "code": os.waitstatus_to_exitcode(status)}) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test runner's
    preload()
    serve()
