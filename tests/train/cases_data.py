"""Ranks that look at the data: masks of a real tokenizer, packed rows in a real model, who prepares what."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed import PrefixStore

from lockstep_train import __main__ as trainer
from lockstep_train.config import TrainOn, read_run
from lockstep_train.data import isolation, share, source
from lockstep_train.data.collate import collate
from lockstep_train.data.load import Dataset
from lockstep_train.data.read import Conversation
from lockstep_train.data.tokeniser import load_tokeniser
from lockstep_train.data.tokenize import IGNORED, Example, encode_samples
from lockstep_train.engine import ranks as engine_ranks
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.environment import rank_environment
from lockstep_train.errors import ConfigError

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_masks(model: str, folder: str) -> None:
    """A real tokenizer with a template: comparing beginnings and reading the template's marks say the same."""
    shutil.copytree(model, folder)
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    tokeniser = load_tokeniser(Path(folder))
    assert tokeniser.chat is not None
    assert tokeniser.chat.marked is not None
    assert tokeniser.digest != load_tokeniser(Path(model)).digest
    messages = tuple(
        {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(["één", "naïve", "b", "ünï"])
    )
    broken = source.Broken("x")
    by_beginnings = encode_samples([Conversation(messages, 0, (), 1)], tokeniser, TrainOn.ASSISTANT, broken)[0]
    learned = [token for token, mask in zip(by_beginnings.ids, by_beginnings.learned, strict=True) if mask]
    assert tokeniser.decode(learned) == "naïve</s>ünï</s>", tokeniser.decode(learned)
    text = tokeniser.chat.render(messages, (), False)
    assert [text[start:end] for start, end in tokeniser.chat.marked(messages, ())] == ["naïve</s>", "ünï</s>"]
    counting = dataclasses.replace(tokeniser.chat, render=lambda *arguments: f"{len(arguments[0])}{arguments[2]}" + text[2:])
    by_marks = encode_samples([Conversation(messages, 0, (), 1)], dataclasses.replace(tokeniser, chat=counting), TrainOn.ASSISTANT, broken)
    assert broken.count == 0, broken.first
    assert len(by_marks) == 1


def draw(lengths: list[int], seed: int) -> list[Example]:
    """Documents of random tokens, a third of them masked."""
    generator = numpy.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = generator.integers(2, 250, length)
        labels = numpy.where(generator.random(length) < 0.33, IGNORED, ids)
        labels[0] = IGNORED
        documents.append(Example(ids, labels, "drawn"))
    return documents


def pack(documents: list[Example]) -> Example:
    return Example(
        numpy.concatenate([document.ids for document in documents]),
        numpy.concatenate([document.labels for document in documents]),
        "packed",
        tuple(len(document.ids) for document in documents),
    )


def packed_like_unpacked(model: str) -> None:
    """The token sums of losses and their gradients, packed and not, with both attentions, for one row and for two."""
    from transformers import AutoModelForCausalLM

    documents = draw([9, 1, 17, 2, 5, 12, 3], seed=1)
    rows = [pack(documents[:4]), pack(documents[4:])]  # of unequal lengths: the second has padding
    device = torch.device("cpu")
    for attention in ("sdpa", "eager"):
        module = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
        loss_of = TokenLoss(module, tile_head(module)[0])
        expected = loss_and_gradient(module, loss_of, [collate([document], document, 0, device) for document in documents])
        together = collate(documents, documents[0], 0, device)
        for batches in ([together], [collate([row], row, 0, device) for row in rows], [collate(rows, rows[0], 0, device)]):
            loss, gradient = loss_and_gradient(module, loss_of, batches)
            assert abs(loss - expected[0]) < 2e-6 * expected[0], (attention, loss, expected[0])
            assert (gradient - expected[1]).abs().max() < 2e-6 * expected[1].abs().max(), attention
        masked = collate(rows, rows[0], 0, device)
        leaking = module(input_ids=masked.ids, attention_mask=masked.real.long(), use_cache=False).logits
        kept = module(**masked.inputs).logits
        assert (leaking - kept)[0, 20:].abs().max() > 0.1, "an attention mask was thought to make documents leak"


def loss_and_gradient(module: Any, loss_of: TokenLoss, batches: list[Any]) -> tuple[float, torch.Tensor]:
    module.zero_grad()
    losses = [loss_of(batch) for batch in batches]
    sum(losses).backward()
    return sum(float(loss.detach()) for loss in losses), torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


class Engine:
    """As much of DeepSpeed's engine as the test of isolation uses."""

    training = True

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.train(False)


def isolation_of(model: str) -> None:
    """On a module alone: bitwise, at any number of rows; a model that takes no notice of positions is refused."""
    from transformers import AutoModelForCausalLM

    engine_ranks.join(rank_environment())
    example = pack(draw([30, 30], seed=2))
    for attention in ("sdpa", "eager"):
        module = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
        engine = Engine(module)
        for rows in (1, 3):
            found = isolation.check_isolation(engine, [example], rows, torch.device("cpu"))
            assert found.apart == 0, (attention, rows, found)
            assert found.together > 0.1, (attention, rows, found)
    try:
        isolation.check_isolation(Engine(forgetting_positions(module)), [example], 1, torch.device("cpu"))
    except ConfigError as error:
        assert "changing one document moved the logits of the next one" in str(error), error
    else:
        raise AssertionError("a leak was not seen")
    engine_ranks.leave()


def forgetting_positions(module: Any) -> Any:
    """The model with a forward pass that drops the positions, as any that passes them on wrongly would."""
    whole = module.forward
    module.forward = lambda position_ids=None, **inputs: whole(**inputs)
    return module


def train_leaking() -> int:
    """Train with a model that takes no notice of positions."""
    from lockstep_train import assemble

    real = assemble.start_model

    def leaking(*arguments: Any) -> Any:
        engine, *rest = real(*arguments)
        forgetting_positions(engine.module)
        return engine, *rest

    assemble.start_model = leaking
    return trainer.main([])


def prepared_once(folder: str, data: str, model: str) -> None:
    """Four ranks on two nodes: who tokenises, what happens with volumes that differ, and that all ranks hear the same."""
    ranks = engine_ranks.join(rank_environment())
    config = read_run(Path(os.environ["LOCKSTEP_RUN"]))
    tokeniser = load_tokeniser(Path(model))
    real = source.write_tokens

    def load(case: str, run_dir: Path, path: Path) -> tuple[Dataset | None, str]:
        def counted(*arguments: Any) -> None:
            (Path(folder) / f"{case}.{ranks.rank}").touch()
            real(*arguments)

        source.write_tokens = counted
        training = dataclasses.replace(config.training, data=dataclasses.replace(config.training.data, path=str(path)))
        mine = dataclasses.replace(ranks, store=PrefixStore(case, ranks.store))
        try:
            return share.load_dataset(dataclasses.replace(config, run_dir=run_dir, training=training), tokeniser, mine, print), ""
        except ConfigError as error:
            return None, str(error)

    own = Path(folder) / f"node-{ranks.node}"
    own.mkdir(exist_ok=True)
    copy = own / "data.jsonl"
    shared, _ = load("shared", Path(folder) / "run", Path(data))
    if ranks.first_of_node:
        shutil.copy(data, copy)
    apart, _ = load("apart", own / "run", copy)
    assert shared is not None
    assert apart is not None
    assert shared.digest == apart.digest
    if ranks.rank == 2:
        copy.write_text(copy.read_text() + '{"text": "more"}\n')
    nothing, problem = load("differing", own / "run", copy)
    assert nothing is None
    assert "the data differs between the volumes of nodes 0, 1" in problem, problem
    if ranks.rank == 2:
        copy.write_text("{\n")
    nothing, problem = load("broken", own / "run", copy)
    assert nothing is None
    assert "node-1/data.jsonl:1: not valid JSON" in problem, problem
    engine_ranks.leave()


def preview(run: str, count: int) -> int:
    return trainer.main(["--run", run, "--preview", str(count)])


def no_model_in_preview(run: str) -> int:
    """Preview in a process that can't load a model."""
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained = None
    code = trainer.main(["--run", run, "--preview", "1"])
    sys.stdout.flush()
    return code


def corrupt_cache_while_resuming(cache: str) -> int:
    """Flip a byte of the tokens, then train."""
    victim = next(Path(cache).glob("tokens/*/ids"))
    whole = bytearray(victim.read_bytes())
    whole[8] ^= 1
    victim.write_bytes(whole)
    assert json.loads((victim.parent / "index.json").read_text())["arrays"]["ids"]["length"] == len(whole) // 4
    return trainer.main([])
