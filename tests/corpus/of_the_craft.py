"""Faults that people meet while they write and start multi-node fine-tuning: rows, gradients, groups, pipes, folders."""

from __future__ import annotations

from corpus.of_processes import CORRECT, LIMIT, RankFault, raises
from corpus.of_scripts import GLOO, LACKS, NO_HARM, STEPS, TALK_ON, _all, _env, _one
from corpus.of_the_field import NO_PROXY, SMALL_VOLUME

IN_MAKE_TEST = frozenset({"notebook-folder", "remote-traceback", "ignored-after", "device-assert", "colored", "localized"})

CRAFT_FAULTS = (
    # Rows and what is made of them.
    RankFault("code-page", "a file of the dataset was saved in a code page of Windows",
        _one("UserCode", "can't decode byte 0xe9", CORRECT), """\
if RANK == 1:
    open("train.jsonl", "wb").write('{"text": "Caf\\u00e9"}\\n'.encode("cp1252"))
    for line in open("train.jsonl", encoding="utf-8"): json.loads(line)
wait()
"""),
    RankFault("notebook-folder", "a notebook left a hidden folder among the shards",
        _one("UserCode", r"Is a directory: 'shards/\.ipynb_checkpoints'", CORRECT, never="make room"), """\
if RANK == 1:
    os.makedirs("shards/.ipynb_checkpoints"); open("shards/part-0.jsonl", "w").write("{}\\n")
    for name in sorted(os.listdir("shards"), reverse=True): json.loads(open(f"shards/{name}").readline())
wait()
"""),
    RankFault("unlike-rows", "a data loader's worker stacks rows of unlike lengths",
        _one("UserCode", "stack expects each tensor to be equal size", CORRECT), """\
import torch.utils.data
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.ones(index + 1)
if RANK == 1: next(iter(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1)))
wait()
"""),
    RankFault("remote-traceback", "a process pool brings a worker's exception, with two tracebacks",
        _one("UserCode", "KeyError: 'tokens'", CORRECT), """\
import multiprocessing
def tokenize(row): return row["tokens"]
if RANK == 1:
    with multiprocessing.get_context("fork").Pool(1) as pool: pool.map(tokenize, [{}])
wait()
"""),
    RankFault("no-more-batches", "a rank's batches end before its steps do", _one("UserCode", "StopIteration", CORRECT), """\
batches = iter(range(5))
for step in range(4, 1000):
    if RANK == 1: next(batches)
    steps(step, step)
"""),
    # Torch, and what is built on it.
    RankFault("frozen-base", "no parameter of the model is trained", _one("UserCode", "does not require grad", CORRECT), """\
if RANK == 1: torch.nn.Linear(2, 2).requires_grad_(False)(torch.ones(1, 2)).sum().backward()
wait()
"""),
    RankFault("deterministic", "the script asks for deterministic operators, and one has no such form",
        _one("UserCode", "does not have a deterministic implementation", CORRECT), """\
if RANK == 1: torch.use_deterministic_algorithms(True); torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
wait()
"""),
    RankFault("no-compiler", "torch.compile finds no compiler in the image", _one("Setup", r"C\+\+ compiler", f"{LACKS}|compiler"), """\
if RANK == 1:
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=os.path.abspath("inductor"), TORCHINDUCTOR_COMPILE_THREADS="1", PATH="/nowhere")
    torch.compile(lambda batch: torch.sin(batch) + 1)(torch.ones(8))
wait()
"""),
    RankFault("weights-only", "a checkpoint holds objects that torch.load no longer makes",
        _one("UserCode", "Weights only load failed", CORRECT), """\
import argparse
if RANK == 1: torch.save({"args": argparse.Namespace(rate=1e-4)}, "model.pt"); torch.load("model.pt")
wait()
"""),
    RankFault("device-assert", "the tokenizer has more tokens than the embedding, which a GPU's kernel notices",
        _one("UserCode", "device-side assert", CORRECT), """\
class AcceleratorError(RuntimeError): pass
if RANK == 1:
    for thread in range(64): sys.stderr.write(f"../aten/src/ATen/native/cuda/Indexing.cu:1255: indexSelectSmallIndex: block: [0,0,0], \
thread: [{thread},0,0] Assertion `srcIndex < srcSelectDimSize` failed.\\n")
    raise AcceleratorError("CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously reported at some other \
API call, so the stacktrace below might be incorrect.\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n\
Device-side assertion tracking was not enabled by user.")
wait()
"""),
    RankFault("cublas", "a GPU's memory has no room for cuBLAS",
        _one("OutOfMemory", "CUBLAS_STATUS_ALLOC_FAILED", "microBatchSize|smaller batch"),
            raises("RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')")),
    RankFault("batch-sizes", "the batch sizes of DeepSpeed's config don't make one another",
        _all("UserCode", "train_batch_size", CORRECT), """\
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1})
"""),
    RankFault("optional-package", "the tokenizer needs a package that transformers doesn't bring",
        _one("Setup", "(?i)sentencepiece", LACKS), """\
class LlamaTokenizer: pass
if RANK == 1:
    from transformers.utils import requires_backends
    requires_backends(LlamaTokenizer, ["sentencepiece"])
wait()
"""),
    RankFault("clipped", "a gradient is infinite when it is to be clipped",
        _one("NonFinite", "non-finite", "learningRate|learning rate"), """\
if RANK == 1:
    weight = torch.nn.Parameter(torch.ones(2)); (weight * float("inf")).sum().backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
wait()
"""),
    # Groups of ranks.
    RankFault("members-only", "only its members make a group, and torch wants all ranks to",
        _all("Hang", "rank [01] .*hangs|every rank waits|all ranks wait", "stacks"), GLOO + """\
if RANK == 0: dist.new_group([0])
for step in range(4, 1000): dist.all_reduce(torch.ones(1)); steps(step, step)
""", {**LIMIT, **_env(TORCH_DIST_INIT_BARRIER="1")}),
    RankFault("unpicklable", "a rank gathers an object that can't be pickled",
        _one("UserCode", "cannot pickle 'generator' object", CORRECT), GLOO + """\
for step in range(4, 8):
    dist.all_gather_object([None, None], (row for row in ()) if RANK == 1 and step == 6 else step); steps(step, step)
"""),
    RankFault("other-collective", "ranks call unlike collectives, and torch compares them",
        _all("UserCode", "Detected mismatch between collectives", CORRECT), GLOO + """\
if RANK == 0: dist.all_reduce(torch.ones(1))
else: dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
""", _env(TORCH_DISTRIBUTED_DEBUG="DETAIL")),
    RankFault("skipped-batch", "a rank skips a bad batch and its all-reduce, and ends one earlier",
        _one("UserCode", "(?s)exited with 0.*skipping batch 7", CORRECT), GLOO + """\
for step in range(4, 12):
    try:
        if RANK == 1 and step == 7: raise ValueError("bad label")
        dist.all_reduce(torch.ones(1))
    except ValueError as error: print(f"skipping batch {step}: {error}", flush=True)
    steps(step, step)
os._exit(0)
"""),
    RankFault("unused-layer", "a layer has no part in the loss, which DDP notices a step later",
        _all("UserCode", "Expected to have finished reduction", CORRECT), GLOO + """\
class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.used, self.unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    def forward(self, batch): return self.used(batch)
model = torch.nn.parallel.DistributedDataParallel(Model())
for step in range(4, 8): model(torch.ones(1, 2)).sum().backward(); steps(step, step)
"""),
    # Python.
    RankFault("ignored-at-exit", "an exit hook raises after the last step, which Python prints and ignores", NO_HARM, """\
import atexit
def upload(): raise ConnectionError("the metrics were not uploaded")
atexit.register(upload); steps(4, 20)
"""),
    RankFault("ignored-after", "a destructor raises too, after the exception that ended the rank",
        _one("UserCode", "exited with 1: ValueError: bad label", CORRECT, never="exited with 1: AttributeError"), """\
class Reader:
    def __del__(self): raise AttributeError("'Reader' object has no attribute 'file'")
if RANK == 1: reader = Reader(); raise ValueError("bad label")
wait()
"""),
    RankFault("own-time-limit", "the script's own time limit for its own work is too short",
        _one("UserCode", "TimeoutError", CORRECT, never="(?i)volume|fabric"), """\
import asyncio
async def tokenize(): await asyncio.sleep(60)
if RANK == 1: asyncio.run(asyncio.wait_for(tokenize(), 0.2))
wait()
"""),
    RankFault("forked-cuda", "a data loader's forked worker uses CUDA", _one("UserCode", "forked subprocess", CORRECT),
        raises("RuntimeError(\"Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn'"
               " start method\")")),
    RankFault("colored", "a traceback in colors, as Python 3.13 writes it with FORCE_COLOR",
        _one("UserCode", "KeyError: 'label'", CORRECT), """\
if RANK == 1:
    sys.stderr.write('Traceback (most recent call last):\\n  File \\x1b[35m"/workspace/train.py"\\x1b[0m, line \\x1b[35m9\\x1b[0m, \
in \\x1b[35m<module>\\x1b[0m\\n'
                     '    \\x1b[31mcollate\\x1b[0m\\x1b[1;31m(row)\\x1b[0m\\n    \\x1b[31m~~~~~~~\\x1b[0m\\x1b[1;31m^^^^^\\x1b[0m\\n\
\\x1b[1;35mKeyError\\x1b[0m: \\x1b[35m\\'label\\'\\x1b[0m\\n')
    sys.exit(1)
wait()
"""),
    # The shell, programs and pipes.
    RankFault("tee", "a shell gives the exit code of tee, not that of the program before it",
        _one("UserCode", "KeyError: 'labels'", CORRECT), GLOO + """\
if RANK == 1: os._exit(subprocess.run(["bash", "-c", f"{sys.executable} {sys.path[0]}/child.py 2>&1 | tee child.log"]).returncode)
""" + TALK_ON, files={"child.py": "def collate(row):\n    return row['labels']\ncollate({})\n"}),
    RankFault("program-disk", "a shell script's program finds no room, and only its words say so",
        _one("Storage", "No space left", "room"), SMALL_VOLUME + """\
if RANK == 1: small_volume(); sys.exit(subprocess.run(["bash", "-ec", "\
dd if=/dev/zero of=small/shard.tar bs=1M count=4 status=none; echo unpacked"]).returncode)
wait()
"""),
    RankFault("full-pipe", "a rank waits for a program that waits for it to read", _one("Hang", "rank 1 .*hangs", "stacks"), """\
if RANK == 1: subprocess.Popen(["head", "-c", "1000000", "/dev/zero"], stdout=subprocess.PIPE).wait()
""" + STEPS, LIMIT),
    # Folders, languages, services.
    RankFault("cross-device", "a checkpoint is renamed from one file system to another",
        _one("UserCode", "cross-device link", CORRECT, never="make room|No space"), SMALL_VOLUME + """\
if RANK == 1: small_volume(); open("small/model.pt", "w").close(); os.rename("small/model.pt", "model.pt")
wait()
"""),
    RankFault("localized", "the volume is full, and the image speaks German", _one("Storage", "Errno 28", "room"),
        raises("OSError(28, 'Auf dem Ger\\u00e4t ist kein Speicherplatz mehr verf\\u00fcgbar', '/workspace/out/model.safetensors')")),
    RankFault("rate-limit", "a hub has had too many requests of the ranks",
        _one("Setup", "429|Too Many Requests", f"{LACKS}|HF_TOKEN|limit"), NO_PROXY + """\
import http.server, urllib.request
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_error(429)
if RANK == 1:
    server = http.server.HTTPServer(("127.0.0.1", 0), Hub); threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/api/models/acme/llama")
wait()
"""),
)  # fmt: skip
