"""Ranks that look at the data: masks of a real tokenizer, packed rows in a real model, who prepares what."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import transformers
from cases_models import MOE, SHARED, configuration
from rank_cases import with_own_keys
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_mask
from transformers import AutoModelForCausalLM
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from lockstep_spec.choices import Batches, DataFormat, Precision, TrainOn
from lockstep_train import __main__ as trainer
from lockstep_train import assemble
from lockstep_train.base import ranks as engine_ranks
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.runfile import rank_environment, read_run
from lockstep_train.data import dataset as datasets
from lockstep_train.data.dataset import Dataset
from lockstep_train.data.read.files import whole_files
from lockstep_train.data.read.records import Conversation
from lockstep_train.data.sequences.batches import collate
from lockstep_train.data.tokens import pool, source
from lockstep_train.data.tokens.encode import IGNORED, Example, encode_samples
from lockstep_train.data.tokens.tokenizer import load_tokenizer
from lockstep_train.data.tokens.turns import TemplateChoice
from lockstep_train.engine.loss import TokenLoss, tile_head
from lockstep_train.model import attention, isolation
from lockstep_train.model.attention import by_document, choose_attention
from support.rounding import SAME_LOSS, TINY, gradient_roundings, tolerance

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}{{ message.content"
    " }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{%"
    " endif %}"
)


def chat_masks(model: str, folder: str) -> None:
    """A real tokenizer with a template: comparing beginnings and reading the template's marks say the same."""
    shutil.copytree(model, folder)
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(Path(folder))
    assert tokenizer.chat.marked is not None
    assert tokenizer.digest != load_tokenizer(Path(model)).digest
    messages = tuple(
        {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(["één", "naïve", "b", "ünï"])
    )
    broken = source.Broken("x")
    by_beginnings = encode_samples([Conversation(messages, 0, (), 1)], tokenizer, TrainOn.ASSISTANT, broken)[0]
    learned = [token for token, mask in zip(by_beginnings.ids, by_beginnings.learned, strict=True) if mask]
    assert tokenizer.decode(learned) == "naïve</s>ünï</s>", tokenizer.decode(learned)
    text = tokenizer.chat.render(messages, (), False, {})
    assert [text[start:end] for start, end in tokenizer.chat.marked(messages, (), {})] == ["naïve</s>", "ünï</s>"]
    counting = dataclasses.replace(tokenizer.chat, render=lambda *arguments: f"{len(arguments[0])}{arguments[2]}" + text[2:])
    by_marks = encode_samples([Conversation(messages, 0, (), 1)], dataclasses.replace(tokenizer, chat=counting), TrainOn.ASSISTANT, broken)
    assert broken.count == 0, broken.first
    assert len(by_marks) == 1


def several_processes(model: str, folder: str) -> None:
    """Real processes give the tokens of one; also when they are killed meanwhile, and none of them is left."""
    shutil.copytree(model, f"{folder}/model")
    (Path(folder) / "own.jinja").write_text(TEMPLATE.replace("<assistant>", "{{ opening }}"))
    tokenizer = load_tokenizer(Path(folder) / "model", TemplateChoice(f"{folder}/own.jinja", {"opening": "<assistant>"}))
    records = [
        {"messages": [{"role": ("user", "assistant")[turn % 2], "content": f"{number} {turn}"} for turn in range(4)]}
        for number in range(200)
    ]
    path = Path(folder) / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source.BATCH, pool.AFTER_SECONDS, pool.usable_cores = 20, 0.0, lambda: 3
    started: list[pool.Process] = []

    class Noted(pool.Process):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

        def encode(self, line: bytes) -> Any:
            if killing:
                self._process.kill()
            return super().encode(line)

    pool.Process = Noted
    found = []
    for case, killing, processes in (("alone", False, 1), ("together", False, 2), ("killed", True, 2)):
        pool.PROCESSES = processes
        told: list[str] = []
        asked = source.DataSource(str(path), "digest", False, 1.0, whole_files([path], DataFormat.JSONL).samples)
        found.append(source.tokens_of(asked, tokenizer, TrainOn.ASSISTANT, Path(folder) / case, told.append).digest(*source.TYPES))
        assert ("goes on alone" in " ".join(told)) == killing, told
        assert len(started) == {"alone": 0, "together": 2, "killed": 4}[case]
        assert all(process._process.returncode is not None for process in started)
    assert len(set(found)) == 1, found


def own_template(model: str, folder: str) -> None:
    """A template of the run's own goes before the tokenizer's, its variables reach it, a row's go before them, and what is wrong with it is
    reported.
    """
    shutil.copytree(model, f"{folder}/model")
    (Path(folder) / "model/chat_template.jinja").write_text("{{ raise_exception('the tokenizer\\'s own') }}")
    own = Path(folder) / "own.jinja"
    own.write_text(
        TEMPLATE.replace("<{{ message.role }}>", "<{{ mark }}{{ strftime_now('%Y') }}{{ message.role }}>").replace(
            "<assistant>", "<{{ mark }}2025assistant>"
        )
    )

    def learned(choice: TemplateChoice, **fields: Any) -> tuple[str, str]:
        tokenizer = load_tokenizer(Path(folder) / "model", choice)
        broken = source.Broken("x")
        messages = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})
        (sample,) = encode_samples([Conversation(messages, 0, (), 1, **fields)], tokenizer, TrainOn.ASSISTANT, broken)
        return tokenizer.decode(sample.ids), tokenizer.decode(
            [token for token, mask in zip(sample.ids, sample.learned, strict=True) if mask]
        )

    choice = TemplateChoice(str(own), {"mark": "M"})
    assert learned(choice) == ("<s><M2025user>q<M2025assistant>a</s>", "a</s>"), learned(choice)
    assert learned(choice, options={"mark": "N"})[0] == "<s><N2025user>q<N2025assistant>a</s>"
    digests = {load_tokenizer(Path(folder) / "model", one).digest for one in (choice, TemplateChoice(str(own)), TemplateChoice())}
    assert len(digests) == 3
    own.write_text(own.read_text() + " ")
    assert load_tokenizer(Path(folder) / "model", choice).digest not in digests
    for content, problem in (
        ("a\n{% if %}", ":2 is not a Jinja template: "),
        (" \n", " is empty; it must be"),
        (b"\xff", " is not UTF-8; it must be"),
        (None, " can't be read: No such file"),
    ):
        own.unlink()
        if content is not None:
            own.write_bytes(content if isinstance(content, bytes) else content.encode())
        try:
            load_tokenizer(Path(folder) / "model", choice)
        except ConfigError as error:
            assert str(error).startswith(f"training.data.chatTemplate {own}{problem}"), error
        else:
            raise AssertionError(f"{content!r} was taken")


def rows_of_the_embedding(model: str, folder: str) -> int:
    """Train with a model whose config.json tells of fewer rows than the tokenizer has tokens."""
    tokenizer = load_tokenizer(Path(model))
    assert tokenizer.vocabulary == 258
    shutil.copytree(model, folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 60}))
    return trainer.main([])


def draw(lengths: list[int], seed: int, vocabulary: int = 250) -> list[Example]:
    """Documents of random tokens, a third of them masked."""
    generator = numpy.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = generator.integers(2, vocabulary, length)
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


def packed_like_unpacked(model: str, attention: str, apart: bool) -> None:
    """The token sums of losses and their gradients, packed, joined and not, for one row and for two. `apart`: document by document; else by
    a mask.
    """
    documents = draw([9, 1, 17, 2, 5, 12, 3], seed=1)
    rows = [pack(documents[:4]), pack(documents[4:])]  # of unequal lengths: the second has padding
    device = torch.device("cpu")
    module = AutoModelForCausalLM.from_pretrained(model, attn_implementation=attention)
    if apart:
        choose_attention(module, Precision.FP32, device)
        assert by_document(module) is not None
    loss_of = TokenLoss(module, tile_head(module)[0])
    expected = loss_and_gradient(module, loss_of, [collate([document], document, 0, device) for document in documents])
    tokens = sum(len(document.ids) for document in documents)
    tolerated = tolerance(gradient_roundings(TINY, tokens), results=len(expected[1]))
    unpacked = collate(documents, documents[0], 0, device)
    joined = [collate(part, documents[0], 0, device, Batches.TOKENS) for part in (documents[:5], documents[5:], [])]
    assert [batch.ids.numel() for batch in joined] == [
        34,
        15,
        9,
    ], "nothing is padded, and what has no sample computes one of which it learns nothing"
    for batches in ([unpacked], [collate([row], row, 0, device) for row in rows], [collate(rows, rows[0], 0, device)], joined):
        loss, gradient = loss_and_gradient(module, loss_of, batches)
        assert abs(loss - expected[0]) < SAME_LOSS * expected[0], (loss, expected[0])
        assert greatest_difference(gradient, expected[1]) < tolerated
    masked = collate(rows, rows[0], 0, device)
    leaking = dataclasses.replace(masked, documents=None)
    _, gradient = loss_and_gradient(module, loss_of, [leaking])
    assert greatest_difference(gradient, expected[1]) > 100 * tolerated, "equal gradients say nothing"
    together = module(input_ids=masked.ids, attention_mask=masked.real.long(), use_cache=False).logits
    kept_apart = module(**masked.inputs).logits
    assert (together - kept_apart)[0, 20:].abs().max() > 0.1, "an attention mask was thought to make documents leak"


def greatest_difference(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the greatest of all."""
    return float((mine - expected).abs().max() / expected.abs().max())


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


def problem_of(module: Any, example: Example, rows: int = 1) -> str:
    return isolation.isolation_problem(Engine(module), [example], rows, torch.device("cpu"))


def isolation_of(model: str) -> None:
    """On a module alone, at any number of rows; a model that takes no notice of documents is refused."""
    engine_ranks.join(rank_environment())
    example = pack(draw([30, 30], seed=2))
    for kind in ("sdpa", "eager"):
        module = AutoModelForCausalLM.from_pretrained(model, attn_implementation=kind)
        for chosen in (False, True):
            if chosen:
                choose_attention(module, Precision.FP32, torch.device("cpu"))
            isolation.LARGEST_SHARE = 0.0 if chosen else 1e-5  # a document by itself is the same to the bit
            for rows in (1, 3):
                assert problem_of(module, example, rows) == "", (kind, chosen, rows)
    isolation.LARGEST_SHARE = 1e-3
    assert problem_of(Nested(module), example) == ""
    assert "changing one document moved the logits of the next one" in problem_of(forgetting_bounds(module), example)
    lost: BaseException = OSError(errno.EIO, "Input/output error")
    for problem, cause, is_raised in (
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer."), None, False),
        (RuntimeError("Connection closed by peer"), None, True),
        (RuntimeError("flash_attn: CUDA error: an illegal memory access was encountered"), None, True),
        (ValueError("this layer takes no position_ids"), None, False),
        (TypeError("forward() got an unexpected keyword argument 'document_lengths'"), None, False),
        (ValueError("the layer failed"), lost, True),
    ):
        problem.__cause__ = cause
        try:
            words = problem_of(failing(module, problem), example)
        except Exception as error:
            assert is_raised and error is problem, error
        else:
            assert not is_raised and words == str(problem), "the error was lost"
    engine_ranks.leave()


def isolation_on_unlike_ranks(model: str) -> None:
    """What one rank's GPU can't compute, no rank joins."""
    ranks = engine_ranks.join(rank_environment())
    module = AutoModelForCausalLM.from_pretrained(model)
    if not ranks.first:
        failing(module, NotImplementedError("no kernel image is available"))
    words = problem_of(module, pack(draw([30, 30], seed=2)))
    assert words == ("another rank can't compute them" if ranks.first else "no kernel image is available"), words
    engine_ranks.leave()


class Nested(torch.nn.Module):
    """A model whose config has the text's settings inside of others."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text
        self.config = SimpleNamespace(get_text_config=lambda: text.config)

    def forward(self, **inputs: Any) -> Any:
        return self.text(**inputs)


def failing(module: Any, problem: Exception) -> Any:
    def forward(**inputs: Any) -> None:
        raise problem

    module.forward = forward
    return module


def forgetting_bounds(module: Any) -> Any:
    """Return the model with a forward pass that drops what it is told of documents, as any that passes it on wrongly would."""
    whole = module.forward
    module.forward = lambda position_ids=None, document_lengths=None, **inputs: whole(**inputs)
    return module


def isolation_of_families() -> None:
    """Models with experts are accepted; refused are recurrent layers, which see all that came before, and layers whose limits only a mask
    shows.
    """
    engine_ranks.join(rank_environment())
    documents = [dataclasses.replace(document, ids=document.ids % 90) for document in draw([30, 30], seed=2)]
    for family in ("glm4_moe", "qwen3_moe", "mixtral"):
        torch.manual_seed(0)
        assert problem_of(transformers.AutoModelForCausalLM.from_config(configuration(family)), pack(documents), 2) == ""
    chunks = transformers.AutoModelForCausalLM.from_config(configuration("llama4_text"))
    choose_attention(chunks, Precision.FP32, torch.device("cpu"))
    assert "in a way that only a mask of whole rows shows" in problem_of(chunks, pack(documents))
    recurrent = transformers.Qwen3NextConfig(
        **SHARED | MOE,
        num_experts=6,
        shared_expert_intermediate_size=20,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )
    words = problem_of(transformers.AutoModelForCausalLM.from_config(recurrent), pack(documents))
    assert "changing one document moved" in words or "can't keep packed sequences apart" in words, words
    engine_ranks.leave()


def boundaries() -> None:
    """Flash attention gets the bounds of documents as transformers itself would find it in one flat row."""
    rows = [pack(draw([4, 1, 7], seed=1)), pack(draw([9], seed=2))]
    for chosen in ([rows[0]], rows):
        inputs = collate(chosen, rows[0], 0, torch.device("cpu")).inputs
        (query, key), (longest, _) = prepare_fa_kwargs_from_position_ids(inputs["position_ids"].reshape(1, -1))
        assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == query.tolist() == key.tolist()
        assert inputs["max_length_q"] == inputs["max_length_k"] == int(longest)
        assert inputs["cu_seq_lens_q"].dtype == torch.int32
        assert "attention_mask" not in inputs
        assert inputs["use_cache"] is False
    assert inputs["cu_seq_lens_q"].tolist() == [0, 4, 5, 12, 21, 24]  # the padding of the second row is a document


def varlen_of(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: Any,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute what torch's pages say that varlen_attn computes of [tokens, heads, head]."""
    assert cu_seq_q is cu_seq_k, "else cuDNN takes no causal attention"
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert window_size[1] == 0
    shared = query.shape[1] // key.shape[1] if enable_gqa else 1
    outputs = []
    for start, end in pairwise(cu_seq_q.tolist()):
        one, other, seen = (each[start:end].transpose(0, 1) for each in (query, key, value))
        other, seen = other.repeat_interleave(shared, 0), seen.repeat_interleave(shared, 0)
        assert one.shape == other.shape == seen.shape
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)
        near = (back >= 0) & (back <= (window_size[0] if window_size[0] >= 0 else end))
        outputs.append(((one @ other.mT * scale).masked_fill(~near, -torch.inf).softmax(-1) @ seen).transpose(0, 1))
    return torch.cat(outputs)


def flex_of(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, softcap: Any = None, s_aux: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Compute what transformers' flex attention computes of [batch, heads, sequence, head], which has no backward pass on CPUs."""
    rows, heads, width, _size = query.shape
    seen = create_mask(mask.mask_mod, rows, 1, width, width, device="cpu")
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * scaling
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -torch.inf)
    sinks = torch.empty(rows, heads, width, 0) if s_aux is None else s_aux.reshape(1, -1, 1, 1).expand(rows, heads, width, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :width]
    return (weights @ value).transpose(1, 2), None


def attention_kernels(families: dict[str, str]) -> None:
    """Kernels that only GPUs have get what they need to give what the model's own attention gives, and are used where they do."""
    engine_ranks.join(rank_environment())
    flex = transformers.AttentionInterface._global_mapping
    real, real_flex = varlen.varlen_attn, flex["flex_attention"]
    signature = inspect.signature(real)
    calls: list[str] = []

    def counted(kernel: Any, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            calls.append(name)
            if name == attention.VARLEN:
                signature.bind(*given, **options)
            return kernel(*given, **options)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    cpu = torch.device("cpu")
    attention.kernels_of = lambda *_: [attention.VARLEN, attention.FLEX]  # type: ignore[assignment]
    documents = [dataclasses.replace(each, ids=each.ids % 90, labels=each.labels % 90) for each in draw([9, 30, 2, 17], seed=4)]
    batch = [collate(documents, documents[0], 0, cpu, Batches.TOKENS)]
    for family, kernel in families.items():
        name = {"varlen": attention.VARLEN, "flex": attention.FLEX}[kernel]
        torch.manual_seed(1)
        module = transformers.AutoModelForCausalLM.from_config(configuration(family))
        loss_of = TokenLoss(module, tile_head(module)[0])
        choose_attention(module, Precision.BF16, cpu)
        expected = loss_and_gradient(module, loss_of, batch)
        assert not calls, "a kernel that was never tried was used"
        varlen.varlen_attn, flex["flex_attention"] = counted(varlen_of, attention.VARLEN), counted(flex_of, attention.FLEX)
        assert not (words := problem_of(module, pack(documents))), (family, words)
        chosen = by_document(module)
        assert (chosen.words(), chosen.refused) == (name, {}), family
        calls.clear()
        loss, gradient = loss_and_gradient(module, loss_of, batch)
        assert calls == [name] * module.config.get_text_config().num_hidden_layers, (family, calls)
        assert abs(loss - expected[0]) < SAME_LOSS * expected[0], (family, loss, expected[0])
        assert greatest_difference(gradient, expected[1]) < 1e-5, family

        wrong = without_gradients if family == "llama" else shifted
        varlen.varlen_attn, flex["flex_attention"] = counted(wrong(varlen_of), attention.VARLEN), real_flex
        refused = "Attention sinks cannot be run on CPU" if family == "gpt_oss" else "its results differ by"
        if family != "gemma2":  # which would be compiled
            module.set_attn_implementation(chosen.original)
            choose_attention(module, Precision.BF16, cpu)
            assert not (words := problem_of(module, pack(documents))), (family, words)
            chosen = by_document(module)
            assert chosen.words() == "attention to each by itself"
            assert refused in chosen.refused[name], (family, chosen.refused)
            assert loss_and_gradient(module, loss_of, batch)[0] == expected[0]
        varlen.varlen_attn = real
        calls.clear()
    engine_ranks.leave()


def without_gradients(kernel: Any) -> Any:
    """Return the kernel with outputs and gradients that are no numbers."""
    return lambda *given, **options: kernel(*given, **options).sqrt().square()


def shifted(kernel: Any) -> Any:
    """Return a kernel that sees one token too few of what is before each."""
    return lambda *given, window_size, **options: kernel(*given, window_size=(3, 0), **options)


def attention_choice() -> None:
    """Kernels that a device may have; cuDNN first on Hopper and newer."""
    capability = (9, 0)
    torch.cuda.get_device_capability = lambda device: capability  # type: ignore[assignment]
    gpu, both = torch.device("cuda"), [attention.VARLEN, attention.FLEX]
    assert attention.kernels_of(Precision.BF16, gpu) == attention.kernels_of(Precision.FP16, gpu) == both
    assert attention.kernels_of(Precision.FP32, gpu) == [attention.FLEX]
    assert attention.kernels_of(Precision.BF16, torch.device("cpu")) == []
    order = torch._C._get_sdp_priority_order()
    with attention.cudnn_first(gpu):
        assert torch._C._get_sdp_priority_order()[0] == torch._C._SDPBackend.CUDNN_ATTENTION.value
    assert torch._C._get_sdp_priority_order() == order
    capability = (8, 0)
    assert attention.kernels_of(Precision.BF16, gpu) == both
    for device in (gpu, torch.device("cpu")):
        with attention.cudnn_first(device):
            assert torch._C._get_sdp_priority_order() == order
    capability = (7, 5)
    assert attention.kernels_of(Precision.BF16, gpu) == [attention.FLEX]  # Turing


def train_leaking() -> int:
    """Train with a model that takes no notice of documents."""
    real = assemble.start_model

    def leaking(*arguments: Any, **options: Any) -> Any:
        engine, *rest = real(*arguments, **options)
        forgetting_bounds(engine.module)
        return engine, *rest

    assemble.start_model = leaking
    return trainer.main([])


def prepared_once(folder: str, data: str, model: str) -> None:
    """Four ranks on two nodes: who tokenizes, what happens with volumes that differ, and that all ranks hear the same."""
    ranks = engine_ranks.join(rank_environment())
    config = read_run(Path(os.environ["LOCKSTEP_RUN"]))
    tokenizer = load_tokenizer(Path(model))
    real = source.write_tokens

    def load(case: str, run_dir: Path, path: Path) -> tuple[Dataset | None, str]:
        def counted(*arguments: Any) -> None:
            (Path(folder) / f"{case}.{ranks.rank}").touch()
            real(*arguments)

        source.write_tokens = counted
        training = dataclasses.replace(config.training, data=dataclasses.replace(config.training.data, path=str(path)))
        mine = with_own_keys(ranks, case)
        try:
            return datasets.load_dataset(dataclasses.replace(config, run_dir=run_dir, training=training), tokenizer, mine, print), ""
        except ConfigError as error:
            return None, str(error)

    own = Path(folder) / f"node-{ranks.node}"
    own.mkdir(exist_ok=True)
    copy = own / "data.jsonl"
    shared, _ = load("shared", Path(folder) / "run", Path(data))
    if ranks.first_of_node:
        shutil.copy(data, copy)
    apart, _ = load("apart", own / "run", copy)
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
