"""A sample of what a model writes, without and with an adapter:

python -m lockstep_train.generate --model models/tiny-base --adapter runs/demo/adapter --prompt 'The value of'
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lockstep_train.errors import ConfigError, TrainerError


def complete(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """The prompt and what the model finds likeliest after it, without repeating three words in a row (a small model loves to)."""
    import torch

    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(
        **inputs,
        min_new_tokens=tokens // 2,
        max_new_tokens=tokens,
        do_sample=False,
        no_repeat_ngram_size=3,
        pad_token_id=tokenizer.eos_token_id,
    )
    return " ".join(str(tokenizer.decode(output[0], skip_special_tokens=True)).split())


def generate(folder: Path, adapter: Path | None, prompt: str, tokens: int) -> None:
    """Print one sample of the base and, with an adapter, one of both. Raises ConfigError when a folder isn't what it should be."""
    from lockstep_train.model.load import quiet_transformers

    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {folder} holds no config.json; it must be a model's folder")
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"--adapter {adapter} holds no adapter_config.json; it must be a PEFT adapter's folder")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()
    print(f"Without adapter: {complete(model, tokenizer, prompt, tokens)}")
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, str(adapter)).eval()
        print(f"With adapter:    {complete(model, tokenizer, prompt, tokens)}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.generate", description="Print a sample of a model, without and with an adapter."
    )
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, help="the adapter's folder")
    parser.add_argument("--prompt", required=True, help="how the sample begins")
    parser.add_argument("--tokens", type=int, default=40, help="how many tokens to add (default: 40)")
    options = parser.parse_args(arguments)
    try:
        generate(options.model, options.adapter, options.prompt, options.tokens)
    except TrainerError as error:
        print(f"generate: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
