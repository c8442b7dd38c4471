"""Faults of an ordinary week of multi-node fine-tuning: rows, tokenizers, models, adapters, DeepSpeed's config, checkpoints, images,
services.
"""

from __future__ import annotations

from corpus.of_processes import CORRECT, LIMIT, RankFault, raises
from corpus.of_scripts import GLOO, LACKS, STEPS, _all, _one
from corpus.of_the_field import NO_PROXY

WEEK_FAULTS = (
    # Rows and tokenizers.
    RankFault("broken-line", "a line of the dataset lacks a comma",
        _one("UserCode", "JSONDecodeError: Expecting ',' delimiter", CORRECT), """\
if RANK == 1:
    open("rows.jsonl", "w").write('{"text": "a", "label": 1}\\n{"text": "b" "label": 0}\\n')
    for line in open("rows.jsonl"): json.loads(line)
wait()
"""),
    RankFault("no-split", "the dataset has no split for validation", _one("UserCode", 'Unknown split "validation"', CORRECT), """\
if RANK == 1:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=os.path.abspath("hub"))
    import datasets
    open("rows.jsonl", "w").write('{"text": "a"}\\n')
    datasets.load_dataset("json", data_files={"train": "rows.jsonl"}, split="validation", cache_dir="cache")
wait()
"""),
    RankFault("no-pad-token", "the tokenizer has no token to pad with", _one("UserCode", "does not have a padding token", CORRECT), """\
if RANK == 1:
    import tokenizers, transformers
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words)(["a", "b"], padding=True)
wait()
"""),
    RankFault("masked-labels", "metrics decode labels that are masked with -100",
        _one("UserCode", "OverflowError", CORRECT, never="learning rate|learningRate"), """\
if RANK == 1:
    import tokenizers
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).decode([0, -100])
wait()
"""),
    # Models and adapters.
    RankFault("cut-weights", "a file of weights was downloaded by half",
        _one("UserCode", "(?i)incomplete metadata|deserializ", CORRECT), """\
if RANK == 1:
    import numpy, safetensors, safetensors.numpy
    safetensors.numpy.save_file({"weight": numpy.ones(1000)}, "model.safetensors"); os.truncate("model.safetensors", 4000)
    safetensors.safe_open("model.safetensors", "np").__enter__()
wait()
"""),
    RankFault("new-model", "the model is newer than the image's transformers",
        _all("Setup", "does not recognize this architecture", f"{LACKS}|transformers"), """\
import transformers
os.makedirs(f"model-{RANK}"); open(f"model-{RANK}/config.json", "w").write('{"model_type": "gemma9"}')
transformers.AutoConfig.from_pretrained(f"model-{RANK}")
"""),
    RankFault("no-weights", "the folder of the model has its config only",
        _all("UserCode", "Error no file named model.safetensors", CORRECT, never="make room"),
            'raise OSError("Error no file named model.safetensors, or pytorch_model.bin, found in directory /models/llama-8b.")'),
    RankFault("other-modules", "LoRA is to be put into modules that this model doesn't have",
        _one("UserCode", "Target modules .*q_proj.* not found", CORRECT), """\
if RANK == 1:
    import peft
    peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), peft.LoraConfig(target_modules=["q_proj"]))
wait()
"""),
    RankFault("no-adapter", "the folder that the adapter is read from isn't there",
        _one("UserCode", "Can't find 'adapter_config.json' at '/workspace/out/checkpoint-90'", CORRECT), """\
if RANK == 1:
    import peft
    peft.PeftConfig.from_pretrained("/workspace/out/checkpoint-90")
wait()
"""),
    RankFault("old-argument", "the script gives an argument that newer libraries no longer have",
        _all("UserCode", "unexpected keyword argument 'evaluation_strategy'", CORRECT), """\
class TrainingArguments:
    def __init__(self, output_dir, *, eval_strategy="no"): self.output_dir, self.eval_strategy = output_dir, eval_strategy
TrainingArguments("out", evaluation_strategy="steps")
"""),
    # DeepSpeed.
    RankFault("zero-stage", "DeepSpeed's config asks for a stage of ZeRO that there isn't",
        _all("UserCode", "DeepSpeedZeroConfig", CORRECT), """\
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 4}})
"""),
    RankFault("other-cuda", "DeepSpeed's optimizer can't be built with the image's CUDA",
        _one("Setup", "Installed CUDA version 12.1 does not match", f"{LACKS}|CUDA"), """\
class CUDAMismatchException(Exception): pass
""" + raises("CUDAMismatchException('>- DeepSpeed Op Builder: Installed CUDA version 12.1 "
    "does not match the version torch was compiled with 13.0, "
    "unable to compile cuda/cpp extensions without a matching cuda version.')")),
    RankFault("other-world", "a checkpoint of four ranks is loaded by two", _all("UserCode", "DP world size of 4", CORRECT), """\
class ZeRORuntimeException(Exception): pass
raise ZeRORuntimeException("The checkpoint being loaded used a DP world size of 4 but the current world size is 2. \
Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.")
"""),
    # Checkpoints.
    RankFault("tied-weights", "rank 0 saves tied weights, and its peer waits at a barrier",
        _one("UserCode", "share memory", CORRECT, never="shm|shared memory", rank=0), GLOO + """\
import safetensors.torch
weight = torch.ones(2, 2)
if RANK == 0: safetensors.torch.save_file({"embed_tokens": weight, "lm_head": weight}, "model.safetensors")
dist.barrier(); wait()
"""),
    RankFault("cut-checkpoint", "the checkpoint to go on from was cut when the last job ended",
        _one("UserCode", "PytorchStreamReader", CORRECT, never="make room"), """\
if RANK == 1: torch.save({"weight": torch.ones(1000)}, "model.pt"); os.truncate("model.pt", 2000); torch.load("model.pt")
wait()
"""),
    # Ranks.
    RankFault("unlike-models", "ranks make models of unlike depth",
        _all("UserCode", "expects same model across all ranks", CORRECT), GLOO + """\
torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2 + RANK))))
wait()
"""),
    RankFault("of-slurm", "the script was written for Slurm", _all("UserCode", "KeyError: 'SLURM_PROCID'", CORRECT),
        'rank = int(os.environ["SLURM_PROCID"])'),
    RankFault("no-route", "NCCL finds no route to its peer's address", _one("Fabric", "No route to host", "fabric"), """\
class DistBackendError(RuntimeError): pass
""" + raises("DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.30.7\\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \\n"
    "Last error:\\nsocketPollConnect: connect to 10.128.2.14<36541> returned No route to host, exceeded error retry count (35)')")),
    RankFault("own-flag", "a rank waits for a file that rank 0 has written on its own node", _one("Hang", "rank 1 .*hangs", "stacks"), """\
if RANK == 0: open(f"prepared-on-node-{RANK}", "w").close()
while not os.path.exists(f"prepared-on-node-{RANK}"): time.sleep(0.2)
""" + STEPS, LIMIT),
    # Numbers.
    RankFault("rate-as-text", "YAML reads 2e-5 as a text",
        _all("UserCode", "TypeError: '<=' not supported between instances of 'float' and 'str'", CORRECT), """\
import yaml
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=yaml.safe_load("learning_rate: 2e-5")["learning_rate"])
"""),
    RankFault("half-gradients", "the adapter's weights are fp16, where the scaler wants fp32",
        _one("UserCode", "Attempting to unscale FP16 gradients", CORRECT), """\
if RANK == 1:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16)); scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.float().sum()).backward(); scaler.unscale_(torch.optim.SGD([weight]))
wait()
"""),
    RankFault("sampled", "the model's probabilities are NaN when it samples",
        _one("NonFinite", "probability tensor contains", "learningRate|learning rate"), """\
if RANK == 1: torch.multinomial(torch.tensor([float("nan"), 1.0]), 1)
wait()
"""),
    # Memory and descriptors.
    RankFault("amd", "the memory of a GPU of AMD runs out", _one("OutOfMemory", "HIP out of memory", "microBatchSize|smaller batch"), """\
class OutOfMemoryError(RuntimeError): pass
""" + raises("OutOfMemoryError('HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 191.98 GiB "
    "of which 1.10 GiB is free.')")),
    RankFault("shared-files", "data loaders share more tensors than a process may have files",
        _one("Setup", r"Too many open files \(24\)", f"{LACKS}|limit"),
            raises("RuntimeError('unable to open shared memory object </torch_4711_2906117_63> in read-write mode: Too many open files"
                   " (24)')")),
    # Images, services, files.
    RankFault("other-numpy", "a package was built for another numpy", _one("Setup", "numpy.dtype size changed", LACKS),
        raises("ValueError('numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from"
               " PyObject')")),
    RankFault("pip", "the script installs a package when it starts, and there is no index",
        _one("Setup", r"No matching distribution found for trl==99\.0", LACKS), """\
if RANK == 1: sys.exit(subprocess.run([sys.base_prefix + "/bin/python3", "-m", "pip", "install", "--no-index", "--target", "extra",
                                      "trl==99.0"]).returncode)
wait()
"""),
    RankFault("no-credentials", "the dataset lies in S3, and the pod has no credentials",
        _one("Setup", "Unable to locate credentials", f"{LACKS}|credentials|AWS_"),
            "class NoCredentialsError(Exception): pass\n" + raises("NoCredentialsError('Unable to locate credentials')")),
    RankFault("slow-hub", "a hub doesn't answer in time", _one("Setup", "Read timed out", LACKS, never="(?i)volume|fabric"), NO_PROXY + """\
if RANK == 1:
    import requests
    hub = socket.create_server(("127.0.0.1", 0))
    requests.get(f"http://127.0.0.1:{hub.getsockname()[1]}/acme/llama/resolve/main/config.json", timeout=0.5)
wait()
"""),
    RankFault("long-name", "a run is named by all of its parameters",
        _one("UserCode", "File name too long", CORRECT, never="make room"), """\
if RANK == 1: os.makedirs("-".join(f"parameter_{number}=0.00002" for number in range(20)))
wait()
"""),
    RankFault("chatter", "libraries write errors that mean nothing, before and after a rank fails",
        _one("UserCode", "exited with 1: ValueError: bad label", CORRECT), """\
import atexit
sys.stderr.write("[W1129 08:00:00.100200300 socket.cpp:767] [c10d] The client socket cannot be initialized to connect to [node-0]:29500 \
(errno: 97 - Address family not supported by protocol).\\n"
                 "E0000 00:00:1764403200.100200 4711 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory \
for plugin cuDNN when one has already been registered\\n")
atexit.register(sys.stderr.write, "[rank1]:[W1129 08:00:09.100200300 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() \
was not called before program exit, which can leak resources.\\n")
if RANK == 1: raise ValueError("bad label")
wait()
"""),
)  # fmt: skip
