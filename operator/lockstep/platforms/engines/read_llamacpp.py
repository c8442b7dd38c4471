"""Print the highest log-probabilities that llama.cpp gives at positions of prompts.

A folder has a GGUF file; a model's without one is converted first, by llama.cpp's own program. The last line is JSON: the
log-probabilities, or llama.cpp's own words if it refuses. A program of its own, which runs in llama.cpp's environment and imports nothing
of Lockstep.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = 64
ERROR = 3
"""llama.cpp's number for errors in its log."""
TYPES = {"BF16": "bf16", "FP16": "f16", "FP32": "f32"}
"""llama.cpp's names of a run's precisions."""
CONVERTER = Path(sys.prefix) / "llama.cpp" / "convert_hf_to_gguf.py"


def _model_file(folder: Path, precision: str, draft: str) -> str:
    if found := [*folder.glob("*.gguf")]:
        return str(found[0])
    file = Path(draft) / "model.gguf"
    command = [sys.executable, str(CONVERTER), str(folder), "--outfile", str(file), "--outtype", TYPES[precision]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{CONVERTER.name}: {done.stderr.strip().splitlines()[-1]}")
    return str(file)


def _read(model: str, adapter: str | None, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import numpy
    from llama_cpp import GGML_TYPE_F32, Llama

    # Keys and values in FP32: in FP16 they alone would be further off than what is compared.
    longest = max(len(prompt["tokens"]) for prompt in prompts)
    llm = Llama(model, lora_path=adapter, logits_all=True, n_ctx=longest, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, verbose=False)
    answers = []
    for prompt in prompts:
        llm.reset()
        llm.eval(prompt["tokens"])
        logits = llm.scores[prompt["positions"]].astype(numpy.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        found = logits - numpy.log(numpy.exp(logits).sum(axis=-1, keepdims=True))
        answers.append({"top": [[[int(token), float(row[token])] for token in numpy.argsort(-row)[:TOP]] for row in found]})
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    arguments = parser.parse_args()
    asked = json.loads(arguments.prompts.read_text(encoding="utf-8"))
    answer: dict[str, Any] = {"engine": "llama.cpp"}
    errors: list[str] = []
    try:
        import llama_cpp

        def listen(level: int, text: bytes, _: object) -> None:
            if level == ERROR:
                errors.append(text.decode(errors="replace").strip())

        answer["version"] = f"(llama-cpp-python {llama_cpp.__version__})"
        listener = llama_cpp.llama_log_callback(listen)  # must live as long as it is called
        llama_cpp.llama_log_set(listener, None)
        with tempfile.TemporaryDirectory(prefix="llamacpp-") as draft:
            adapter = arguments.adapter and str(next(arguments.adapter.glob("*.gguf")))
            answer["prompts"] = _read(_model_file(arguments.model, asked["precision"], draft), adapter, asked["prompts"])
    except Exception as error:
        answer["refused"] = " ".join([f"{type(error).__name__}: {error}", *errors])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
