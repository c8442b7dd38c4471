"""What others save, put through the same power cuts: DeepSpeed's own save_checkpoint, and torch's DCP, synchronous and asynchronous.

Two ranks each, defaults throughout. Every number of a state is the step it was saved at, so that a mix shows.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from faults.lockstep_saves import rank_variables, rendezvous_port
from faults.power_cut import Subject

RANKS = 2
OLD, NEW = 1, 2
WIDTH = 64


def join(rank: int, folder: Path) -> None:
    os.environ.update(rank_variables(rank, RANKS, rendezvous_port(rank, folder)))
    dist.init_process_group("gloo")


def version(values: list[torch.Tensor]) -> set[float]:
    return {value for tensor in values if tensor.numel() for value in tensor.detach().float().unique().tolist()}


def verdict_of(found: set[float]) -> str:
    known = {frozenset({float(OLD)}): "old", frozenset({float(NEW)}): "new"}
    return known.get(frozenset(found), f"mix: of the states {sorted(found)}")


class DeepSpeedSession:
    """ZeRO-2, engine.save_checkpoint with its own `latest`."""

    def __init__(self, rank: int, folder: Path) -> None:
        join(rank, folder)
        from lockstep_train.zero.start import prepare_deepspeed

        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH, bias=False))
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
        optimizer = torch.optim.AdamW(model.parameters())
        self._engine = prepare_deepspeed().initialize(model=model, optimizer=optimizer, config=settings)[0]
        from lockstep_train.zero.zero_access import create_optimizer_state

        create_optimizer_state(self._engine, 1)

    def save_old(self, disk: Path) -> None:
        self._save(disk, OLD)
        os.sync()

    def save_new(self, disk: Path) -> None:
        self._save(disk, NEW)

    @torch.no_grad()
    def _save(self, disk: Path, step: int) -> None:
        for flat in self._engine.optimizer.single_partition_of_fp32_groups:
            flat.fill_(step)
            for moment in ("exp_avg", "exp_avg_sq"):
                self._engine.optimizer.optimizer.state[flat][moment].fill_(step)
        for parameter in self._engine.module.parameters():
            parameter.fill_(step)
        self._engine.save_checkpoint(str(disk / "run"), tag=f"step{step}")


def judge_deepspeed(disk: Path) -> str:
    """What load_checkpoint without a tag would load: the files of the tag that `latest` names."""
    latest = disk / "run/latest"
    tag = latest.read_text().strip() if latest.is_file() else ""
    if not tag:
        return "nothing: `latest` is missing or empty, so a run starts again"
    folder = disk / "run" / tag
    names = ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(RANKS))]
    values: list[torch.Tensor] = []
    for name in names:
        try:
            loaded = torch.load(folder / name, weights_only=False)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            size = (folder / name).stat().st_size if (folder / name).exists() else None
            return (
                f"unloadable: `latest` is {tag}, whose {name} {'is missing' if size is None else f'has {size} bytes'}:"
                f" {type(error).__name__}"
            )
        values += loaded["module"].values() if "module" in loaded else _optimizer_tensors(loaded["optimizer_state_dict"])
    return verdict_of(version(values))


def _optimizer_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [group[moment] for group in state["base_optimizer_state"]["state"].values() for moment in ("exp_avg", "exp_avg_sq")]
    return [*state["single_partition_of_fp32_groups"], *moments]


class DCPSession:
    """torch.distributed.checkpoint over a DTensor state: each rank has half of every tensor."""

    def __init__(self, rank: int, folder: Path, asynchronous: bool) -> None:
        join(rank, folder)
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh("cpu", (RANKS,))
        self._asynchronous = asynchronous

    def save_old(self, disk: Path) -> None:
        self._save(disk, OLD)
        os.sync()

    def save_new(self, disk: Path) -> None:
        self._save(disk, NEW)

    def _save(self, disk: Path, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.tensor import Shard, distribute_tensor

        state = {kind: distribute_tensor(torch.full((WIDTH, WIDTH), float(step)), self._mesh, [Shard(0)]) for kind in KINDS}
        folder = str(disk / f"run/step-{step}")
        if self._asynchronous:
            dcp.async_save(state, checkpoint_id=folder).result()
        else:
            dcp.save(state, checkpoint_id=folder)


KINDS = ("fp32", "exp_avg", "exp_avg_sq")


def judge_dcp(disk: Path) -> str:
    """What a trainer finds that takes the newest folder with a `.metadata`: DCP itself has no notion of the newest."""
    import torch.distributed.checkpoint as dcp

    steps = sorted(
        (int(path.name.removeprefix("step-")) for path in (disk / "run").glob("step-*") if (path / ".metadata").exists()), reverse=True
    )
    if not steps:
        return "nothing: no folder has a .metadata"
    state = {kind: torch.zeros(WIDTH, WIDTH) for kind in KINDS}
    try:
        dcp.load(state, checkpoint_id=str(disk / f"run/step-{steps[0]}"), no_dist=True)
    except Exception as error:
        return f"unloadable: step-{steps[0]} has a .metadata, but: {type(error).__name__}"
    return verdict_of(version(list(state.values())))


def peers() -> list[Subject]:
    return [
        Subject("DeepSpeed save_checkpoint", DeepSpeedSession, judge_deepspeed),
        Subject("torch DCP save", lambda rank, folder: DCPSession(rank, folder, asynchronous=False), judge_dcp),
        Subject("torch DCP async_save", lambda rank, folder: DCPSession(rank, folder, asynchronous=True), judge_dcp),
    ]
