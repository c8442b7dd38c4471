"""Scripts that people bring, as they are: DeepSpeed's guide, FSDP2 with a distributed checkpoint, DDP. On two nodes, without a compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.in_process import lockstep
from train.runs.test_run_local import Folder

WITHOUT_COMPILER = """
import os, sys
os.environ["PATH"] = "/nowhere"  # an image without ninja and g++
"""
ENDS = """
import os
os._exit(0)  # gloo's threads live on in the model, and PyTorch aborts now and then when they outlive the interpreter
"""
"""Last lines of a script whose model holds its process group to the end, as docs/how-to/own-script.md asks for on CPUs."""
GUIDE = """
import argparse, json, os
import torch
import deepspeed
{line}

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
data = [(torch.full((8,), float(i % 3)), torch.ones(1)) for i in range(64)]
engine, optimizer, loader, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), training_data=data)
for epoch in range(args.epochs):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
    if torch.distributed.get_rank() == 0:
        print(f"Epoch {{epoch}} complete, loss {{float(loss):.3f}}", flush=True)
"""
DDP_AND_FSDP = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
replicated = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(replicated.parameters(), lr=0.1)
(replicated(torch.full((2, 4), 1.0 + dist.get_rank())).mean()).backward()
optimizer.step()
mine = replicated.module.weight.detach().clone()
first = mine.clone()
dist.broadcast(first, 0)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: same weights {torch.equal(mine, first)}", flush=True)

torch.manual_seed(0)
def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)
model, optimizer = make()
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for step in range(20):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss))
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="dcp")
again, fresh = make()
weights, moments = get_state_dict(again, fresh)
dcp.load({"model": weights, "optimizer": moments}, checkpoint_id="dcp")
set_state_dict(again, fresh, model_state_dict=weights, optim_state_dict=moments)
with torch.no_grad():
    same = torch.equal(again(x), model(x))
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: learned {losses[-1] < losses[0] / 2}, loaded {same}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
TORCHRUN_INSIDE = """
import os, subprocess, sys
e = os.environ
sys.exit(subprocess.call([sys.executable, "-m", "torch.distributed.run", "--nnodes", e["NNODES"], "--node-rank", e["NODE_RANK"],
    "--nproc-per-node", "2", "--master-addr", e["MASTER_ADDR"], "--master-port", e["MASTER_PORT"], "shows.py", *sys.argv[1:]]))
"""
SHOWS = """
import json, os, sys
words = json.dumps(sys.argv[1:], ensure_ascii=False)
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has {words}\\n")  # (ranks share a pipe: in one piece)
"""
SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(local, per_node):
    rank = int(os.environ["NODE_RANK"]) * per_node + local
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["NNODES"]) * per_node)
    seen = torch.ones(1)
    dist.all_reduce(seen)
    print(f"rank {rank} sees {int(seen)}", flush=True)
    if rank == 3:
        raise ValueError("bad sample 17")
    dist.barrier()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2, args=(2,))
"""
ABORTS = """
import ctypes
library = ctypes.CDLL("libstdc++.so.6")
ctypes.CDLL(None).{how}
"""


def guide(tmp_path: Path, nodes: int, *, changed: bool) -> Folder:
    """The script of DeepSpeed's guides with its configuration, for a CPU rank on each node; `changed`: with the two lines."""
    folder = Folder(tmp_path)
    line = "deepspeed.ops.__compatible_ops__ = {}" if changed else ""
    parameters = {"lr": 0.05, **({"torch_adam": True} if changed else {})}
    configuration = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": parameters},
        "zero_optimization": {"stage": 2},
    }
    (folder.root / "workspace/ds_config.json").write_text(json.dumps(configuration))
    folder.job(WITHOUT_COMPILER + GUIDE.format(line=line) + ENDS, nodes=nodes)
    job = (folder.root / "job.yaml").read_text()
    (folder.root / "job.yaml").write_text(job.replace("path: script.py", "path: script.py\n    args: [--deepspeed_config, ds_config.json]"))
    return folder


def test_a_deepspeed_script_without_a_compiler_is_told_the_two_lines_and_runs_with_them(tmp_path: Path) -> None:
    for name in ("refused", "changed"):
        (tmp_path / name).mkdir()
    folder = guide(tmp_path / "refused", 1, changed=False)
    refused = folder.run()
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "Unable to JIT load the deepspeed_shm_comm op" in folder.end()["message"]
    assert (
        'put `deepspeed.ops.__compatible_ops__ = {}` after the script\'s `import deepspeed`, and `"torch_adam": true`'
        in folder.end()["message"]
    )
    done = guide(tmp_path / "changed", 2, changed=True).run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Epoch 1 complete" in done.stdout


def test_ddp_and_fsdp2_with_a_distributed_checkpoint_run_as_they_are(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.job(DDP_AND_FSDP + ENDS)
    done = folder.run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert folder.end()["state"] == "Complete"
    second = (tmp_path / "workspace/runs/x/logs/node-1.log").read_text()
    for rank, log in enumerate((done.stdout, second)):
        assert f"rank {rank} of 2: same weights True" in log
        assert f"rank {rank} of 2: learned True, loaded True" in log
    assert len(list((tmp_path / "workspace/dcp").glob("*.distcp"))) == 2


def test_a_script_that_starts_torchrun_passes_its_arguments_on_as_they_are(tmp_path: Path) -> None:
    words = ["--name", "two words", "it's", '"x"', "$HOME", "*.py", "", '{"a": [1]}', "é"]
    folder = Folder(tmp_path)
    (tmp_path / "workspace/shows.py").write_text(SHOWS)
    folder.job(TORCHRUN_INSIDE, nodes=1)
    done = folder.run("--set", f"script.args={json.dumps(words)}")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 has {json.dumps(words, ensure_ascii=False)}" in done.stdout


@pytest.mark.long
def test_a_process_that_a_rank_spawned_is_quoted_when_it_fails(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.job(SPAWNS)
    done = folder.run()
    assert done.returncode == 1, done.stdout + done.stderr
    assert all(f"rank {rank} sees 4" in done.stdout for rank in range(2))
    assert (folder.end()["failure"]["node"], folder.end()["failure"]["exception"]) == (1, "ValueError")
    assert "bad sample 17" in folder.end()["message"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("__cxa_atexit(library._ZSt9terminatev, None, None)", True),  # what a thread that outlives the interpreter ends in
        ("_Exit(library._ZSt9terminatev())", False),
    ],
)
def test_a_script_that_pytorch_aborts_behind_its_last_line_is_told_how_to_end(tmp_path: Path, how: str, told: bool) -> None:
    folder = Folder(tmp_path)
    folder.job(ABORTS.format(how=how), nodes=1)
    assert lockstep(*folder.words()).returncode == 1
    message = folder.end()["message"]
    assert "was ended by SIGABRT" in message
    assert ("End the script with `os._exit(0)`" in message) is told
