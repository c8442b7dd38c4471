"""A few steps of full fine-tuning, beside the same steps by torch's AdamW alone: what came out is written as JSON for the tests."""

from __future__ import annotations

from pathlib import Path

import cases_models as models
import rank_cases
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer

from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.runfile import rank_environment
from lockstep_train.data.tokens.encode import IGNORED
from lockstep_train.model.load import quiet_transformers
from lockstep_train.zero import zero_access

OPTIMIZATION = {"weightDecay": "0.5", "beta1": "0.7", "beta2": "0.9", "epsilon": "0.01"}
"""An epsilon as large as gradients are: an update then depends on each of them smoothly, and roundings stay roundings."""
LEARNING_RATE = 0.05


def by_torch(folder: Path, coefficient: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(before, after) in one process: transformers' model, its Trainer's decay groups, and its own loss that balances experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if name in decaying], "weight_decay": 0.5},
        {"params": [parameter for name, parameter in named if name not in decaying], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.7, 0.9), eps=0.01)
    for step in range(1, models.STEPS + 1):
        rows = models.global_batch(step)
        tokens = sum(length - 1 for length, _ in rows)
        for length, row in rows:
            ids = row[:length].unsqueeze(0)
            output = model(input_ids=ids, use_cache=False, **({"output_router_logits": True} if coefficient else {}))
            loss = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="sum", ignore_index=IGNORED)
            if coefficient:
                loss = loss + coefficient * (length - 1) * output.aux_loss
            (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: parameter.detach() for name, parameter in model.named_parameters()}


def full_steps(folder: str, stage: str, variants: dict[str, float], output: str) -> None:
    """`variants`: family → the factor of its balance loss, or 0. Of each, how far each parameter moved, and how far from there torch's own
    ended.
    """
    quiet_transformers()
    ranks = engine_ranks.join(rank_environment())
    for family, coefficient in variants.items():
        model = Path(folder) / family
        if ranks.first and not model.exists():
            models.make_family(model, family, **({"router_aux_loss_coef": coefficient} if coefficient else {}))
        dist.barrier()
        full = {"method": "Full", "learningRate": str(LEARNING_RATE), "optimization": {**OPTIMIZATION, "microBatchSize": 1}}
        engine, loss, _ = models.start(model, stage, full, ranks, accumulation=4 // ranks.world_size)
        losses = models.take_steps(engine, loss, ranks, each=1)
        masters = {name: value.cpu().clone() for name, value in zero_access.gather_masters(engine)}
        if ranks.first:
            before, after = by_torch(model, coefficient)
            rank_cases.add_result(
                output,
                family,
                {
                    "losses": losses,
                    "moved": {name: (after[name] - before[name]).norm().item() for name in after},
                    "apart": {name: (after[name] - masters[name]).norm().item() for name in after},
                },
            )
        dist.barrier()
        engine.destroy()
    engine_ranks.leave()
