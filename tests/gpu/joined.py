"""What computes joined documents on this device, and whether it gives what each document alone gives: `rank.py --joined FILE` writes it as
JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from cases_data import Engine, draw, loss_and_gradient
from cases_models import VOCABULARY, configuration

from lockstep_spec.choices import Batches, Precision
from lockstep_train.base.ranks import join
from lockstep_train.base.runfile import rank_environment
from lockstep_train.data.sequences.batches import collate
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.model.attention import AMPERE, FLEX, VARLEN, by_document, choose_attention
from lockstep_train.model.isolation import isolation_problem

FAMILIES = {"llama": VARLEN, "gemma2": FLEX, "gpt_oss": FLEX}
"""Family → the kernel for its scores: plain ones; with caps and windows; with sinks and windows."""
LENGTHS = [40, 130, 7, 79]


def measure(family: str, device: torch.device, precision: Precision) -> dict[str, Any]:
    """Measure a family. `reason`: why its kernel may be unused; '' where it must be used."""
    from transformers import AutoModelForCausalLM

    settings = configuration(family)
    if family == "gpt_oss":
        settings.num_experts_per_tok = settings.num_local_experts  # else rounding may choose another expert
    torch.manual_seed(1)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(settings, dtype=torch.float32 if precision is Precision.FP32 else torch.bfloat16)
    documents = draw(LENGTHS, seed=1, vocabulary=VOCABULARY)
    loss_of = TokenLoss(module, tile_head(module)[0])
    alone = loss_and_gradient(module, loss_of, [collate([each], each, 0, device) for each in documents])
    choose_attention(module, precision, device)
    problem = isolation_problem(Engine(module), documents, 1, device)
    joined = loss_and_gradient(module, loss_of, [collate(documents, documents[0], 0, device, Batches.TOKENS)])
    own = by_document(module)
    away = float((joined[1] - alone[1]).float().norm() / alone[1].float().norm())
    used = own.words() == FAMILIES[family] and not own.refused
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < AMPERE
    reason = own.refused.get(FLEX, "") if FAMILIES[family] == FLEX else "a GPU before Ampere has none" * old
    measured = {"words": own.words(), "refused": own.refused, "used": used, "reason": reason}
    return {"problem": problem, **measured, "loss": abs(joined[0] / alone[0] - 1), "gradient": away}


def main(path: Path) -> int:
    ranks = join(rank_environment())
    precision = Precision.BF16 if ranks.device.type == "cuda" else Precision.FP32
    path.write_text(json.dumps({family: measure(family, ranks.device, precision) for family in FAMILIES}))
    return 0
