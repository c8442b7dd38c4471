"""What all tests share: modules in this folder can be imported, and nothing of the person who runs them is used or changed.

No test sees that person's kubeconfig, embedded cluster, cluster files or state. Tests that need a cluster bring up one of their own
(tests/cluster).
"""

import asyncio
import atexit
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent))

from lockstep.cli.shared.folders import STATE
from lockstep.devcluster.host.layout import NUMBER
from support.checkout import ROOT
from support.clusters.own_cluster import GIVEN, NOBODYS
from unit.virtual_time import VirtualClock

GARBAGE_OBJECTS = 20_000
"""New objects between looks for garbage: with Python's 700, tests that read the whole tree spend a third of their time on these."""
pytest_plugins = ["support.corpus_score"]
# An example's time says how busy the machine is; the same examples each time, so that a failure is of the change that it is seen with.
settings.register_profile("lockstep", deadline=None, derandomize=True, database=None)
settings.register_profile("search", settings.get_profile("lockstep"), derandomize=False)
settings.load_profile("lockstep")


def pytest_collection_finish() -> None:
    """Take modules and collected tests out of the garbage collector's sight: with thousands of tests, an eighth of the processor's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, which goes by the virtual clock if it asks for one."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    clock = next((value for value in arguments.values() if isinstance(value, VirtualClock)), None)
    (asyncio.run if clock is None else clock.run)(pyfuncitem.obj(**arguments))
    return True


def pytest_configure() -> None:
    gc.disable()  # until all is collected: imports leave no garbage
    # What tests start would ignore what this process was started to ignore, and many tests send it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background job
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup: pytest itself survives it as before
        signal.signal(signal.SIGHUP, lambda *_: None)
    os.environ[STATE] = tempfile.mkdtemp(prefix="lockstep-tests-")
    atexit.register(shutil.rmtree, os.environ[STATE], ignore_errors=True)
    configured = Path(
        os.environ[STATE], "config", "lockstep", "clusters"
    )  # so that those of this checkout have their names in every folder
    configured.parent.mkdir(parents=True)
    configured.symlink_to(ROOT / "clusters")
    os.environ["XDG_CONFIG_HOME"] = str(configured.parent.parent)
    os.environ.pop("LOCKSTEP_CLUSTER", None)
    os.environ.pop("KUBECONFIG", None)
    os.environ["KUBECACHEDIR"] = (
        f"{os.environ[STATE]}/kubectl"  # else it takes one of these clusters for an earlier one at the same address
    )
    if GIVEN not in os.environ:
        os.environ[NUMBER] = str(NOBODYS)
