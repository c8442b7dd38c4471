"""Faults that users of DeepSpeed, transformers, datasets, the hub, torch and Kubernetes report, made with those libraries themselves."""

from __future__ import annotations

from typing import Any

from corpus.of_clusters import (
    ONCE,
    ClusterFault,
    Place,
    both,
    cluster_like_local,
    delete,
    made,
    no_such_cluster,
    waits,
)  # fmt: skip
from corpus.of_processes import CORRECT, LIMIT, RankFault, raises
from corpus.of_scripts import GLOO, LACKS, STEPS, _all, _env, _one
from corpus.verdicts import Expected
from support.clusters.cluster_jobs import until

SMALL_VOLUME = """\
def small_volume():
    ctypes.CDLL(None).unshare(0x20000); os.mkdir("small")  # the mount is this process's own
    subprocess.run("mount --make-rprivate / && mount -t tmpfs -o size=1m small small", shell=True, check=True)
"""
NO_PROXY = "os.environ.update(no_proxy='*', NO_PROXY='*')\n"
DEAD_PROXY = "http://127.0.0.1:9"

FIELD_FAULTS = (
    # The hub, its caches, and what is between it and the ranks.
    RankFault("gated", "the model is gated, and the token has no access to it", _all("Setup", "gated", f"{LACKS}|HF_TOKEN"), NO_PROXY + """\
import http.server
class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(403); self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model acme/llama is restricted."); self.end_headers()
    do_HEAD = do_GET
server = http.server.HTTPServer(("127.0.0.1", 0), Hub); threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}", HF_HOME=os.path.abspath(f"hub-{RANK}"), HF_HUB_OFFLINE="0")
import huggingface_hub
huggingface_hub.hf_hub_download("acme/llama", "config.json")
"""),
    RankFault("offline", "the hub is offline, and its cache lacks the model",
        _all("Setup", "cached files|disk cache|offline", f"{LACKS}|HF_HUB_OFFLINE|HF_HOME"),
            "import transformers\ntransformers.AutoConfig.from_pretrained('acme/llama')", _env(HF_HUB_OFFLINE="1", HF_HOME="{folder}/hub")),
    RankFault("self-signed", "a company's proxy shows a certificate that the image doesn't trust",
        _one("Setup", "certificate verify failed", f"{LACKS}|CA certificate|SSL_CERT_FILE"), NO_PROXY + """\
import http.server, ssl, urllib.request
if RANK == 1:
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "1",
                    "-subj", "/CN=localhost"], check=True, capture_output=True)
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); context.load_cert_chain("cert.pem", "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlopen(f"https://localhost:{server.server_port}/acme/llama/resolve/main/config.json")
wait()
"""),
    RankFault("proxy", "HTTPS_PROXY names a proxy that isn't there", _all("Setup", "[Pp]roxy", f"{LACKS}|HTTPS_PROXY"),
        "import requests\nrequests.get('https://hub.example.com/acme/llama')",
            _env(HTTPS_PROXY=DEAD_PROXY, https_proxy=DEAD_PROXY, NO_PROXY="none.invalid", no_proxy="none.invalid")),
    RankFault("no-api-key", "the experiment tracker has no key, and there is no terminal to ask on",
        _one("Setup", "API key", f"{LACKS}|WANDB_API_KEY"), """\
if RANK == 1:
    os.environ["HOME"] = os.getcwd(); os.environ.pop("WANDB_API_KEY", None); os.environ.pop("WANDB_MODE", None)
    import wandb
    wandb.init(project="tuning")
wait()
"""),
    # Files: what is read, and where it is written to.
    RankFault("pointer-data", "a shard of the dataset is a Git LFS pointer", _one("UserCode", "magic bytes|not a parquet", CORRECT), """\
if RANK == 1:
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=os.path.abspath("hub"))
    import datasets
    open("shard.parquet", "w").write("version https://git-lfs.github.com/spec/v1\\noid sha256:" + "0" * 64 + "\\nsize 4711\\n")
    datasets.load_dataset("parquet", data_files="shard.parquet", cache_dir="cache")
wait()
"""),
    RankFault("stream-writer", "torch.save finds no room, and its C++ doesn't say why",
        _one("Storage", "write failed|failed writing|No space|iostream error", "room|full|larger|volume"),
            SMALL_VOLUME + "if RANK == 1: small_volume(); torch.save({'weight': torch.ones(1 << 20)}, 'small/model.pt')\nwait()"),
    RankFault("rust-disk", "safetensors, which is Rust, finds no room",
        _one("Storage", "os error 28|No space left", "room|full|larger"), SMALL_VOLUME + """\
if RANK == 1:
    import numpy, safetensors.numpy
    small_volume(); safetensors.numpy.save_file({"weight": numpy.ones(1 << 20)}, "small/model.safetensors")
wait()
"""),
    RankFault("worker-io", "a data loader's worker has an I/O error, and torch raises it anew without its number",
        _one("Storage", "shard-3.arrow", "volume"), """\
import torch.utils.data
class Shards(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): raise OSError(5, "Input/output error", "/datasets/shard-3.arrow")
if RANK == 1: next(iter(torch.utils.data.DataLoader(Shards(), num_workers=1)))
wait()
"""),
    RankFault("rename-race", "two ranks rename their folder to the same checkpoint",
        _one("UserCode", "Directory not empty.*checkpoint-4", CORRECT), """\
os.makedirs(f"tmp-checkpoint-{RANK}/shard")
while RANK == 1 and not os.path.exists("checkpoint-4"): time.sleep(0.05)
os.rename(f"tmp-checkpoint-{RANK}", "checkpoint-4")
wait()
"""),
    RankFault("second-attempt", "a rank is killed, and the next attempt refuses the folder that the first one made",
        _all("UserCode", "already exists and is not empty", CORRECT), """\
if os.path.exists(f"out-{RANK}"): raise ValueError(f"Output directory (out-{RANK}) already exists and is not empty. \
Use --overwrite_output_dir to overcome.")
os.makedirs(f"out-{RANK}/runs"); time.sleep(1)
if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
wait()
""", {"restart": {"maxRestarts": 1}}),
    # Foreign scripts and what they expect of the one who starts them.
    RankFault("local-rank", "the script requires the argument that an old launcher gave",
        _all("UserCode", "required: --local_rank", f"{CORRECT}|LOCAL_RANK"),
            "import argparse\nparser = argparse.ArgumentParser()\nfor name in ('local_rank', 'node_rank'):\n   "
            " parser.add_argument(f'--{name}', type=int, required=True)\nparser.parse_args()"),
    RankFault("launcher", "the script starts DeepSpeed's launcher, whose program fails",
        _one("UserCode", "KeyError: 'label_column'", CORRECT), """\
import base64
if RANK == 1:
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0]}).encode()).decode()
    sys.exit(subprocess.run([sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--master_port=29511",
                             sys.path[0] + "/child.py"]).returncode)
wait()
""", files={"child.py": "def collate(row):\n    return row['label_column']\ncollate({})\n"}),
    RankFault("state-dict", "a checkpoint doesn't fit the model, which takes torch a hundred lines to say",
        _one("UserCode", "loading state_dict|size mismatch", CORRECT), """\
def model(width): return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(50)))
if RANK == 1: model(2).load_state_dict(model(3).state_dict())
wait()
"""),
    RankFault("progress-bar", "the traceback begins on the line of a progress bar", _one("UserCode", "KeyError: 'labels'", CORRECT), """\
import tqdm
for step in tqdm.tqdm(range(4, 1000), desc="tuning"):
    if RANK == 1 and step == 20: {}["labels"]
    time.sleep(0.02)
wait()
"""),
    RankFault("broken-pipe", "the program that a rank writes to has ended",
        _one("UserCode", "Broken pipe", CORRECT, never="(?i)fabric|network"), """\
if RANK == 1:
    uploader = subprocess.Popen(["head", "-c", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    while True: uploader.stdin.write(b"x" * 4096); uploader.stdin.flush(); time.sleep(0.05)
wait()
"""),
    # Devices, native code, numbers.
    RankFault("asks-for-cuda", "the script wants CUDA, and the job has no GPUs",
        _all("Setup", "NVIDIA driver|CUDA", f"{LACKS}|gpusPerNode"), "torch.zeros(1).cuda()"),
    RankFault("device-ordinal", "the script takes RANK for the number of its GPU, which ends on the second node",
        _one("UserCode", "invalid device ordinal", f"{CORRECT}|LOCAL_RANK"), """\
class AcceleratorError(RuntimeError): pass
""" + raises("AcceleratorError('CUDA error: invalid device ordinal\\nGPU device may be out of range, do you have enough GPUs?\\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1')")),
    RankFault("undefined-symbol", "an extension was built for another torch",
        _one("Setup", "undefined symbol: _ZN3c105ErrorC2Ev", LACKS), """\
if RANK == 1:
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "flash_attn_2_cuda.so", "-xc", "-"], check=True,
                   input=b"void _ZN3c105ErrorC2Ev(void); void *PyInit_flash_attn_2_cuda(void) { _ZN3c105ErrorC2Ev(); return 0; }")
    sys.path.insert(0, os.getcwd()); import flash_attn_2_cuda
wait()
"""),
    RankFault("host-memory", "torch gets no memory of the host",
        _one("OutOfMemory", "allocate memory|not enough memory", "fewer ranks|more memory|less memory|resources"),
            "if RANK == 1: torch.empty(1 << 50)\nwait()"),
    RankFault("loss-scale", "fp16 overflows until its loss scale can't be less",
        _one("NonFinite", "loss scale already at minimum", "learningRate|learning rate|bf16"), """\
if RANK == 1:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    scaler = DynamicLossScaler(init_scale=1.0, scale_window=1000, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)
    for step in range(4, 100): scaler.update_scale(True)
wait()
"""),
    # Ranks that wait, and for whom.
    RankFault("first-rank-works", "rank 0 prepares the data for longer than the others' barrier waits",
        _one("Hang", "rank 0 .*hangs|[Tt]imed out", "stacks", rank=0), """\
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
while RANK == 0: print("Tokenizing", flush=True); time.sleep(0.5)
dist.barrier()
"""),
    RankFault("watchdog", "NCCL's watchdog aborts the rank that waits, not the one that is waited for",
        _one("Hang", "rank 1 .*hangs|Watchdog", "stacks"), """\
late = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, NumelIn=1048576, NumelOut=1048576, \
Timeout(ms)=2000) ran for 2004 milliseconds before timing out."
if RANK == 0:
    time.sleep(2)
    sys.stderr.write(f"[rank0]:[E1129 08:00:00.100200300 ProcessGroupNCCL.cpp:632] [Rank 0] {late}\\n"
                     f"terminate called after throwing an instance of 'c10::DistBackendError'\\n\
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] {late}\\n"); sys.stderr.flush()
    os.abort()
wait()
"""),
    RankFault("interface", "GLOO_SOCKET_IFNAME names an interface that the nodes don't have",
        _all("Setup", "ib9", f"{LACKS}|GLOO_SOCKET_IFNAME"), GLOO, _env(GLOO_SOCKET_IFNAME="ib9")),
    RankFault("retries", "a rank tries for ever to reach a service", _one("Hang", "(?s)rank 1 .*hangs.*refused", "stacks"), """\
while RANK == 1:
    try: socket.create_connection(("127.0.0.1", 9))
    except OSError as error: print(f"feature store: {error}; again in 0.5 s", flush=True); time.sleep(0.5)
""" + STEPS, LIMIT),
    RankFault("stale-lock", "a rank waits for the lock of a build that was killed long ago", _one("Hang", "rank 1 .*hangs", "stacks"), """\
from torch.utils.file_baton import FileBaton
if RANK == 1: open("lock", "w").close(); FileBaton("lock").wait()
""" + STEPS, LIMIT),
)  # fmt: skip


def _no_runtime_class(spec: dict[str, Any]) -> None:
    spec["gpus"] = {**(spec.get("gpus") or {}), "perNode": 1}  # only pods that ask for GPUs get the class
    spec["pod"] = {**(spec.get("pod") or {}), "runtimeClassName": "nvidia"}


def _claim_without_its_volume(place: Place) -> None:
    """As after someone deleted a PersistentVolume, finalizer and all."""
    name, volumes = f"{place.namespace}-lost", place.jobs.kind("PersistentVolume")
    share: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    spec = {**share, "capacity": {"storage": "1Gi"}, "hostPath": {"path": f"/srv/{name}"}, "persistentVolumeReclaimPolicy": "Retain"}
    volumes.create(body={"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    claim = {**share, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
    made({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "lost"}, "spec": claim})(place)
    until("the claim is bound", lambda: _phase(place) == "Bound")
    volumes.delete(name=name)
    volumes.patch(name=name, body={"metadata": {"finalizers": None}}, content_type="application/merge-patch+json")
    until("the claim has lost its volume", lambda: _phase(place) == "Lost")


def _phase(place: Place) -> str | None:
    return ((place.jobs.get("PersistentVolumeClaim", "lost") or {}).get("status") or {}).get("phase")


FIELD_CLUSTER_FAULTS = (
    ClusterFault("no-runtime-class", "the cluster file names a RuntimeClass that isn't there",
        waits("PodsRefused", "(?i)runtime_?class.*nvidia|nvidia.*runtime_?class", "[Rr]untime_?[Cc]lass"), {"gpusPerNode": 1},
            before=cluster_like_local(_no_runtime_class), after=no_such_cluster),
    ClusterFault("no-scheduler", "the job names a scheduler that isn't installed", waits("Scheduling", "volcano", "scheduler"),
        {"podTemplate": {"schedulerName": "volcano"}}, seconds=90.0),
    ClusterFault("claim-lost", "the volume of the job's claim was deleted",
        waits("ClaimNotBound", "Lost|lost its|volume .*(gone|deleted|not exist|non-existent)", "claim"),
            {"storage": {"workspaceClaimName": "lost"}}, before=_claim_without_its_volume, after=delete("PersistentVolumeClaim", "lost"),
                seconds=90.0),
    ClusterFault("all-pods-deleted", "all pods of the job are deleted at once",
        Expected("NodeLost", "was deleted|were deleted", "logs", everybody=True, state="Running"), ONCE,
            act=both(delete("Pod", "{}-0"), delete("Pod", "{}-1")), seconds=150.0),
)  # fmt: skip
