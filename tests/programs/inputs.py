"""Programs of other people from PyPI's wheels, with a tiny model and data for them, and what torchrun makes of them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.checkout import ROOT

HERE = Path(__file__).resolve().parent
PREPARE = (
    "from lockstep.environments import cache_root, packages, site_packages; print(site_packages(packages('programs', cache_root(), str)))"
)
PACKAGES = "/workspace/packages"
PROJECT = "/workspace/project"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HOME": "downloads", "OMP_NUM_THREADS": "1"}
WORDS = ("user", "assistant", ":", "what", "is", "the", "sum", "of", "one", "two", "three", "four", "five", "?", "it")
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
CLIP = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
    },
    "preprocess_cfg": {"size": 32},
}


@dataclass(frozen=True)
class Program:
    """What a job runs: `script` as in its file, and the line in which rank 0 prints a loss."""

    script: Mapping[str, Any]
    loss: str
    nodes: int = 2
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0

    def losses(self, text: str) -> list[float]:
        return [float(number) for number in re.findall(self.loss, text)]

    def job(self, name: str, python_path: str = PACKAGES) -> dict[str, Any]:
        env = {"PYTHONPATH": python_path, **OFFLINE, **self.env}
        spec = {
            "nodes": self.nodes,
            "gpusPerNode": 0,
            "ranksPerNode": 1,
            "script": {**self.script, "folder": PROJECT},
            "env": [{"name": key, "value": value} for key, value in env.items()],
            "restart": {"maxRestarts": self.restarts, "backoffSeconds": 0},
        }
        return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}

    def under_torchrun(self, packages: Path, project: Path) -> str:
        """Run it in the project's folder with as many ranks on this machine as the job has, and return its output."""
        words = ["-m", self.script["module"]] if "module" in self.script else [self.script["path"]]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.nodes)]
        ended = subprocess.run(
            [*torchrun, *words, *self.script["args"]],
            cwd=project, env={**os.environ, **OFFLINE, "PYTHONPATH": str(packages)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout
        return ended.stdout


STEP = r"step \d+ loss ([\d.]+)"
SFT = (
    "--model_name_or_path model --dataset_name chat --output_dir out --use_cpu --dtype float32 --bf16 false --max_steps 30 --logging_steps"
    " 1 --save_steps 10 --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 1e-3 --report_to none"
    " --disable_tqdm true"
)
OPEN_CLIP = (
    "--model local-dir:clip --dataset-type csv --train-data pictures.csv --csv-separator , --batch-size 8 --epochs 20 --workers 0"
    " --precision fp32 --device cpu --warmup 0 --log-every-n-steps 1 --save-most-recent --save-frequency 0 --resume latest --name clip"
)
PROGRAMS = {
    "sft": Program({"module": "trl.scripts.sft", "args": SFT.split()}, r"'loss': '([\d.]+)'"),
    "open-clip": Program({"module": "open_clip_train.main", "args": OPEN_CLIP.split()}, r"Train Epoch: .* Loss: ([\d.]+)", nodes=1),
    "lightning": Program({"path": "lightning_fit.py", "args": []}, STEP),
    "accelerate": Program({"path": "accelerate_loop.py", "args": []}, STEP, env={"FAULTS": "raise,hang"}, restarts=2),
}


def packages() -> Path:
    """Folder of what the programs need beyond this environment, made once for all checkouts with this lock."""
    with (Path(tempfile.gettempdir()) / "lockstep-programs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run([sys.executable, "-c", PREPARE], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.splitlines()[-1])


def make_project(folder: Path) -> None:
    """Write a person's project: our scripts, a tiny llama, a chat of a few rows, a tiny CLIP and pictures with captions."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shutil.copytree(HERE / "project", folder, ignore=shutil.ignore_patterns("__pycache__"))
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2, **shape)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "chat").mkdir()
    (folder / "clip").mkdir()
    (folder / "clip/open_clip_config.json").write_text(json.dumps(CLIP))
    captions = ["filepath,title"]
    with (folder / "chat/train.jsonl").open("w") as chat:
        for row in range(64):
            one, other = WORDS[8 + row % 5], WORDS[8 + row * 3 % 5]
            turns = [("user", f"what is the sum of {one} {other} ?"), ("assistant", f"it is {one}")]
            chat.write(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")
            Image.new("RGB", (32, 32), (4 * row, 255 - 4 * row, 37 * row % 256)).save(folder / f"clip/{row}.png")
            captions.append(f"clip/{row}.png,what is the sum of {one} {other}")
    (folder / "pictures.csv").write_text("\n".join(captions) + "\n")
