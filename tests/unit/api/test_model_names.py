"""A base model's name in a job: a folder, a model of the hub, or an address; and who gets the hub's token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from golden.plan_cases import CONTEXT, of_kind, pod_of, profile, trainer_of
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.cli.files import model as model_verb
from lockstep.cli.main import app
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.plan.checks.needs import references
from lockstep.plan.render.objects import render
from lockstep.plan.render.pod import variable_warnings
from lockstep.plan.render.readerpod import reader_pod, with_secrets
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import Resolved
from lockstep.plan.render.run import expected_by_preflight
from lockstep.platforms.jobs import hubconfig
from lockstep.platforms.jobs.planfacts import known_facts
from lockstep_spec.modelnames import fetched_folder, folder_name, holds_password, is_address, is_folder, is_hub_name, model_title
from support.hub_server import LFS_BYTES, TOKEN, Hub, running_hub

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
GATED = {"name": "org/m", "revision": "v1", "tokenSecret": {"name": "hub"}}


def job(model: dict[str, Any], **spec: Any) -> TrainingJob:
    training = {"model": model, "data": {"path": "/workspace/d.jsonl"}}
    return TrainingJob.model_validate(
        {
            "apiVersion": "lockstep.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "x", "namespace": "team"},
            "spec": {"training": training, **spec},
        }
    )


def resolved(model: dict[str, Any], **spec: Any) -> Resolved:
    return resolve(job(model, **spec), profile())


@pytest.mark.parametrize(
    ("name", "kind", "folder"),
    [
        ("/workspace/models/x", is_folder, None),
        ("zai-org/GLM-4.5-Air", is_hub_name, "zai-org--GLM-4.5-Air"),
        ("gpt2", is_hub_name, "gpt2"),
        ("s3://bucket/models/Qwen3-8B/", is_address, "s3--bucket--models--Qwen3-8B"),
        ("s3://bucket/a b?", is_address, "s3--bucket--a%20b%3F"),
    ],
)
def test_a_name_says_what_it_is_and_where_its_files_lie(name: str, kind: Any, folder: str | None) -> None:
    assert [check for check in (is_folder, is_hub_name, is_address) if check(name)] == [kind]
    if folder is not None:
        assert folder_name(name) == folder
        assert str(fetched_folder("/workspace/cache", name, "c0")) == f"/workspace/cache/models/{folder}/c0"


def test_a_long_name_has_a_folder_of_its_own_that_a_volume_takes(tmp_path: Path) -> None:
    long = "s3://bucket/" + "/".join(["team artifacts"] * 40)
    folders = {folder_name(long), folder_name(f"{long}/a"), folder_name(f"{long}/b")}
    assert len(folders) == 3 and all(folder.startswith("s3--bucket--team%20artifacts--") for folder in folders)
    assert folder_name(f"{long}/") == folder_name(long)
    for folder in folders:
        (tmp_path / folder).mkdir()


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("/models/a://b:c@d", False),
        ("org/m", False),
        ("s3://bucket/m@v1:2", False),
        ("gs://anonymous@bucket/m", False),
        ("abfs://container@account.dfs.core.windows.net/m", False),
        ("abfs://container@account/a?.csv", False),
        ("s3://anonymous@bucket/m", True),
        ("gs://anonymous:x@bucket/m", True),
        ("s3://host:9000/m", True),
        ("abfs://account:key/x==@container/m", True),
        ("abfs://container@account:key/m", True),
        ("abfs://container@account/m?sv=1&sig=x", True),
    ],
)
def test_an_address_may_hold_no_password(name: str, holds: bool) -> None:
    assert holds_password(name) is holds


def test_a_fetched_folder_is_called_by_the_models_name() -> None:
    assert model_title(str(fetched_folder("/workspace/cache", "org/tiny", "a" * 40))) == "org/tiny"
    assert model_title("/workspace/models/tiny") == "/workspace/models/tiny"
    assert model_title("org/tiny") == "org/tiny"


def test_the_token_reaches_ranks_from_its_secret_and_no_run_names_it() -> None:
    objects = render(resolved(GATED), CONTEXT)
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}} in trainer_of(objects)["env"]
    (frozen,) = [item for item in of_kind(objects, "ConfigMap") if "run.json" in item["data"]]
    run = json.loads(frozen["data"]["run.json"])
    assert run["training"]["model"] == {"name": "org/m", "revision": "v1", "quantization": "None"}
    assert "hub" in {reference.name for reference in references(resolved(GATED)) if reference.field == "training.model.tokenSecret"}


def test_a_token_that_is_given_twice_is_told() -> None:
    stated = job(GATED, env=[{"name": "HF_TOKEN", "value": "x"}])
    assert [notice.message for notice in variable_warnings(stated, profile())] == [
        "HF_TOKEN in the job's env has no effect: training.model.tokenSecret is used, remove one of them"
    ]
    (token,) = [v for v in trainer_of(render(resolve(stated, profile()), CONTEXT))["env"] if v["name"] == "HF_TOKEN"]
    assert "valueFrom" in token


@pytest.mark.parametrize(("name", "looked_for"), [("/workspace/m", True), ("org/m", False), ("s3://bucket/m", False)])
def test_preflight_looks_for_folders_only(name: str, looked_for: bool) -> None:
    found = expected_by_preflight(resolved({"name": name}))
    assert ("spec.training.model.name" in {path.field for path in found.paths}) is looked_for


def test_a_pod_that_fetches_has_the_jobs_secrets_and_one_that_reads_has_none() -> None:
    variables = [{"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "k"}}}]
    objects = render(resolved(GATED, env=variables, envFrom=[{"secretRef": {"name": "all"}}]), CONTEXT)
    (stateful_set,) = of_kind(objects, "StatefulSet")
    assert pod_of(objects)
    reader = reader_pod(stateful_set, 0, "abc", 60)
    (container,) = with_secrets(reader, stateful_set)["spec"]["containers"]
    assert {v["name"] for v in container["env"] if "valueFrom" in v} == {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"}
    assert container["envFrom"] == [{"secretRef": {"name": "all"}}]
    assert all("value" in v for v in reader["spec"]["containers"][0]["env"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def facts(model: dict[str, Any]) -> Any:
    return known_facts(resolved(model), None, None, None)


def test_a_plan_reads_the_sizes_of_a_hubs_model_from_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.add("org/m", {"config.json": json.dumps(CONFIG).encode()}, gated=True)
    repository.revisions["v1"] = repository.revisions["main"]
    refused = facts(GATED)
    assert refused.shape is None
    assert "org/m is a model of the hub, and http" in refused.shape_source
    assert "answers 401 when asked for its config.json; a gated or private one needs HF_TOKEN in this shell" in refused.shape_source
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    known = facts(GATED)
    assert known.shape is not None
    hub.requests.clear()
    unasked = known_facts(resolved(GATED), None, None, None, offline=True)
    assert unasked.shape is None and hub.requests == []
    assert "org/m is a model of the hub, which --offline doesn't ask: --model-config FILE" in unasked.shape_source
    assert known.shape_source == f"{hub.endpoint}/org/m/resolve/v1/config.json"


@pytest.mark.parametrize("elsewhere", ["127.0.0.1", "127.0.0.2"])
def test_a_plan_gives_its_token_to_the_hub_and_to_no_other_place(hub: Hub, monkeypatch: pytest.MonkeyPatch, elsewhere: str) -> None:
    files = {"config.json": json.dumps(CONFIG).encode().ljust(LFS_BYTES)}
    hub.add("org/m", files, gated=True)
    hub.moved["org/old"] = "org/m"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub(elsewhere) as storage:
        storage.add("org/m", files)
        hub.storage = storage.endpoint
        assert facts({"name": "org/old"}).shape is not None
        assert (hub.tokens, storage.tokens) == ([TOKEN, TOKEN], [""])


def test_a_token_is_of_one_scheme_host_and_port() -> None:
    assert hubconfig._origin("https://Hub.example/a") == hubconfig._origin("https://hub.example:443/b?c")
    assert len({hubconfig._origin(f"{place}/a") for place in ("https://hub", "http://hub", "http://hub:443", "https://other")}) == 4


@pytest.mark.parametrize("token", [f"{TOKEN}\r\n", f" {TOKEN}"])
def test_a_plan_takes_the_token_without_what_a_file_had_around_it(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    hub.add("org/m", {"config.json": json.dumps(CONFIG).encode()}, gated=True)
    monkeypatch.setenv("HF_TOKEN", token)
    assert facts({"name": "org/m"}).shape is not None


def test_a_plan_asks_without_a_token_where_it_is_empty(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/m", {"config.json": json.dumps(CONFIG).encode()})
    monkeypatch.setenv("HF_TOKEN", "\n")
    assert facts({"name": "org/m"}).shape is not None
    assert hub.tokens == [""]


@pytest.mark.parametrize("token", ["hf_secret\nword", "hf_secret\u2019word"])
def test_a_token_that_can_not_be_sent_is_not_printed(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    message = facts({"name": "org/m"}).shape_source
    assert "HF_TOKEN in this shell holds characters that no token has; set it again: --model-config FILE" in message
    assert "secret" not in message and "word" not in message


def test_a_mirrors_login_is_used_and_not_printed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/m", {"config.json": json.dumps(CONFIG).encode()})
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint.replace("://", "://me:pass%2Fword@"))
    assert facts({"name": "org/m"}).shape_source == f"{hub.endpoint}/org/m/resolve/main/config.json"
    assert hub.tokens == ["Basic bWU6cGFzcy93b3Jk"]


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("http://me:pass/word@127.0.0.1:9", "HF_ENDPOINT http://127.0.0.1:9 is not the address of a hub"),
        ("me:pass/word@127.0.0.1:9", "HF_ENDPOINT 127.0.0.1:9 is not the address of a hub"),
        ("http://me:pass/word@127.0.0.1:port", "HF_ENDPOINT http://127.0.0.1:port is not the address of a hub"),
        ("http://127.0.0.1:port", r"http://127.0.0.1:port can't be asked for its config.json (InvalidURL); check HF_ENDPOINT"),
    ],
)
def test_a_wrong_address_of_a_hub_is_told_without_its_password(monkeypatch: pytest.MonkeyPatch, endpoint: str, message: str) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert f"org/m is a model of the hub, and {message}: --model-config FILE" in facts({"name": "org/m"}).shape_source


def test_a_plan_without_the_hub_says_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert (
        "can't be asked for its config.json ([Errno 111] Connection refused): --model-config FILE" in facts({"name": "org/m"}).shape_source
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "org/m is a model of the hub, and HF_HUB_OFFLINE is set: --model-config FILE" in facts({"name": "org/m"}).shape_source


def test_a_verb_fetches_what_a_job_file_names_unless_it_is_told_otherwise() -> None:
    assert model_verb._named(None, None, resolved(GATED).job) == ("org/m", "v1")
    assert model_verb._named(None, "v2", resolved(GATED).job) == ("org/m", "v2")
    assert model_verb._named("org/other", None, resolved(GATED).job) == ("org/other", None)
    with pytest.raises(Exception, match=r"names the folder /workspace/m: there is no model to fetch"):
        model_verb._named(None, None, resolved({"name": "/workspace/m"}).job)
    with pytest.raises(Exception, match=r"--to /models/x must be a folder below /workspace"):
        model_verb._arguments("org/m", None, Path("/models/x"))
    assert model_verb._arguments("org/m", "v1", Path("/workspace/models/m")) == [
        "org/m", "--cache", "/workspace/cache", "--revision", "v1", "--to", "/workspace/models/m",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("org/m --job x --cluster /usr", "/usr is a workspace of this machine, and this is about a cluster"),
        ("org/m --cluster local", "--cluster is for -f or --job, which say whose volumes to fill"),
        ("org/m -n team --context c", "--namespace and --context are for -f or --job"),
        ("s3://bucket/m --revision v1", "revision needs the name of a model of the hub, such as org/name"),
        ("s3://key:hidden@bucket/m", "name must not contain a password or a port"),
        ("S3://key:hidden@bucket/m --job x", "name: an address with a password or a port is not valid: must be a folder"),
    ],
)
def test_an_option_that_would_do_nothing_or_a_name_that_no_job_could_have_is_refused(words: str, message: str) -> None:
    answer = CliRunner().invoke(app, ["model", "get", *words.split()])
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception).startswith(message)
    assert "hidden" not in str(answer.exception)


def test_a_revision_is_refused_where_the_jobs_model_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_verb, "_job_of_file", lambda *arguments: resolved({"name": "s3://bucket/m"}))
    with pytest.raises(ConfigError, match="revision needs the name of a model of the hub"):
        model_verb.get_model(TargetOptions(), revision="v1", files=[tmp_path / "job.yaml"])
