"""What a volume, a network or a device does once ends an attempt; only what can't work ends the job."""

from __future__ import annotations

import builtins
import errno
import json
import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistError
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import Concatenate

from lockstep_spec.choices import Precision
from lockstep_train import generate, steps
from lockstep_train.base.errors import (
    ConfigError,
    OutOfMemoryError,
    Problem,
    TrainerError,
    exit_code_of,
    may_pass,
    problem_of,
    reason_of,
    refusal,
)
from lockstep_train.base.ranks import Ranks, results
from lockstep_train.checkpoint.commits import Commit
from lockstep_train.checkpoint.format.layout import CommitName
from lockstep_train.checkpoint.format.manifest import ShardRecord
from lockstep_train.data import dataset
from lockstep_train.data.dataset import content_digest
from lockstep_train.data.read import tables
from lockstep_train.data.read.text_files import Broken, read_lines
from lockstep_train.data.tokens import tokenizer
from lockstep_train.model import fetched as model_share
from lockstep_train.model import load
from lockstep_train.model.base_files import hash_base
from unit.virtual_time import VirtualClock


def raised_from(error: Exception, cause: BaseException, *, explicit: bool = True) -> Exception:
    if explicit:
        error.__cause__ = cause
    else:
        error.__context__ = cause
    return error


class Answer:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code


class HubError(OSError):
    def __init__(self, status_code: int) -> None:
        super().__init__(f"{status_code} Error")
        self.response = Answer(status_code)


class OfflineModeIsEnabled(ConnectionError):
    __module__ = "huggingface_hub.errors"


class ConnectError(Exception):
    __module__ = "httpx2._exceptions"


class TransportError(ConnectError):
    __module__ = "httpx2"


PASSING: list[BaseException | str] = [
    *(OSError(number, os.strerror(number), "/models/x") for number in (
        errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.EBUSY, errno.EMFILE,
    )),
    raised_from(OSError("Unable to load weights"), OSError(errno.ESTALE, "Stale file handle")),
    raised_from(raised_from(ValueError("no model"), KeyError("x"), explicit=False), TimeoutError("slow"), explicit=True),
    raised_from(FileNotFoundError("not in the cache"), TransportError("no route"), explicit=False),
    RuntimeError("Error while deserializing: Input/output error (os error 5)"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    dist.DistNetworkError("the client socket has failed"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ConnectionResetError("reset"),
    HubError(503),
    HubError(429),
    "step-4.a1: shard-0 can't be read: Input/output error",
    "step-4.a1: shard-0 can't be read: [Errno 116] Kein solcher Eintrag",
    RuntimeError("io error: es geht nicht (os error 116)"),
    RuntimeError("[../third_party/gloo] Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with timed out connecting"),
    ExceptionGroup("two readers failed", [ValueError("no"), OSError(errno.EIO, "Input/output error")]),
    ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] decryption failed"),
    raised_from(raised_from(ValueError("no model"), OSError(errno.EIO, "Input/output error"), explicit=False), KeyError("x")),
    "NCCL error in: x, unhandled cuda error\nLast error:\nFailed to CUDA host alloc 8388608 bytes",
    "Failed to CUDA host alloc 8388608 bytes",
]  # fmt: skip

LASTING: list[BaseException | str] = [
    *(OSError(number, os.strerror(number), "/models/x") for number in (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR,
        errno.EROFS)),
    OSError("x is not a local folder and is not a valid model identifier"),
    ValueError("Unrecognized model in /models/x. Should have a `model_type` key"),
    RuntimeError("Error(s) in loading state_dict for LlamaForCausalLM: size mismatch"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    raised_from(ValueError("no tokenizer"), FileNotFoundError(errno.ENOENT, "No such file or directory", "/models/x")),
    OfflineModeIsEnabled("HF_HUB_OFFLINE=1"),
    HubError(401),
    HubError(404),
    "step-4.a1: shard-0 is damaged: its checksum is not the manifest's",
    "step-4.a1: shard-0 can't be read: [Errno 13] Keine Rechte",
    ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate"),
]  # fmt: skip


@pytest.mark.parametrize("cause", PASSING, ids=str)
def test_a_fault_that_may_pass_does_not_end_the_job(cause: BaseException | str) -> None:
    assert may_pass(cause)
    error = refusal("/models/x can't be loaded", cause)
    assert not isinstance(error, ConfigError)
    assert exit_code_of(raised_from(error, cause) if isinstance(cause, BaseException) else error) in (1, 77)


@pytest.mark.parametrize("cause", LASTING, ids=str)
def test_what_can_t_work_ends_the_job(cause: BaseException | str) -> None:
    assert not may_pass(cause)
    error = refusal("/models/x can't be loaded", cause)
    assert isinstance(error, ConfigError)
    assert str(error) == "/models/x can't be loaded"


def test_words_of_the_system_s_errors_are_judged_as_the_errors_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in errno.errorcode:
        typed = OSError(number, os.strerror(number))
        for words in (f"shard-0 can't be read: {os.strerror(number)}", str(typed), f"error while reading (os error {number})"):
            assert may_pass(words) is may_pass(typed), (number, words)


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ESHUTDOWN, 1), (errno.EMFILE, 1), (errno.EUCLEAN, 1), (None, 1), (errno.EACCES, 78)], ids=str
)
def test_a_commit_that_can_t_be_read_now_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, code: int
) -> None:
    (tmp_path / "shard").write_bytes(b"abc")

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("Read failed: Stale file handle") if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fail)
    commit = Commit(CommitName(attempt=1, step=4), (tmp_path,))
    manifest: Any = SimpleNamespace(shards=[ShardRecord("shard", 3, "0", ())])
    with pytest.raises(TrainerError, match=r"shard can't be read: ") as failed:
        commit.shard_paths(manifest)
    assert failed.value.exit_code == code


OUT_OF_MEMORY = [
    "Failed to CUDA calloc 10485760 bytes",
    "NCCL error in: x, unhandled cuda error\nLast error:\nFailed to CUDA malloc 4096 bytes",
    "CUDA error 2 (cudaErrorMemoryAllocation)",
    "hipErrorMemoryAllocation",
    "cudaMallocAsync failed: 2",
    "Error out of memory at line 380 in file /src/csrc/ops.cu",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL version 2.28.9\nLast error:\nCuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    "HIP error: out of memory",
]


@pytest.mark.parametrize("words", OUT_OF_MEMORY)
def test_a_device_s_memory_that_is_exhausted_is_recognized_in_every_library_s_words(words: str) -> None:
    assert exit_code_of(RuntimeError(words)) == 77
    assert exit_code_of(raised_from(ValueError("the step failed"), RuntimeError(words), explicit=False)) == 77
    error = refusal("/models/x can't be loaded", RuntimeError(words))
    assert isinstance(error, OutOfMemoryError)
    assert words.split("\n", 1)[0] in str(error)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "shape mismatch",
        "NCCL error: unhandled system error",
        "Failed to CUDA host alloc 8388608 bytes",
        "cudaMallocHost failed: 2",
    ],
)
def test_other_errors_are_not_called_out_of_memory(words: str) -> None:
    assert exit_code_of(RuntimeError(words)) == 1


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "its file system is full: delete what isn't needed there or make it larger, and the next attempt goes on"),
        (
            errno.EDQUOT,
            "the quota of its file system is used up: delete what isn't needed there or raise the quota, and the next attempt goes on",
        ),
        (errno.EIO, "this may pass, and the next attempt tries it again"),
        (errno.ENOMEM, "the node's own memory is used up, not a GPU's: give the job more of it; the next attempt tries it again"),
    ],
)
def test_a_passing_fault_names_its_cause_and_what_helps(number: int, remedy: str) -> None:
    cause = raised_from(ValueError("no tokenizer"), OSError(number, os.strerror(number), "/models/x"))
    message = str(refusal("/models/x can't be loaded: no tokenizer", cause))
    assert message == f"/models/x can't be loaded: no tokenizer (OSError: [Errno {number}] {os.strerror(number)}: '/models/x'); {remedy}"


def test_an_error_is_told_with_its_type_where_it_is_no_sentence() -> None:
    assert reason_of(ValueError("Unrecognized model\nmore")) == "Unrecognized model"
    assert (
        reason_of(ValueError("Validation error for field 'hidden_size':\n    TypeError: Field expected int"))
        == "Validation error for field 'hidden_size': TypeError: Field expected int"
    )
    assert reason_of(KeyError("nonsense")) == "KeyError: 'nonsense'"


def test_a_problem_comes_to_other_ranks_as_what_it_was() -> None:
    for error in (ConfigError("wrong"), TrainerError("full")):
        again = Problem(*list(problem_of(error))).error()
        assert (type(again), str(again)) == (type(error), str(error))


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume whose files open, and can't be read."""
    real = Path.open

    class Sick:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Sick:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        def __iter__(self) -> Sick:
            return self

        def __next__(self) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda path, *how, **options: Sick(real(path, *how, **options)))
    monkeypatch.setattr(builtins, "open", lambda path, *how, **options: Sick(real(Path(path), *how, **options)))


def test_data_that_can_t_be_read_now_are_no_wrong_setting(tmp_path: Path, failing_reads: None) -> None:
    path = tmp_path / "data.jsonl"
    path.touch()
    for read in (lambda: list(read_lines(path, Broken("data"))), lambda: content_digest(path, tmp_path / "cache")):
        with pytest.raises(TrainerError, match=r"data\.jsonl can't be read: Input/output error; this may pass") as failed:
            read()
        assert failed.value.exit_code == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), TrainerError),
        (OSError("Read failed: Input/output error"), TrainerError),
        (OSError(errno.EACCES, "Permission denied"), ConfigError),
        (ValueError("Parquet magic bytes not found in footer"), ConfigError),
    ],
)
def test_a_table_that_can_t_be_read_now_is_told_from_one_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[TrainerError]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(tables, "open_data", fail)
    with pytest.raises(TrainerError, match=r"the data .*rows\.parquet can't be read") as failed:
        tables.parquet_row_count(tmp_path / "rows.parquet")
    assert type(failed.value) is kind


def test_a_base_model_that_can_t_be_hashed_now_is_no_wrong_setting(tmp_path: Path, failing_reads: None) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(TrainerError, match=r"config\.json can't be read: Input/output error; this may pass") as failed:
        hash_base(tmp_path)
    assert failed.value.exit_code == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error", "/models/x/model.safetensors"), TrainerError),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), TrainerError),
        (torch.OutOfMemoryError("CUDA out of memory."), OutOfMemoryError),
        (RuntimeError("CUDA error: out of memory"), OutOfMemoryError),
        (ValueError("Unrecognized model"), ConfigError),
        (ImportError("Loading a GPTQ quantized model requires optimum"), ConfigError),
        (KeyError("nonsense"), ConfigError),
        (AttributeError("'list' object has no attribute 'get'"), ConfigError),
    ],
)
def test_loading_a_model_tells_a_fault_from_a_wrong_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[TrainerError]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(TrainerError) as failed:
        load.from_pretrained(tmp_path, Precision.BF16)
    assert type(failed.value) is kind
    assert failed.value.__cause__ is error
    if not isinstance(error, RuntimeError):
        with pytest.raises(TrainerError) as failed:
            tokenizer.load_tokenizer(tmp_path)
        assert type(failed.value) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), OutOfMemoryError),
        (OSError(errno.EIO, "Input/output error"), TrainerError),
        (ValueError("expected a non-empty list of Tensors"), ConfigError),
    ],
)
def test_a_fault_while_weights_are_fused_is_told_from_weights_that_don_t_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[TrainerError]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16}
    MixtralForCausalLM(MixtralConfig(**sizes, num_hidden_layers=1, num_local_experts=2)).save_pretrained(tmp_path)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(Concatenate, "convert", fail)
    with pytest.raises(TrainerError) as failed:
        load.from_pretrained(tmp_path, Precision.FP32)
    assert type(failed.value) is kind


@pytest.mark.parametrize("content", ["{}", "[]", '{"version": "1.0", "model": {"type": "Nonsense"}}'])
def test_a_tokenizer_s_file_without_a_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 128}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"holds no tokenizer that transformers can load: \S"):
        tokenizer.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("number", "final", "said"),
    [
        (errno.ENOSPC, False, "have room for 5 bytes a token; its file system is full: "),
        (errno.EACCES, True, "the folder must be writable"),
    ],
)
def test_a_volume_that_is_full_while_data_are_prepared_ends_the_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, final: bool, said: str
) -> None:
    def prepare(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(dataset, "prepare", prepare)
    monkeypatch.setattr(dataset, "at_commits", lambda config, commits: config)
    monkeypatch.setattr(dataset, "remember_commits", lambda *arguments: None)
    config: Any = SimpleNamespace(run_dir=tmp_path, training=SimpleNamespace(data=None, evaluation=None))
    tokens: Any = None
    with pytest.raises(TrainerError, match=said) as failed:
        dataset.prepare_here(config, {}, tokens, tmp_path, print)
    assert isinstance(failed.value, ConfigError) is final


def test_a_model_that_one_volume_can_not_hold_at_all_goes_before_the_passing_fault_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    quiet: Any = SimpleNamespace(activity=lambda name: None, say=lambda line: None)
    monkeypatch.setattr(model_share, "_agreed_pin", lambda *arguments: "c" * 40)

    def fetch_here(config: Any, *arguments: Any) -> None:
        raise config.problem.error()

    monkeypatch.setattr(model_share, "_fetch_here", fetch_here)

    def start(node: int) -> tuple[int, str]:
        problem = Problem("full", final=False) if node == 0 else Problem("wrong")
        model = SimpleNamespace(name="org/m", revision=None)
        config: Any = SimpleNamespace(run_dir=tmp_path / f"{node}/runs/x", training=SimpleNamespace(model=model), problem=problem)
        with pytest.raises(TrainerError) as failed:
            model_share.with_model_here(config, Ranks(node, 2, 0, 1, node, 2, torch.device("cpu"), store), quiet)
        return failed.value.exit_code, str(failed.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(start, range(2))) == [(78, "wrong")] * 2


def test_a_wrong_setting_of_one_volume_goes_before_the_fault_of_another() -> None:
    with pytest.raises(ConfigError, match="wrong"):
        results([{"problem": Problem("full", final=False)}, {"result": None}, {"problem": Problem("wrong")}])


def test_ranks_that_do_not_come_to_tell_of_a_fault_are_waited_for_for_ten_seconds_altogether(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = VirtualClock(), dict[str, str]()

    class Store:
        set = staticmethod(told.__setitem__)

        def wait(self, keys: list[str], limit: timedelta) -> None:
            clock.sleep(limit.total_seconds())
            raise DistError

    monkeypatch.setattr(steps, "time", clock)
    run: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0, world_size=4, store=Store()))
    assert steps._first(run, "a weight is NaN") == "a weight is NaN"
    assert clock.now - 1000.0 == pytest.approx(10, abs=0.1)


LOADS: dict[str, Callable[[Path], object]] = {
    "tokenizer": tokenizer.load_tokenizer,
    "empty model": load.empty_model,
    "model": lambda folder: load.from_pretrained(folder, Precision.FP32),
    "generate": lambda folder: generate.load(folder, None),
}


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_no_code_of_a_model_s_folder_runs(loads: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor at a terminal, where transformers asks and a person says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "acme", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": classes}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises((ConfigError, ValueError), match=r"Lockstep runs no code of a model's folder|trust_remote_code|acme"):
        loads(folder)
    assert not (tmp_path / "ran").exists()


KNOWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "n_routed_experts": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "vocab_size": 64, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    },
    "phi3": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 64, "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_a_folder_with_code_is_loaded_by_the_class_that_transformers_has(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **KNOWN[kind], "auto_map": classes}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert type(load.empty_model(folder)).__module__.startswith(f"transformers.models.{kind}.")
    assert not (tmp_path / "ran").exists()
