"""Fork vLLM's reader for each line of arguments, since its imports take most of a cell's time: PYTHON forks.py read_vllm.py"""

import importlib
import json
import os
import runpy
import sys

program = sys.argv[1]
os.environ |= runpy.run_path(program)["VARIABLES"]
for name in (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.lora.request",
    "vllm.model_executor.models.llama",
):
    importlib.import_module(name)
print("ready", flush=True)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        sys.argv = [program, *json.loads(line)]
        runpy.run_path(program, run_name="__main__")
    os.waitpid(child, 0)
    print("done", flush=True)
