"""Faults of an ordinary month of multi-node fine-tuning: rows, models, adapters, DeepSpeed, groups, checkpoints, images, nodes,
wrappers.
"""

from __future__ import annotations

from corpus.of_processes import CORRECT, LIMIT, RankFault, raises
from corpus.of_scripts import GLOO, LACKS, STEPS, _all, _one

WORDS = """\
import tokenizers, transformers
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
"""

MONTH_FAULTS = (
    # Rows, and what a template makes of them.
    RankFault("unlike-columns", "a file of the dataset has other columns than the first one",
        _one("UserCode", "Couldn't cast|column names don't match", CORRECT), """\
if RANK == 1:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=os.path.abspath("hub"))
    import datasets
    open("a.jsonl", "w").write('{"prompt": "a", "answer": "b"}\\n'); open("b.jsonl", "w").write('{"question": "a", "answer": "b"}\\n')
    datasets.load_dataset("json", data_files=["a.jsonl", "b.jsonl"], cache_dir="cache")
wait()
"""),
    RankFault("not-padded", "a batch is made of rows that were neither padded nor cut",
        _one("UserCode", "Unable to create tensor", CORRECT), WORDS + """\
if RANK == 1: transformers.PreTrainedTokenizerFast(tokenizer_object=words)(["a", "a b"], return_tensors="pt")
wait()
"""),
    RankFault("roles", "a row's roles don't alternate, as the model's chat template wants them to",
        _one("UserCode", "roles must alternate", CORRECT), WORDS + """\
template = "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ \
raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{{ message.content }}{% endfor %}"
rows = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
if RANK == 1: transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template).apply_chat_template(rows)
wait()
"""),
    # Models and adapters.
    RankFault("not-mounted", "a node lacks the folder of the model, which is then taken for a name on the hub",
        _one("UserCode", "Repo id must be in the form .*'/models/llama-8b/final'", CORRECT), """\
import transformers
if RANK == 1: transformers.AutoConfig.from_pretrained("/models/llama-8b/final")
wait()
"""),
    RankFault("remote-code", "the model brings code of its own, which the script doesn't allow",
        _all("UserCode", "trust_remote_code", CORRECT), """\
import transformers
os.makedirs(f"model-{RANK}"); open(f"model-{RANK}/configuration_acme.py", "w").close()
open(f"model-{RANK}/config.json", "w").write('{"model_type": "acme", "auto_map": {"AutoConfig": "configuration_acme.AcmeConfig"}}')
transformers.AutoConfig.from_pretrained(f"model-{RANK}")
"""),
    RankFault("flash-attention", "the script asks for flash attention, and the image doesn't have it",
        _all("Setup", "FlashAttention2", f"{LACKS}|flash"), """\
import transformers
config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
"""),
    RankFault("task-type", "the adapter's config has a task that peft doesn't know",
        _all("UserCode", "Invalid task type: 'CAUSAL'", CORRECT), 'import peft\npeft.LoraConfig(task_type="CAUSAL")'),
    # DeepSpeed.
    RankFault("auto-values", "a config for transformers' Trainer, with its values auto, is given to DeepSpeed itself",
        _all("UserCode", "can't multiply sequence by non-int", CORRECT), """\
from deepspeed.runtime.config import DeepSpeedConfig
DeepSpeedConfig({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}})
"""),
    RankFault("other-values", "DeepSpeed's config and the Trainer's arguments differ",
        _all("UserCode", "mismatch TrainingArguments|train_micro_batch_size_per_gpu=4", CORRECT), """\
import transformers
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
args = transformers.TrainingArguments("out", per_device_train_batch_size=8, use_cpu=True)
config = HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": 4})
config.trainer_config_process(args); config.trainer_config_finalize(args, torch.nn.Linear(2, 2), 100)
"""),
    RankFault("partitioned", "the script uses a weight that ZeRO has given to other ranks",
        _one("UserCode", "'weight' must be 2-D", CORRECT), """\
if RANK == 1: torch.nn.functional.embedding(torch.tensor([0]), torch.empty(0))
wait()
"""),
    RankFault("no-cuda-home", "DeepSpeed is to build an operator, and the image has no CUDA toolkit",
        _all("Setup", "CUDA_HOME does not exist", f"{LACKS}|CUDA"), """\
import torch.utils.cpp_extension
torch.utils.cpp_extension.CUDA_HOME = None
from deepspeed.ops.op_builder.builder import installed_cuda_version
installed_cuda_version()
"""),
    RankFault("no-libaio", "DeepSpeed is to offload to NVMe, and the image lacks libaio", _all("Setup", "async_io", f"{LACKS}|libaio"), """\
sys.stderr.write(" [WARNING]  async_io requires the dev libaio .so object and headers but these were not found.\\n\
 [WARNING]  async_io: please install the libaio-dev package with apt\\n")
raise RuntimeError("Unable to JIT load the async_io op due to it not being compatible due to hardware/software issue. None")
"""),
    # Groups of ranks, and what is between them.
    RankFault("ready-twice", "checkpointed layers share weights, and DDP looks for unused ones",
        _all("UserCode", "mark a variable ready only once", CORRECT), GLOO + """\
from torch.utils.checkpoint import checkpoint
class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(2, 2)
    def forward(self, batch): return checkpoint(self.layer, checkpoint(self.layer, batch, use_reentrant=True), use_reentrant=True)
model = torch.nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
model(torch.ones(1, 2, requires_grad=True)).sum().backward()
"""),
    RankFault("nccl-without-gpus", "the script wants NCCL, and the job has no GPUs",
        _all("Setup", "at least one CUDA device|no GPUs found", f"{LACKS}|gpusPerNode"), """\
import torch.distributed as dist
os.environ["CUDA_VISIBLE_DEVICES"] = ""; dist.init_process_group("nccl")
"""),
    RankFault("completion", "InfiniBand gives up sending to a peer", _one("Fabric", "status=12", "fabric"), """\
class DistBackendError(RuntimeError): pass
""" + raises("DistBackendError('NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, "
    "NCCL version 2.30.7\\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\\nLast error:\\n"
    "NET/IB: Got completion from peer 10.128.2.14<36541> with status=12 opcode=0 len=0 vendor err 129 (Send) "
    "localGid fe80::1 remoteGid fe80::2 hca mlx5_0')")),
    RankFault("torchrun", "the script starts torchrun, whose two ranks fail", _one("UserCode", "KeyError: 'prompt'", CORRECT), """\
if RANK == 1: sys.exit(subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                      sys.path[0] + "/child.py"]).returncode)
wait()
""", files={"child.py": "def collate(row):\n    return row['prompt']\ncollate({})\n"}),
    RankFault("worker-hangs", "a data loader's worker doesn't come back from a read", _one("Hang", "rank 1 .*hangs", "stacks"), """\
import torch.utils.data
class Shards(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): wait()
if RANK == 1: next(iter(torch.utils.data.DataLoader(Shards(), num_workers=1)))
""" + STEPS, LIMIT),
    # Checkpoints.
    RankFault("new-head", "a distributed checkpoint lacks a weight that the model has",
        _all("UserCode", "Missing key in checkpoint state_dict: head", CORRECT), GLOO + """\
import torch.distributed.checkpoint as checkpoint
checkpoint.save({"weight": torch.ones(2)}, checkpoint_id="saved"); checkpoint.load({"head": torch.ones(2)}, checkpoint_id="saved")
"""),
    RankFault("other-groups", "an optimizer's state was saved before more weights were trained",
        _one("UserCode", "doesn't match the size of optimizer's group", CORRECT), """\
model = torch.nn.Linear(2, 2)
if RANK == 1: torch.optim.AdamW(model.parameters()).load_state_dict(torch.optim.AdamW([model.weight]).state_dict())
wait()
"""),
    # Images, nodes, services, volumes.
    RankFault("old-glibc", "a package was built for a newer glibc than the image has", _one("Setup", "GLIBC_2.32. not found", LACKS),
        raises("ImportError(\"/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by"
               " /opt/venv/lib/python3.11/site-packages/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so)\")")),
    RankFault("other-driver", "a node's driver and the CUDA libraries of the image don't go together",
        _one("Setup", "Error 803|unsupported display driver", f"{LACKS}|driver"),
            raises("RuntimeError('Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling"
                   " NumCudaDevices() that might have already set an error? Error 803: system has unsupported display driver / cuda driver"
                   " combination')")),
    RankFault("threads", "a pod may have no more threads", _one("Setup", "can't start new thread", f"{LACKS}|limit|OMP_NUM_THREADS"), """\
if RANK == 1:
    for thread in range(9, 12): sys.stderr.write(f"OpenBLAS blas_thread_init: pthread_create failed for thread {thread} of 64: \
Resource temporarily unavailable\\nOpenBLAS blas_thread_init: RLIMIT_NPROC -1 current, -1 max\\n")
    raise RuntimeError("can't start new thread")
wait()
"""),
    RankFault("access-denied", "the key may not read the bucket of the dataset", _one("Setup", "AccessDenied", f"{LACKS}|credentials|AWS_"),
        "class ClientError(Exception): pass\n" + raises("ClientError('An error occurred (AccessDenied) when calling the GetObject"
                                                        " operation: Access Denied')")),
    RankFault("mount-gone", "the program that mounts the bucket has ended",
        _one("Storage", "Transport endpoint is not connected", "volume", never="(?i)fabric"),
            raises("OSError(107, 'Transport endpoint is not connected', '/datasets/shard-3.parquet')")),
    # Numbers and memory.
    RankFault("says-nan", "the script says that its loss is NaN and exits with 1",
        _one("NonFinite", "Loss is nan, stopping training", "learningRate|learning rate"), """\
if RANK == 1: print(f"Loss is {float('nan')}, stopping training", flush=True); sys.exit(1)
wait()
"""),
    RankFault("no-gradients", "the scaler is to step, and no weight has a gradient",
        _one("UserCode", "No inf checks were recorded", CORRECT, never="learning rate|learningRate"), """\
if RANK == 1:
    scaler = torch.amp.GradScaler("cpu"); scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    scaler.step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))
wait()
"""),
    RankFault("quantized", "a GPU's memory runs out in bitsandbytes' C++, which prints it and exits",
        _one("OutOfMemory", "out of memory at line", "microBatchSize|smaller batch"), """\
if RANK == 1: os.write(2, b"Error out of memory at line 449 in file /src/csrc/ops.cu\\n"); os._exit(1)
wait()
"""),
    # What is left in a script, and what is around it.
    RankFault("breakpoint", "a breakpoint was left in the script, and there is no terminal", _one("UserCode", "BdbQuit", CORRECT),
        "if RANK == 1: breakpoint()\nwait()"),
    RankFault("prepares", "the script runs another one that prepares its data, and that one fails",
        _one("UserCode", "KeyError: 'messages'", CORRECT), """\
if RANK == 1: subprocess.run([sys.executable, sys.path[0] + "/prepare.py", "--shard", "1"], check=True)
wait()
""", files={"prepare.py": "def prepare(row):\n    return row['messages']\nprepare({})\n"}),
    RankFault("hydra", "the script reads a key that its config doesn't have, as Hydra says it",
        _one("UserCode", "Key 'lora_alpha' is not in struct", CORRECT), """\
if RANK == 1:
    sys.stderr.write("Error executing job with overrides: ['model=llama-8b']\\nTraceback (most recent call last):\\n\
  File \\"/workspace/train.py\\", line 12, in main\\n    scale = cfg.model.lora_alpha / cfg.model.rank\\n"
                     "omegaconf.errors.ConfigAttributeError: Key 'lora_alpha' is not in struct\\n    full_key: model.lora_alpha\\n\
    object_type=dict\\n\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\\n")
    sys.exit(1)
wait()
"""),
)  # fmt: skip
