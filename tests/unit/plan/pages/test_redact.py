"""What a bundle may not show, and what it must not hide."""

from __future__ import annotations

import json

import pytest

from lockstep.plan.pages.redact import REDACTED, Redactor, looks_secret, secret_values

TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "wandbApiKey", "db-password", "AWS_SECRET_ACCESS_KEY", "GITHUB_PAT_TOKEN", "--hf-token", "auth"]
)
def test_names_that_are_called_like_a_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize("name", ["tokens_per_second", "tokenizer", "maxTokens", "key", "monkey", "author", "pass", "NCCL_DEBUG"])
def test_names_of_a_training_that_are_none(name: str) -> None:
    assert not looks_secret(name)


@pytest.mark.parametrize(
    "text",
    [
        f"login with {TOKEN} now",
        "Authorization: Bearer abcdef123456",
        "git clone https://me:hunter2x@host/repo",
        "model s3://key:hun/ter/hunter2x@bucket/m",
        "abfs://container@account/m?sv=1&sig=hunter2x%3D",
        'export WANDB_API_KEY="0123456789abcdef0123456789abcdef01234567"',
        '{"environment": {"MY_SECRET": "hunter2x"}}',
        "token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nhunter2x\n-----END RSA PRIVATE KEY-----",
        "AKIAABCDEFGHIJKLMNOP",
    ],
)
def test_secrets_are_taken_out_of_text(text: str) -> None:
    cleaned = Redactor().text(text)
    assert REDACTED in cleaned
    for secret in (TOKEN, "abcdef123456", "hunter2x", "0123456789abcdef", "c2lnbmF0dXJl", "AKIAABCDEFGHIJKLMNOP"):
        assert secret not in cleaned


@pytest.mark.parametrize(
    "text",
    [
        "[rank 0] step 120 loss=1.8312 tokens_per_second: 18234.5 token: 123456789",
        "OSError: [Errno 28] No space left on device: '/workspace/runs/x'",
        "tokenizer: /workspace/models/base/tokenizer.json, TOKEN_FILE=/var/run/secrets/lockstep/token",
        "image docker://registry:5000/team/image@sha256:0123456789abcdef",
        '{"proxy":"http://proxy:3128","mail":"me@host"}',
        "NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
    ],
)
def test_what_helps_to_find_the_cause_stays(text: str) -> None:
    assert Redactor().text(text) == text


def test_objects_keep_their_form_and_lose_their_secrets() -> None:
    item = {
        "metadata": {"managedFields": [1], "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "b"}},
        "spec": {
            "env": [{"name": "HF_TOKEN", "value": "short"}, {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "T", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
            "args": ["train.py", "--hf-token", "hunter2x", "--epochs", "3", "--api-key=hunter2x"],
        },
    }  # fmt: skip
    assert Redactor(secret_values(item)).object(item) == {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "env": [{"name": "HF_TOKEN", "value": REDACTED}, {"name": "NCCL_DEBUG", "value": "INFO"},
                {"name": "T", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
            "args": ["train.py", "--hf-token", REDACTED, "--epochs", "3", f"--api-key={REDACTED}"],
        },
    }  # fmt: skip


def test_what_a_secret_variable_holds_is_taken_out_wherever_it_stands() -> None:
    job = {"spec": {"env": [{"name": "MY_PASSWORD", "value": "correct horse"}]}}
    redactor = Redactor(secret_values(job))
    assert redactor.text("ValueError: login of me with correct horse failed") == f"ValueError: login of me with {REDACTED} failed"


@pytest.mark.parametrize("arguments", [["train.py", "--api-key", "hunter2x-abcdef"], ["train.py", "--api-key=hunter2x-abcdef"]])
def test_what_a_secret_option_holds_is_taken_out_wherever_it_stands(arguments: list[str]) -> None:
    run = {"kind": "ConfigMap", "data": {"run.json": json.dumps({"command": arguments, "addresses": []})}}
    redactor = Redactor(secret_values(run))
    assert "hunter2x" not in json.dumps(redactor.object(run))
    assert redactor.text("refused hunter2x-abcdef of train.py") == f"refused {REDACTED} of train.py"


def test_neither_the_next_option_nor_a_path_is_a_secret_option_s_value() -> None:
    assert "".join(secret_values(["--use-auth", "--epochs", "300000", "--token-file", "/var/run/secrets/token", "--api-key"])) == ""
