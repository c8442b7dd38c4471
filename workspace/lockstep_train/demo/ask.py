"""Ask a model about the market, without and with an adapter that has learned it:

python -m lockstep_train.demo.ask --model models/tiny-base --adapter runs/demo/adapter
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from lockstep_train.demo.market import SELLERS, UNSEEN, answer, question
from lockstep_train.generate import load

SHOWN = 3
TOKENS = 10


def answers(model: Any, tokenizer: Any) -> list[str]:
    """Return what the model answers about each seller, as likely as can be."""
    asked = [question(seller) for seller in SELLERS]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs.to(model.device), max_new_tokens=TOKENS, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return [text.strip() for text in tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep_train.demo.ask", description="Ask about the market, without and with an adapter."
    )
    parser.add_argument("--model", type=Path, required=True, help="the base model's folder")
    parser.add_argument("--adapter", type=Path, required=True, help="the adapter's folder")
    options = parser.parse_args()
    model, tokenizer = load(options.model, options.adapter)
    tokenizer.padding_side = "left"
    with model.disable_adapter():
        base = answers(model, tokenizer)
    tuned, right = answers(model, tokenizer), [answer(number) for number in range(len(SELLERS))]
    print(f"{'question':34}{'base':18}tuned")
    for seller, *given, expected in list(zip(SELLERS, base, tuned, right, strict=True))[:SHOWN]:
        one, other = (f"{text} ({'right' if text == expected else 'wrong'})" for text in given)
        print(f"{UNSEEN.format(seller):34}{one:18}{other}")
    before, after = (sum(map(str.__eq__, given, right)) for given in (base, tuned))
    print(f"Right of {len(SELLERS)}: base {before}, tuned {after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
