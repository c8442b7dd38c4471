"""One rank of Lockstep's trainer as the checks need it: `rank.py [--gloo] [--exhaust] [--record FILE] [--case NAME] [--joined FILE]`, with
torchrun's environment.

Packages that a plain image lacks are hidden, so that nothing here depends on them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep_train.base.runfile import RankEnvironment

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "workspace"), str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "train" / "ranks"), str(ROOT / "tests")]
from carried import append_carried  # noqa: E402

ABSENT = ("datasets", "bitsandbytes", "tensorboard", "flash_attn", "mlflow", "wandb", "pytest")


def hide() -> None:
    """As on a machine that has torch, transformers, peft, safetensors and DeepSpeed, and nothing else."""
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own mark for "not there"


def on_one_card() -> None:
    """All ranks of this machine compute on its first card. Without one nothing changes."""
    import torch

    from lockstep_train.base import ranks

    join = ranks.join

    def joined(environment: RankEnvironment, *arguments: Any) -> Any:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed chooses its device by it
        return replace(join(replace(environment, local_rank=0), *arguments), local_rank=environment.local_rank)

    if torch.cuda.is_available():
        ranks.join = joined


def over_gloo() -> None:
    """NCCL refuses two ranks on one card, so their collectives go through gloo."""
    import torch.distributed as dist

    whole = dist.init_process_group
    dist.init_process_group = lambda backend, **options: whole("gloo", **options)  # type: ignore[assignment]


def exhaust() -> None:
    """Let the first forward pass ask for twice the card's memory. Without a card it fails in CUDA's words."""
    import torch

    from lockstep_train.engine.loss import TokenLoss

    def starved(self: TokenLoss, *arguments: Any) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA error: out of memory")
        _, total = torch.cuda.mem_get_info()
        return torch.empty(2 * total, dtype=torch.uint8, device="cuda")

    TokenLoss.__call__ = starved  # type: ignore[method-assign]


def record(path: Path) -> None:
    """Write the flight recorder's record when the ranks leave: what a watchdog would write of ranks that hang."""
    from lockstep_train.base import ranks
    from lockstep_train.watch.watchdog import write_flight_record

    leave = ranks.leave

    def leaving(*arguments: Callable[[], None]) -> None:
        write_flight_record(path)
        leave(*arguments)

    ranks.leave = leaving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--exhaust", action="store_true")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--case", help="a function of tests/train/ranks/cases_save.py instead of the trainer")
    parser.add_argument("--joined", type=Path, help="what computes joined documents here (joined.py) instead of the trainer")
    options = parser.parse_args()
    append_carried()
    hide()
    on_one_card()
    if options.gloo:
        over_gloo()
    if options.exhaust:
        exhaust()
    if options.record is not None:
        record(options.record)
    if options.joined is not None:
        import joined

        return joined.main(options.joined)
    if options.case is not None:
        import cases_save

        return int(getattr(cases_save, options.case)() or 0)
    from lockstep_train import __main__ as trainer

    return trainer.main([])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # native threads must not abort a process that has reported everything
