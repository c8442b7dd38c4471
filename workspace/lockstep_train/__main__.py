"""One rank of a training run:

LOCKSTEP_RUN=run.json python -m lockstep_train           started by the agent, with torchrun's environment
python -m lockstep_train --run run.json                  one process by hand
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from lockstep_train.config import RunConfig, read_run
from lockstep_train.environment import RankEnvironment, rank_environment
from lockstep_train.errors import EXIT_DONE, EXIT_FAILED, EXIT_OUT_OF_MEMORY, ConfigError, Stopped, TrainerError
from lockstep_train.report import Reporter, print_error
from lockstep_train.report.sinks.choose import refuse_unusable
from lockstep_train.stop import StopSignal


def run_file(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train", description="Train a LoRA adapter: one rank of a run.")
    parser.add_argument("--run", type=Path, help="the run's file, run.json (default: $LOCKSTEP_RUN)")
    chosen: Path | None = parser.parse_args(arguments).run
    if chosen is None and "LOCKSTEP_RUN" not in os.environ:
        raise ConfigError("no run to train: give its file with --run or LOCKSTEP_RUN")
    return chosen or Path(os.environ["LOCKSTEP_RUN"])


def train_run(config: RunConfig, environment: RankEnvironment, reporter: Reporter) -> None:
    """From start to end, on this rank. torch is imported only here: a wrong setting is told within 0.1 s."""
    stop = StopSignal()
    stop.install()
    reporter.activity("Init")
    refuse_unusable(config.training.metrics)
    from lockstep_train.assemble import assemble
    from lockstep_train.engine.ranks import join, leave
    from lockstep_train.loop import train
    from lockstep_train.saving import finishing

    ranks = join(environment)
    reporter.activity("Load")
    run = assemble(config, environment, ranks, reporter)
    try:
        with finishing(run):
            result = train(run, stop)
        reporter.say(
            f"Done | Eval Loss before: {result['evalLossBefore']} | after: {result['evalLossAfter']} | Adapter: {result['adapter']}"
        )
        if ranks.first:
            reporter.end(result)
    except Stopped:
        leave()
        raise
    leave()


def exit_code_of(error: BaseException) -> int:
    """What the agent reads; out of memory is recognised by name, since torch may not even be imported."""
    if isinstance(error, TrainerError):
        return error.exit_code
    return EXIT_OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else EXIT_FAILED


def main(arguments: list[str] | None = None) -> int:
    reporter: Reporter | None = None
    rank = 0
    try:
        environment = rank_environment()
        rank = environment.rank
        reporter = Reporter(environment.report_socket, rank)
        train_run(read_run(run_file(arguments)), environment, reporter)
    except TrainerError as error:
        _tell(reporter, error, rank)
        return exit_code_of(error)
    except Exception as error:
        traceback.print_exc()
        _tell(reporter, error, rank)
        if exit_code_of(error) == EXIT_OUT_OF_MEMORY and reporter is not None:
            print_error("\n".join(reporter.out_of_memory_advice))
        return exit_code_of(error)
    finally:
        if reporter is not None:
            reporter.close()
    return EXIT_DONE


def _tell(reporter: Reporter | None, error: Exception, rank: int) -> None:
    """What ended the run, first to people and the agent; only then may destinations of metrics take their time."""
    if reporter is not None:
        reporter.end_bar()
    stopped = isinstance(error, Stopped)
    print_error(f"lockstep_train: {error}" if stopped else f"lockstep_train: rank {rank}: {type(error).__name__}: {error}")
    if reporter is not None:
        if not stopped:
            reporter.agent.send_error(error)
        reporter.close("Stopped" if stopped else "Failed")


if __name__ == "__main__":
    code = main()
    if "torch" in sys.modules:
        from lockstep_train.engine.ranks import leave_process

        leave_process(code)
    sys.exit(code)
