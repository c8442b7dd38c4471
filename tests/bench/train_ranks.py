"""One rank of one of the two trainers that train.py compares. It stops at a gate before each step that it has no leave for.

Reads from file descriptor `gate` how many steps it may take; writes a line there each time it has taken them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch


class Gate:
    """`step` returns when the next step may begin. Between two gates lies all that a step costs: data, compute, update, log line."""

    def __init__(self, reading: int, writing: int) -> None:
        self._orders = os.fdopen(reading, "r")
        self._reports = os.fdopen(writing, "w", buffering=1)
        self._left = 0
        self.computing = 0.0
        """Seconds from the start of forward passes to the end of their backward passes, since the last report."""
        self.tokens, self.computed = 0, 0
        """Tokens of samples so far, and those with padding, that this rank has trained on."""

    def step(self) -> None:
        if self._left == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._reports.write(
                json.dumps({"computing": self.computing, "cpu": time.process_time(), "tokens": self.tokens, "computed": self.computed})
                + "\n"
            )
            self.computing = 0.0
            order = self._orders.readline()
            if not order:
                os._exit(1)  # train.py has gone
            self._left = int(order)
        self._left -= 1

    def finish(self, **result: Any) -> None:
        self._reports.write(json.dumps(result) + "\n")


def time_computing(gate: Gate) -> None:
    """Both trainers compute through DeepSpeed's engine; the loss lies between its two calls."""
    import deepspeed

    engine_class, begun = deepspeed.DeepSpeedEngine, [0.0]
    forward, backward = engine_class.forward, engine_class.backward

    def timed_forward(self: Any, *arguments: Any, **options: Any) -> Any:
        begun[0] = time.perf_counter()
        return forward(self, *arguments, **options)

    def timed_backward(self: Any, *arguments: Any, **options: Any) -> Any:
        result = backward(self, *arguments, **options)
        gate.computing += time.perf_counter() - begun[0]
        return result

    engine_class.forward, engine_class.backward = timed_forward, timed_backward


def lockstep(gate: Gate, inputs: dict[str, Any]) -> None:
    """Lockstep's trainer as it is started on a node, but for the gate."""
    from lockstep_train import __main__ as trainer
    from lockstep_train.data.tokens.encode import IGNORED
    from lockstep_train.engine.step import Stepper
    from lockstep_train.steps import Steps

    take, take_batches = Steps.take, Stepper.take

    def counted(self: Stepper, step: int, batches: Any, *arguments: Any) -> Any:
        for batch in batches:
            gate.computed += batch.ids.numel()
            gate.tokens += int(batch.real.sum()) if bool((batch.labels != IGNORED).any()) else 0
        return take_batches(self, step, batches, *arguments)

    Stepper.take = counted  # type: ignore[assignment, method-assign]

    def gated(self: Steps, step: int) -> Any:
        gate.step()
        return take(self, step)

    Steps.take = gated
    time_computing(gate)
    code = trainer.main(["--run", inputs["run"]])
    assert code == 0, code
    log = Path(json.loads(Path(inputs["run"]).read_text())["runDir"]) / "logs" / "train_log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    gate.finish(losses=[record["loss"] for record in records], mfu=records[-1]["mfu"], memory=records[-1]["peakMemoryBytes"])


def hugging_face(gate: Gate, inputs: dict[str, Any]) -> None:
    """Trainer with DeepSpeed and PEFT: the same samples in the same order, from the same first adapter."""
    import deepspeed.ops
    import peft
    import transformers

    from lockstep_train.data.sequences.batches import epoch_order
    from lockstep_train.report.speed import peak_memory_bytes

    deepspeed.ops.__compatible_ops__ = {}  # on a CPU it would compile an operator that training doesn't call
    time_computing(gate)
    arguments = transformers.TrainingArguments(**inputs["arguments"], use_cpu=inputs["device"] == "cpu")
    folder = Path(inputs["model"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), pad_token="</s>")
    texts = [json.loads(line)["text"] for line in Path(inputs["data"]).read_text().splitlines()]
    rows = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    ordered = [rows[index] for index in epoch_order(len(rows), inputs["seed"], 0)]
    dtype = {"BF16": torch.bfloat16, "FP32": torch.float32}[inputs["precision"]]
    base = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
    torch.manual_seed(inputs["seed"])
    lora = peft.LoraConfig(**inputs["lora"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)

    class Counted(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            gate.tokens += int(inputs["attention_mask"].sum())
            gate.computed += inputs["input_ids"].numel()
            return super().training_step(model, inputs, *arguments, **options)

    class InOrder(Counted):
        def _get_train_sampler(self, *arguments: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(ordered)

    class Gated(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            gate.step()

    grouped = "train_sampling_strategy" in inputs["arguments"]
    trainer = (Counted if grouped else InOrder)(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ordered],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        callbacks=[Gated()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    gate.finish(losses=losses, mfu=None, memory=peak_memory_bytes(inputs["device"] == "cuda"))


def main() -> None:
    inputs = json.loads(Path(sys.argv[2]).read_text())
    gate = Gate(int(sys.argv[3]), int(sys.argv[4]))
    {"lockstep": lockstep, "hugging-face": hugging_face, "hugging-face-grouped": hugging_face}[sys.argv[1]](gate, inputs)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # native threads must not abort a process that has reported everything


if __name__ == "__main__":
    main()
