"""A 4-layer Llama with a small BPE tokenizer, pretrained for half a minute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from lockstep_train.demo.market import Chat

VOCABULARY = 1024
SEQUENCE = 128
BATCH = 8
"""Blocks a step: one half of documentation, one of chats."""
STEPS = 450
LEARNING_RATE = 1e-2
SEED = 20
ROUNDS = 20
"""Times that each chat is in the text, in another order each time."""
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_base_model(folder: Path, texts: Sequence[str], chats: Sequence[Chat]) -> None:
    """Train tokenizer and model on `texts` and `chats` and save both for transformers. The same ones give the same files."""
    from lockstep_train.model.load import quiet_transformers

    quiet_transformers()
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_bpe(texts, chats), eos_token=END, pad_token=END, chat_template=TEMPLATE)
    end = tokenizer.convert_tokens_to_ids(END)
    torch.set_num_threads(1)  # the same numbers on any machine, and threads that wait for each other crawl on a busy one
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=1024,
            initializer_range=0.1,  # about 1/√width: learns several times faster than the usual 0.02 in so short a training
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
        )
    )
    documentation = [token for text in texts for token in [*tokenizer.encode(text), end]]
    rows = tokenizer.apply_chat_template([*chats], return_dict=False)
    order = torch.Generator().manual_seed(SEED)
    talk = [token for _ in range(ROUNDS) for number in torch.randperm(len(rows), generator=order).tolist() for token in rows[number]]
    _pretrain(model, *(torch.tensor(stream[: len(stream) // SEQUENCE * SEQUENCE]).view(-1, SEQUENCE) for stream in (documentation, talk)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bpe(texts: Sequence[str], chats: Sequence[Chat]) -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *(message["content"] for chat in [*chats] * ROUNDS for message in chat)], trainer)
    return tokenizer


def _pretrain(model: torch.nn.Module, *kinds: torch.Tensor) -> None:
    """`kinds`: blocks of token ids [n, SEQUENCE], of which each step has as many of one as of the other. AdamW with a one-cycle cosine;
    prints a line every 100 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    order = torch.Generator().manual_seed(SEED)
    model.train()
    for step in range(1, STEPS + 1):
        rate = LEARNING_RATE * min(step / 20, 0.5 * (1 + math.cos(math.pi * step / (STEPS + 1))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = torch.cat([blocks[torch.randint(len(blocks), (BATCH // len(kinds),), generator=order)] for blocks in kinds])
        logits = model(input_ids=batch, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == STEPS:
            print(f"demo: pretraining step {step}/{STEPS} | Loss: {loss.item():.4f}", flush=True)
