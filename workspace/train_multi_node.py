"""A DeepSpeed script to start from: any number of nodes, with GPUs or without. Put your model and your data where the two comments say.

Every rank runs this file in torchrun's environment; nothing of Lockstep is imported. It also runs under plain torchrun:
torchrun --nproc-per-node 2 train_multi_node.py --epochs 3
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAVED = 75
"""Exit code of a run that was asked to stop, and has saved."""
VOCABULARY, LENGTH = 64, 16


def main() -> int:
    options = parse()
    stop = StopRequest()
    device = join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same first weights on every rank
    model = make_model()
    done = 0 if options.fresh else load(model, options.checkpoint)
    settings = json.loads(options.deepspeed_config.read_text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.pop("learning_rate", 1e-3))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=settings)
    sampler: DistributedSampler[Any] = DistributedSampler(data := make_data(options.samples), num_replicas=world_size, rank=rank, seed=0)
    loader = DataLoader(data, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    steps = options.epochs * len(loader) // engine.gradient_accumulation_steps()
    seen = done * engine.gradient_accumulation_steps()  # micro-batches that an earlier start has learned from
    if rank == 0:
        print(f"{world_size} ranks over {dist.get_backend()}, {steps} steps" + (f", from step {done}" if done else ""), flush=True)
    report = Report()
    if done >= steps and rank == 0:
        print(
            f"Nothing is left to do: {options.checkpoint} is of step {done} of {steps}; --fresh trains anew, more --epochs train on",
            flush=True,
        )
    for epoch in range(seen // len(loader), options.epochs):
        sampler.set_epoch(epoch)
        for number, (tokens,) in enumerate(loader, epoch * len(loader)):
            if number < seen:
                continue
            loss = loss_of(engine, tokens.to(device))
            engine.backward(loss)
            engine.step()
            if not engine.is_gradient_accumulation_boundary():
                continue
            done += 1
            value = mean(loss.detach())
            if rank == 0:
                print(f"Step {done}/{steps} | Loss: {value:.4f}", flush=True)
                report.step(done, steps, value)
            if stop.agreed(device):
                save(engine, options.checkpoint, done)
                return SAVED
    save(engine, options.checkpoint, done)
    return 0


def make_model() -> torch.nn.Module:
    """YOUR MODEL HERE. This one learns to say the tokens that it was given."""
    layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 64),
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.nn.Linear(64, VOCABULARY),
    )


def make_data(samples: int) -> TensorDataset:
    """YOUR DATA HERE. Made from a seed, so that every rank has the same; the sampler gives each its part."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator))


def loss_of(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of one micro-batch; `tokens`: [batch, LENGTH]."""
    return torch.nn.functional.cross_entropy(engine(tokens).float().flatten(0, 1), tokens.flatten())


def join() -> torch.device:
    """Meet the other ranks: NCCL where there are GPUs, else gloo. RANK, WORLD_SIZE and MASTER_ADDR are in the environment."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.ops.__compatible_ops__ = {}  # DeepSpeed would compile an operator that training on CPUs doesn't use
    dist.init_process_group("gloo")
    return torch.device("cpu")


def mean(value: torch.Tensor) -> float:
    """Mean over all ranks. Every rank must call it: a collective that only some call waits for ever."""
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


class StopRequest:
    """SIGTERM means: save and stop. It may reach one rank a step earlier than the next one, so the ranks agree first."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def agreed(self, device: torch.device) -> bool:
        vote = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote)


def save(engine: Any, path: Path, step: int) -> None:
    """Save the weights, by rank 0, under a temporary name first: a kill leaves the old file or the new one. (The optimizer starts
    afresh.)
    """
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):  # does nothing under ZeRO-1 and 2
        weights = {name: value.detach().float().cpu().contiguous() for name, value in engine.module.state_dict().items()}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.touch()
        usual = draft.stat().st_mode
        save_file(weights, draft, metadata={"step": str(step)})
        draft.chmod(usual)  # safetensors writes for its own user only, and the pods of another run may have another one
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
        print(f"CHECKPOINT step {step} | {path}", flush=True)
    dist.barrier()


def load(model: torch.nn.Module, path: Path) -> int:
    """Load the saved weights into the model; their step, or 0 when there are none."""
    if not path.exists():
        return 0
    from safetensors import safe_open

    model.load_state_dict(load_file(path))
    with safe_open(path, framework="pt") as file:
        return int(file.metadata()["step"])


class Report:
    """Reports of steps for `kubectl get tj`; without Lockstep, nothing."""

    def __init__(self) -> None:
        self._socket = None
        if address := os.environ.get("LOCKSTEP_REPORT_SOCKET"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.connect(address)

    def step(self, step: int, steps: int, loss: float) -> None:
        if self._socket is not None:
            event = {"rank": 0, "event": "step", "step": step, "totalSteps": steps, "metrics": {"loss": f"{loss:.4f}"}}
            self._socket.send(json.dumps(event).encode())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--deepspeed_config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    parser.add_argument("--fresh", action="store_true", help="train anew, whatever was saved")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train_multi_node.safetensors"))
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    raise SystemExit(code)
