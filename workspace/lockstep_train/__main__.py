"""One rank of a training run:

LOCKSTEP_RUN=run.json python -m lockstep_train           started by the agent, with torchrun's environment
python -m lockstep_train --run run.json                  one process by hand
python -m lockstep_train --run run.json --preview 3      show what would be learned of the first samples, and train nothing
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from lockstep_spec.exits import DONE, FAILED, OUT_OF_MEMORY
from lockstep_train import standby
from lockstep_train.base import limits
from lockstep_train.base.errors import (
    ConfigError,
    Stopped,
    TrainerError,
    exit_code_of,
    leave_process,
)
from lockstep_train.base.imports import uncollected
from lockstep_train.base.runfile import RankEnvironment, RunConfig, ignored_variables, rank_environment, read_run
from lockstep_train.report import Reporter, print_error
from lockstep_train.report.sinks.choose import refuse_unusable_trackers
from lockstep_train.watch import Watchdog
from lockstep_train.watch.watchdog import RankPlace, StopSignal, switch_on_recorder


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train", description="Train a LoRA adapter: one rank of a run.")
    parser.add_argument("--run", type=Path, help="the run's file, run.json (default: $LOCKSTEP_RUN)")
    parser.add_argument("--preview", type=int, metavar="N", help="print the first N samples, marking what is learned, and exit")
    return parser.parse_args(arguments)


def run_file(arguments: list[str] | None = None) -> Path:
    chosen: Path | None = parse_options(arguments).run
    if chosen is None and "LOCKSTEP_RUN" not in os.environ:
        raise ConfigError("no run to train: give its file with --run or LOCKSTEP_RUN")
    return chosen or Path(os.environ["LOCKSTEP_RUN"])


def train_run(config: RunConfig, environment: RankEnvironment, reporter: Reporter) -> None:
    """Train a run from start to end on this rank, watched."""
    stop = StopSignal()
    stop.install()
    watch = Watchdog(stop, reporter, RankPlace(environment.rank, environment.attempt or 1, config.run_dir / "logs"), leave_process)
    watch.start()
    try:
        _train(config, environment, reporter, stop, watch)
    except Stopped:
        raise
    except Exception as error:
        others = watch.end_of_others()
        watch.failed(error)
        if others is not None:
            raise others from error
        raise
    finally:
        watch.close()


def _train(config: RunConfig, environment: RankEnvironment, reporter: Reporter, stop: StopSignal, watch: Watchdog) -> None:
    """Train, and import torch only here: a wrong setting is reported within 0.1 s."""
    reporter.activity("Init")
    for warning in ignored_variables():
        reporter.say(warning)
    refuse_unusable_trackers(config.training.report_to)
    watch.begin("Start of the ranks", limits.LOAD_SECONDS)
    switch_on_recorder(config.run_dir / "logs")
    with uncollected():
        from lockstep_train.assemble import assemble
        from lockstep_train.base.ranks import join, leave
        from lockstep_train.loop import finishing, train
        from lockstep_train.model.attention import cudnn_first
        from lockstep_train.model.fetched import with_model_here

    reporter.startup.done("imports")
    ranks = join(environment, config.timeouts.collective_seconds)
    watch.joined(ranks.store.clone(), ranks.world_size, gpus=ranks.device.type == "cuda")
    reporter.startup.done("join")
    config = with_model_here(config, ranks, reporter, watch)
    reporter.activity("Load")
    watch.begin("Load", limits.LOAD_SECONDS)
    with cudnn_first(ranks.device):
        run = assemble(config, environment, ranks, reporter, watch)
        reporter.startup.done("logs")
        try:
            with finishing(run):
                result = train(run, stop)
            left = f"Adapter: {result['adapter']}" if result["adapter"] else f"Model: {result['model']}"
            reporter.say(f"Done | Eval Loss before: {result['evalLossBefore']} | after: {result['evalLossAfter']} | {left}")
            if ranks.first:
                reporter.end(result)
        except Stopped:
            watch.begin("End", limits.END_SECONDS)
            leave(watch.close)
            raise
    watch.begin("End", limits.END_SECONDS)
    leave(watch.close)


def show_data(config: RunConfig, count: int) -> int:
    from lockstep_train.preview import preview

    preview(config, count)
    return DONE


def main(arguments: list[str] | None = None) -> int:
    reporter: Reporter | None = None
    rank = 0
    try:
        count = parse_options(arguments).preview
        if count is not None:
            return show_data(read_run(run_file(arguments)), count)
        began = standby.wait_for_order(read_run(run_file(arguments))) if standby.is_standby() else None
        environment = rank_environment()
        rank = environment.rank
        reporter = Reporter(environment.report_socket, rank, began)
        train_run(read_run(run_file(arguments)), environment, reporter)
    except Exception as error:
        code = exit_code_of(error)
        if not isinstance(error, TrainerError) or code in (FAILED, OUT_OF_MEMORY):
            traceback.print_exc()
        _tell(reporter, error, rank)
        if code == OUT_OF_MEMORY and reporter is not None:
            print_error("\n".join(reporter.out_of_memory_advice))
        return code
    finally:
        if reporter is not None:
            reporter.close()
    return DONE


def _tell(reporter: Reporter | None, error: Exception, rank: int) -> None:
    """Tell what ended the run, people and the agent first; only then may destinations of metrics take their time."""
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
        leave_process(code)
    sys.exit(code)
