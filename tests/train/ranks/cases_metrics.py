"""Ranks whose metrics meet servers that don't answer well."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from cases_models import EYES
from torch.utils.flop_counter import FlopCounterMode

from lockstep_train import __main__ as trainer
from lockstep_train.engine import step as engine_step
from lockstep_train.report import reporter
from lockstep_train.report.flops import count_flops
from lockstep_train.report.sinks.sink import MetricsSink, Point


def train_against_server(answer: str, document: str) -> int:
    """Train with MLflow at a server on this machine that hangs or answers 500. `document`: the run file, without its address."""
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer == "hang":
                released.wait()
                return
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = json.loads(Path(document).read_text())
    address = f"http://anna:hunter2@127.0.0.1:{server.server_port}"
    run["training"]["reportTo"] = ["MLflow"]
    os.environ["MLFLOW_TRACKING_URI"] = address
    mine = Path(document).with_suffix(f".{os.environ['RANK']}.json")
    mine.write_text(json.dumps(run))
    os.environ["LOCKSTEP_RUN"] = str(mine)
    reporter.DRAIN_SECONDS["Done"] = 1.0
    try:
        return trainer.main([])
    finally:
        released.set()


def die_after(step: int) -> int:
    """Train; rank 0 is killed while the step after `step` is computed, when all that was measured until then has arrived everywhere."""
    real, deliver, put = engine_step.seed_micro_batch, MetricsSink._deliver, MetricsSink.put
    counts = {"put": 0, "delivered": 0}

    def counted_put(sink: MetricsSink, point: Point) -> None:
        counts["put"] += 1
        put(sink, point)

    def counted_deliver(sink: MetricsSink, batch: list[Point]) -> bool:
        arrived = deliver(sink, batch)
        counts["delivered"] += len(batch)
        return arrived

    def seed(seed: int, at: int, micro: int, on: int) -> None:
        if at == step + 1 and on == 0 and os.environ["RANK"] == "0":
            while counts["delivered"] < counts["put"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        real(seed, at, micro, on)

    engine_step.seed_micro_batch, MetricsSink._deliver, MetricsSink.put = seed, counted_deliver, counted_put
    return trainer.main([])


def count_operations(output: str) -> None:
    """For tiny random models with an adapter: what is counted for a step, and what torch's own counter sees in it."""
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
    configs = {
        "llama": transformers.LlamaConfig(**shape, intermediate_size=80),
        "llama-tied": transformers.LlamaConfig(**shape, intermediate_size=80, tie_word_embeddings=True),
        "qwen3-moe": transformers.Qwen3MoeConfig(**shape, **experts, intermediate_size=80, num_experts=8),
        "mixtral": transformers.MixtralConfig(**shape, intermediate_size=48, num_experts_per_tok=2, num_local_experts=4),
        "glm4-moe": transformers.Glm4MoeConfig(**shape, **experts, intermediate_size=80, n_routed_experts=8),
        "gemma3": transformers.Gemma3Config(text_config=shape | {"intermediate_size": 80}, vision_config=EYES, mm_tokens_per_image=4),
    }
    found = {}
    for name, config in configs.items():
        torch.manual_seed(0)
        # torch's counter doesn't know grouped_mm
        model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
        counted = count_flops(model)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.zeros(1, 24, dtype=torch.long), use_cache=False).logits.sum().backward()
        found[name] = {
            "needed": counted.needed([24]),
            "done": counter.get_total_flops(),
            "width": sum(layers.width for layers in counted.attention),
        }
    Path(output).write_text(json.dumps(found))
