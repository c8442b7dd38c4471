"""What a bundle may not show, and what it must not hide."""

from __future__ import annotations

import json

import pytest

from lockstep.plan.pages.redact import REDACTED, Redactor, is_harmless, looks_secret, secret_values

TOKEN = "hf_" + "a1B2" * 8


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "wandbApiKey",
        "db-password",
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_PAT_TOKEN",
        "--hf-token",
        "auth",
        "DB_PASS",
        "MYSQL_PASS",
        "LICENSE_KEY",
        "ENCRYPTION_KEY",
        "SSH_KEY",
        "WANDB_KEY",
        "SENTRY_DSN",
        "S3_KEY",
        "masterKey",
        "SLACK_WEBHOOK_URL",
        "WEBHOOK",
        "NGC_CLI_KEY",
        "MY_LICENSE",
        "GITLAB_PAT",
        "X-Amz-Signature",
    ],
)
def test_names_that_are_called_like_a_secret(name: str) -> None:
    assert looks_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokens_per_second",
        "tokenizer",
        "maxTokens",
        "key",
        "monkey",
        "author",
        "pass",
        "NCCL_DEBUG",
        "topologyKey",
        "public_key",
        "sort_key",
        "first_pass_seconds",
        "licensed",
    ],
)
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
        "export DB_PASS=hunter2x-hunter2x",
        "LICENSE_KEY: hunter2x-9f8e7d6c",
        "wandb: logged with 0123456789abcdef0123456789abcdef01234567",
        "posted to https://hooks.slack.com/services/T000/B000/hunter2x",
        "posted to https://x.webhook.office.com/webhookb2/hunter2x",
        "nvapi-hunter2xAbCdEf0123456789abcdef",
        "dop_v1_0123456789abcdef0123456789abcdef",
        "ya29.hunter2xa0AfH6SMBx0123",
        "https://b.s3.amazonaws.com/k?X-Amz-Signature=0123456789abcdef0123456789abcdef",
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
            "env": [{"name": "HF_TOKEN", "value": "short"}, {"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "PLAIN", "value": "x"},
                {"name": "T", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
            "args": ["train.py", "--hf-token", "hunter2x", "--epochs", "3", "--api-key=hunter2x"],
        },
    }  # fmt: skip
    assert Redactor(secret_values(item)).object(item) == {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "env": [{"name": "HF_TOKEN", "value": REDACTED}, {"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "PLAIN", "value": REDACTED},
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


@pytest.mark.parametrize("name", ["NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES", "PATH", "PYTHONPATH", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_variable_that_is_known_to_be_harmless_keeps_its_value(name: str) -> None:
    assert is_harmless(name)


@pytest.mark.parametrize(
    "name", ["FIREBASE_CREDS", "NVIDIA_API_KEY", "PGPASSFILE", "PATHS", "MY_PATH", "HF_ENDPOINT", "lower", "LOCKSTEP_TOKEN"]
)
def test_a_variable_of_another_name_loses_its_value(name: str) -> None:
    assert not is_harmless(name)


def test_variables_of_run_json_lose_their_values_too() -> None:
    run = {"environment": {"PLAIN": "hunter2x", "NCCL_DEBUG": "INFO"}, "command": ["train.py"]}
    expected = {"environment": {"PLAIN": REDACTED, "NCCL_DEBUG": "INFO"}, "command": ["train.py"]}
    assert Redactor().object({"data": {"run.json": json.dumps(run)}}) == {"data": {"run.json": json.dumps(expected)}}
    assert Redactor().object(json.dumps(run)) == json.dumps(expected)  # the file itself


def test_what_a_scanner_finds_in_a_text_is_taken_out() -> None:
    assert Redactor(scan=lambda text: ["hunter2x", "a"]).text("a hunter2x-b") == f"a {REDACTED}-b"


@pytest.mark.parametrize("depth", [100, 450, 900, 100_000])
def test_a_text_that_is_nested_without_end_is_cleaned_as_text(depth: int) -> None:
    cleaned = Redactor().object('{"a":' * depth + '"export DB_PASS=hunter2x-hunter2x"' + "}" * depth)
    assert REDACTED in cleaned and "hunter2x" not in cleaned
