"""Standby of a rank that waits for its order: it is started while the gang still backs off, so that its imports are done when it may go.

The agent starts it as any rank, with LOCKSTEP_STANDBY=1 and a pipe as standard input. The order is one line of JSON: when it was `given`,
on the monotonic clock, and in `environment` the variables that are otherwise by now, null for those that are gone. Until it comes, standard
input is that pipe, by which others see that it waits; then /dev/null.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import MutableMapping

from lockstep_train.base.imports import import_method, uncollected
from lockstep_train.base.runfile import RunConfig
from lockstep_train.report.reporter import since_boot
from lockstep_train.watch.watchdog import switch_on_recorder

VARIABLE = "LOCKSTEP_STANDBY"


def is_standby() -> bool:
    return VARIABLE in os.environ


def wait_for_order(config: RunConfig) -> float:
    """Import what a rank of this run needs, then wait. When the order was given, on the clock since boot. Ends the process when none will
    come.
    """
    import_all(config)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)
    order = json.loads(line)
    apply_order(order["environment"], os.environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    ordered_at: float = order["given"]
    return since_boot() - (time.monotonic() - ordered_at)


def apply_order(order: dict[str, str | None], environ: MutableMapping[str, str]) -> None:
    for name, value in order.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def import_all(config: RunConfig) -> None:
    """Import everything, in the order in which a start comes to it."""
    switch_on_recorder(config.run_dir / "logs")
    with uncollected():
        import transformers.modeling_utils  # noqa: F401

        import lockstep_train.assemble
        import lockstep_train.loop  # noqa: F401
        from lockstep_train.zero.start import import_engine

        import_engine()
        import_method(config.training)
