"""A plain script of Hugging Face's Trainer under `script:`: its steps are reported without a line changed in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from train.runs.test_run_local import Folder

SCRIPT = """
import time, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

class Slow(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        time.sleep(0.3)

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(64)]
arguments = TrainingArguments(output_dir="out", max_steps=40, per_device_train_batch_size=1, logging_steps=1, save_strategy="no",
    use_cpu=True,
                              disable_tqdm=True)
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[Slow()]).train()
"""


def test_a_hugging_face_script_shows_its_step_and_loss_unchanged(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.job(SCRIPT, nodes=1)
    done = folder.run()
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line for line in done.stdout.splitlines() if re.search(r"Step \d+/40", line)]
    assert len(steps) >= 2, done.stdout
    last, end = (int(re.search(r"Step (\d+)/40", line)[1]) for line in steps[-2:])  # type: ignore[index]
    assert 0 < last < end == 40  # Trainer's last word has no step: it stands for those that were left
    assert "loss: " in steps[0]
    account = json.loads((tmp_path / "workspace/runs/x/gang/goodput.json").read_text())["goodput"]
    assert account["furthestStep"] == end
    assert account["spent"]["train"] > 1000
