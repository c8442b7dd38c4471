"""What ended Lockstep's trainer, heard by its report, by its exit, or both in either order: always the same cause, and the same answer to a
retry.
"""

from __future__ import annotations

import errno
import importlib
import pkgutil
from collections.abc import Callable, Iterator

import pytest

import lockstep_train
from lockstep_gang.contract.messages import Error, Stopped
from lockstep_gang.contract.report import Cause, Failure, State
from lockstep_gang.contract.run import RestartPolicy
from lockstep_gang.lifecycle.causes import TRAINER_ENDS
from lockstep_spec.exits import FAILED, OUT_OF_MEMORY, SAVED
from lockstep_train.base import errors
from lockstep_train.base.errors import TrainerError
from unit.gang.story import Story, all_stopped, started

LOST_PEER = ("RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4",)


def trainer_errors(of: type[TrainerError] = TrainerError) -> Iterator[type[TrainerError]]:
    for module in pkgutil.iter_modules(lockstep_train.__path__):
        if module.name != "__main__":
            importlib.import_module(f"lockstep_train.{module.name}")
    for error in of.__subclasses__():
        yield error
        yield from trainer_errors(error)


class OutOfMemoryError(RuntimeError):
    """As torch's is called."""


ERRORS: list[tuple[Exception, Cause]] = [
    *((error("targetModules: no module named qq_proj"), cause) for error in (*trainer_errors(),) for cause in [
        next((end.cause for end in TRAINER_ENDS if end.exception == error.__name__), Cause.INTERNAL)
    ] if error.exit_code != SAVED),
    (TrainerError("step 4 could not be saved: rank 0: [Errno 28] No space left on device"), Cause.STORAGE),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), Cause.OUT_OF_MEMORY),
    (MemoryError("no room"), Cause.OUT_OF_MEMORY),
    (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"), Cause.HANG),
    (RuntimeError("NCCL operation timed out"), Cause.HANG),
    (OSError(errno.ENOSPC, "No space left on device"), Cause.STORAGE),
    (ImportError("cannot import name x"), Cause.SETUP),
    (KeyError("x"), Cause.INTERNAL),
]  # fmt: skip


def report(error: Exception) -> Error:
    return Error(1, type(error).__name__, str(error))


def last_lines(error: Exception) -> tuple[str, ...]:
    return ("Traceback (most recent call last):", f"{type(error).__name__}: {error}")


def report_then_exit(story: Story, error: Exception) -> Story:
    return story.reports(1, report(error)).exits(1, errors.exit_code_of(error), last_lines=last_lines(error))


def exit_then_report(story: Story, error: Exception) -> Story:
    return story.exits(1, errors.exit_code_of(error), last_lines=last_lines(error)).reports(1, report(error))


def exit_alone(story: Story, error: Exception) -> Story:
    return story.exits(1, errors.exit_code_of(error), last_lines=last_lines(error))


def report_and_killed(story: Story, error: Exception) -> Story:
    """Rank 0 loses its peer first and the attempt is stopped before rank 1 has exited by itself."""
    story.reports(1, report(error)).exits(0, FAILED, last_lines=LOST_PEER)
    return story.exits(1, None, signal="SIGKILL", ordered=True)


ORDERS = [report_then_exit, exit_then_report, exit_alone, report_and_killed]


def outcome(order: Callable[[Story, Exception], Story], error: Exception) -> tuple[Failure, State]:
    story = all_stopped(order(started(training={}, restart=RestartPolicy(5, 10)), error))
    assert story.gang.failure is not None
    return story.gang.failure, story.report.state


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize(("error", "cause"), ERRORS, ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_the_cause_is_the_same_in_whichever_order_report_and_exit_are_heard(
    error: Exception, cause: Cause, order: Callable[[Story, Exception], Story]
) -> None:
    failure, state = outcome(order, error)
    assert failure.cause is cause
    assert failure.rank == 1 or cause is Cause.HANG  # of a hang it is the rank that the others wait for
    assert (state is State.FAILED) is (cause is Cause.CONFIGURATION)


def test_every_exit_code_and_exception_of_the_trainer_is_in_the_table() -> None:
    decided = {(error.exit_code, error.__name__) for error in trainer_errors() if error.exit_code not in (SAVED, FAILED)}
    assert decided | {(OUT_OF_MEMORY, "OutOfMemoryError")} == {(end.exit_code, end.exception) for end in TRAINER_ENDS}


@pytest.mark.parametrize("name", [end.exception for end in TRAINER_ENDS if end.cause is not Cause.OUT_OF_MEMORY])
def test_a_script_s_exception_of_the_same_name_is_the_script_s_own(name: str) -> None:
    story = started(restart=RestartPolicy(5, 10)).reports(1, Error(1, name, "of another library")).exits(1, 78)
    failure = story.hears(0, Stopped(1)).hears(1, Stopped(1)).gang.failure
    assert failure.cause is Cause.USER_CODE
