"""What people write in a job file, and what they are told when it can't be right."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lockstep.api.errors import ConfigError
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.files.yamlnodes import plain_value
from lockstep.api.job import TrainingJob
from support.checkout import ROOT
from support.crd_rule_cases import AMOUNTS, NO_AMOUNTS, NUMBERS, job, training

SAMPLE = (ROOT / "manifests/samples/trainingjob.yaml").read_text()
JOB = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: x}
spec:
  nodes: 2
  training:
    model: {name: /m}
    data: {path: /d}
    zeroStage: Stage2
"""
OTHER = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n"


def told(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_job_file(text, "j.yaml")
    return str(caught.value).splitlines()


def changed(old: str, new: str) -> str:
    assert old in JOB
    return JOB.replace(old, new)


def test_yaml_and_json_give_the_same_job() -> None:
    as_json = json.dumps(yaml.safe_load(SAMPLE), indent="\t")
    assert parse_job_file(as_json, "j.json") == parse_job_file(SAMPLE, "j.yaml")


def test_the_one_job_among_other_objects_is_read() -> None:
    assert parse_job_file(f"{OTHER}---\n{JOB}---\n", "j.yaml").metadata.name == "x"


def test_a_job_with_its_status_is_read() -> None:
    assert parse_job_file(f"{JOB}status: {{nodes: 2}}\n", "j.yaml").spec.nodes == 2


@pytest.mark.parametrize(
    "address", ["s3://key:hidden@bucket/d", "s3://key:hidden@bucket", "S3://key:a/hidden@bucket/d", "abfs://c:hidden@a/d"]
)
@pytest.mark.parametrize("field", ["model: {name: /m}", "data: {path: /d}"])
def test_a_password_in_an_address_is_refused_and_not_printed(field: str, address: str) -> None:
    lines = told(changed(field, field.replace(field[-3:-1], address)))
    assert len(lines) == 1 and "a password or a port" in lines[0] and "hidden" not in lines[0]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (r'script: {path: "x\0"}', "spec.script.path: 'x\\x00' is not valid: must be text without NUL characters"),
        (r'script: {path: x, args: [a, "b\uD83D"]}', r"spec.script.args[1]: \uD83D is half of a pair of escapes"),
        (
            r'script: {path: x}, env: [{name: A, value: "\0"}]',
            "spec.env[0].value: '\\x00' is not valid: must be text without NUL characters",
        ),
        (r'script: {path: x}, podTemplate: {annotations: {"k\uDC80": v}}', r"spec.podTemplate.annotations: \uDC80 is half of a pair"),
    ],
)
def test_text_that_can_not_be_stored_or_given_to_a_program_is_refused_with_its_line(field: str, said: str) -> None:
    assert told(f"{JOB.partition('spec:')[0]}spec: {{nodes: 2, {field}}}")[0].startswith(f"j.yaml:4: {said}")


def test_a_pair_of_escapes_is_one_character() -> None:
    job = parse_job_file(JOB.partition("spec:")[0] + r'spec: {nodes: 2, script: {path: x, args: ["\uD83E\uDD17"]}}', "j.yaml")
    assert job.spec.script is not None and job.spec.script.args == ["\U0001f917"]


def test_a_field_without_a_value_is_left_out() -> None:
    assert parse_job_file(changed("nodes: 2", "nodes:\n  restart:\n  env:"), "j.yaml").spec.nodes is None


ROOT = "apiVersion, kind, metadata, spec, status"
TRAINING = (
    "checkpoint, data, deepspeed, evaluation, hierarchicalPartition, lora, method, model, optimization, precision, reportTo, seed,"
    " zeroStage"
)
MISTAKES = [
    ("zeroStage: Stage2", "lora: {r: 8}",
        "9: spec.training.lora.r: unknown field; did you mean rank? (valid here: alpha, dora, dropout, initFrom, modulesToSave, rank,"
        " rankStabilized, targetModules, targetParameters)"),
    ("zeroStage: Stage2", "zero_stage: Stage2",
        f"9: spec.training.zero_stage: unknown field; did you mean zeroStage? (valid here: {TRAINING})"),
    ("zeroStage: Stage2", "optimization: {gradientCheckpointing: true}",
        "9: spec.training.optimization.gradientCheckpointing: unknown field; optimization.recompute (Auto, None or All) decides this now"),
    ("model: {name: /m}", "model: {name: /m, quantization: Int8}",
        "7: spec.training.model.quantization: Int8 is not valid; NF4 packs the base weights, and None leaves them as they are"),
    ("zeroStage: Stage2", "optimization: {optimizer: AdamW}",
        "9: spec.training.optimization.optimizer: unknown field; leave it out: the optimizer is torch's AdamW"),
    ("zeroStage: Stage2", "metrics: {wandb: {}}",
        "9: spec.training.metrics: unknown field; training.reportTo lists TensorBoard, MLflow and WandB; their addresses and projects are"
        " variables in spec.env, such as MLFLOW_TRACKING_URI and WANDB_PROJECT"),
    ("zeroStage: Stage2", "limits: {stepTimeoutSeconds: 60}",
        "9: spec.training.limits: unknown field; spec.hangTimeouts has stepSeconds and collectiveSeconds"),
    *(("nodes: 2", f"preflight: {value}", "5: spec.preflight: must be one word: Auto, Full (the self-test and the all-reduce always), Basic"
                                          " (without these two) or None (no checks)") for value in ("{mode: Basic}", "Off", "'Off'")),
    ("nodes: 2", "fabric: {ncclEnv: []}",
        "5: spec.fabric.ncclEnv: unknown field; spec.env takes NCCL's variables, and they go before the cluster's"),
    ("zeroStage: Stage2", "optimization: {warmupRatio: 0.1}",
        "9: spec.training.optimization.warmupRatio: unknown field; warmupSteps takes the part of all steps, too, such as 0.03"),
    ("zeroStage: Stage2", "optimization: {warmupSteps: 2.5}",
        "9: spec.training.optimization.warmupSteps: warmupSteps must be a whole number of steps, or below 1 the part of all steps"),
    ("nodes: 2", "interactive: {warnSeconds: 60}",
        "5: spec.interactive: unknown field; spec.idleSeconds says when GPUs are released, half an hour after a warning, and lockstep"
        " resume raises spec.restart.retry"),
    ("nodes: 2", "envFrom: [{prefix: A_, secretRef: {name: s}}]",
        "5: spec.envFrom[0].prefix: unknown field; name single keys by spec.env[].valueFrom to give them other names"),
    ("nodes: 2", "podTemplate: {topologySpreadConstraints: []}",
        "5: spec.podTemplate.topologySpreadConstraints: unknown field; with nodes.rack_label in the cluster file, pods prefer one rack"),
    ("nodes: 2", "podTemplate: {volumes: [{name: v, mountPath: /v, emptyDir: {sizeLimit: 1Gi}}]}",
        "5: spec.podTemplate.volumes[0].emptyDir.sizeLimit: unknown field; leave it out: an emptyDir may fill the node's ephemeral"
        " storage"),
    ("zeroStage: Stage2", "checkpoint: {exportAdapter: true}",
        "9: spec.training.checkpoint.exportAdapter: unknown field; lockstep adapter get makes an adapter of the newest"
        " checkpoint's shards"),
    ("nodes: 2", "notify: {}", "5: spec.notify: unknown field; the alert LockstepJobFailed (docs/how-to/monitoring.md) tells of a job that"
                               " failed by Alertmanager's receivers"),
    ("zeroStage: Stage2", "zzzz: 1", f"9: spec.training.zzzz: unknown field (valid here: {TRAINING})"),
    ("Stage2", "stage2", "9: spec.training.zeroStage: 'stage2' is not valid; did you mean Stage2? (valid: 'Stage1', 'Stage2' or 'Stage3')"),
    ("Stage2", "2.5", "9: spec.training.zeroStage: 2.5 is not valid (valid: 'Stage1', 'Stage2' or 'Stage3')"),
    ("spec:", "specs: 1\nspec:", f"4: specs: unknown field; did you mean spec? (valid here: {ROOT})"),
    ("nodes: 2", 'nodes: "2"', "5: spec.nodes: must be a whole number, without quotes"),
    ("nodes: 2", "nodes: 2.5", "5: spec.nodes: must be a whole number, without quotes"),
    ("nodes: 2", "nodes: 0", "5: spec.nodes: must be greater than or equal to 1"),
    ("nodes: 2", "nodes: 5000", "5: spec.nodes: must be less than or equal to 1024"),
    ("nodes: 2", "nodes: 2\n  nodes: 3", "6: spec.nodes: duplicate key: it is on line 5 already"),
    ("nodes: 2", "suspend: 'true'", "5: spec.suspend: must be true or false, without quotes"),
    ("nodes: 2", "image: a b", "5: spec.image: 'a b' is not valid: must be an image reference, without spaces"),
    ("nodes: 2", "env: {A: b}", "5: spec.env: must be a list"),
    ("nodes: 2", "restart: 3", "5: spec.restart: must be a mapping of keys to values"),
    ("nodes: 2", "env:\n  - {name: A, value: 3}", "6: spec.env[0].value: must be text, but YAML reads it as a number: write it in quotes"),
    ("nodes: 2", "env:\n  - {name: A, value: yes}",
        "6: spec.env[0].value: must be text, but YAML reads it as true or false: write it in quotes"),
    ("nodes: 2", "env:\n  - {name: A}\n  - {name: A}", "5: spec.env: env holds 'A' twice"),
    ("nodes: 2", "env:\n  - {name: A, valu: a}",
        "6: spec.env[0].valu: unknown field; did you mean value? (valid here: name, value, valueFrom)"),
    ("nodes: 2", "podTemplate: {labels: {a b: c}}",
        "5: spec.podTemplate.labels.a b: 'a b' is not valid: must be a label key such as rack or example.com/rack"),
    ("model: {name: /m}", "model: {name: a/b/c}",
        "7: spec.training.model.name: 'a/b/c' is not valid: must be a folder such as /workspace/models/Qwen3-8B, a model of the hub such as"
        " org/name, or an address such as s3://bucket/folder"),
    ("model: {name: /m}", "model: {}", "7: spec.training.model.name: is required"),
    ("model: {name: /m}", "model: /m", "7: spec.training.model: must be a mapping of keys to values"),
    ("model: {name: /m}", "model: {name: {a: b}}", "7: spec.training.model.name: must be text, not a mapping"),
    ("data: {path: /d}", "data: {path: /d, maxLength: 1}", "8: spec.training.data.maxLength: must be greater than or equal to 8"),
    ("{name: x}", "{name: X_Y}", "3: metadata.name: 'X_Y' is not valid: must be lower-case letters, digits and '-', beginning with a letter"
                                 " and ending with a letter or digit"),
    ("{name: x}", f"{{name: {'x' * 53}}}", "3: metadata.name: must be at most 52 characters"),
    ("lockstep.dev/v1alpha1", "lockstep.dev/v1", "1: apiVersion: must be lockstep.dev/v1alpha1"),
    ("    zeroStage", "    optimization: {learningRate: yes}\n    zeroStage",
        "9: spec.training.optimization.learningRate: must be a number of 0 or more, such as 0.05 or 2e-4"),
    ("    zeroStage", "    optimization: {learningRate: -1e-4}\n    zeroStage",
        "9: spec.training.optimization.learningRate: -0.0001 is not valid: must be a number of 0 or more, such as 0.05 or 2e-4"),
    ("    zeroStage", "    evaluation: {holdout: 0.6}\n    zeroStage",
        "9: spec.training.evaluation.holdout: 0.6 is not valid: must be a number greater than 0 and at most 0.5"),
    ("nodes: 2", "env:\n  - {name: A, value: .inf}", "6: spec.env[0].value: .inf is not a number in JSON: write it in quotes"),
    ("nodes: 2", "podTemplate: {labels: {y: c}}", "5: spec.podTemplate.labels.y: YAML does not read this key as text: write it in quotes"),
    ("    zeroStage", "    optimization: {microBatchSize: 4, globalBatchSize: 2}\n    zeroStage",
        "9: spec.training.optimization.globalBatchSize: globalBatchSize must be greater than or equal to microBatchSize"),
    ("nodes: 2", "script: {path: a.py}", "4: spec: must have exactly one of training and script, and neither when type is Interactive"),
]  # fmt: skip


NUMBER_FORMS = [
    ("optimization", "learningRate", "1e-4", ["1e-4", '"1e-4"', "0.0001", '"0.0001"', "1.0E-4", "0.1e-3", ".0001"]),
    ("optimization", "maxGradientNorm", "1", ["1", "1.0", '"1"', '"1.0"', "1e0", "10e-1"]),
    ("optimization", "weightDecay", "0.01", ["0.01", '"0.01"', "1e-2", '"1e-2"']),
    ("lora", "dropout", "0.05", ["0.05", '"0.05"', "5e-2", ".05"]),
    ("evaluation", "holdout", "0.1", ["0.1", '"0.1"', "1e-1", '"1e-1"', "0.10"]),
]


@pytest.mark.parametrize(("section", "field", "text", "forms"), NUMBER_FORMS)
def test_a_number_is_the_same_number_however_it_is_written(section: str, field: str, text: str, forms: list[str]) -> None:
    for form in forms:
        job = parse_job_file(changed("zeroStage: Stage2", f"{section}: {{{field}: {form}}}"), "j.yaml")
        assert job.to_dict()["spec"]["training"][section][field] == text, form


@given(st.floats(0, 1e15))
def test_a_number_survives_its_spelling_to_the_last_bit(number: float) -> None:
    written = parse_job_file(changed("zeroStage: Stage2", f"optimization: {{learningRate: {number!r}}}"), "j.yaml")
    assert float(written.to_dict()["spec"]["training"]["optimization"]["learningRate"]).hex() == abs(number).hex()


@pytest.mark.parametrize(("section", "field", "valid", "wrong"), NUMBERS)
def test_a_number_is_bounded_as_the_api_server_bounds_it(section: str, field: str, valid: list[Any], wrong: list[Any]) -> None:
    for value in valid:
        TrainingJob.model_validate(training(**{section: {field: value}}))
    for value in wrong:
        with pytest.raises(ValidationError):
            TrainingJob.model_validate(training(**{section: {field: value}}))


def test_an_amount_is_a_quantity_or_a_number() -> None:
    read = [TrainingJob.model_validate(job(resources={"cpu": value})).spec.resources.cpu for value in AMOUNTS]
    assert read == ["16", "0.5", "0.001", "1000000000000000", *AMOUNTS[4:]]
    for value in NO_AMOUNTS:
        with pytest.raises(ValidationError):
            TrainingJob.model_validate(job(resources={"cpu": value}))


@pytest.mark.parametrize("word", ["y", "Y", "n", "N", "on", "off", "yes", "No", "true", "FALSE"])
def test_a_word_that_kubectl_takes_for_a_truth_value_is_no_text(word: str) -> None:
    text = changed("nodes: 2", f"env:\n  - {{name: A, value: {word}}}")
    assert told(text) == ["j.yaml:6: spec.env[0].value: must be text, but YAML reads it as true or false: write it in quotes"]
    parse_job_file(text.replace(f"value: {word}", f"value: '{word}'"), "j.yaml")


def test_an_entry_without_a_value_is_told_as_such() -> None:
    mistakes = told(changed("zeroStage: Stage2", "lora: {targetModules: [q_proj, ~]}"))
    assert mistakes == [
        "j.yaml:9: spec.training.lora.targetModules[1]: must be text, but has no value: leave it out, or write '' for an empty text"
    ]


def test_mistakes_of_a_list_come_in_its_order() -> None:
    mistakes = told(changed("zeroStage: Stage2", f"lora: {{targetModules: [{', '.join(['1'] * 12)}]}}"))
    assert [line.split(": ")[1] for line in mistakes] == [f"spec.training.lora.targetModules[{number}]" for number in range(12)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("08", 8), ("010", 8), ("0o17", 15), ("1:30", "1:30"), ("1_000", 1000), ("2020-01-01", "2020-01-01"), ("+1", 1),
            (".5", 0.5),
        ("5.", 5), ("1_0.5", 10.5), (".5_0", 0.5), (".5e1_0", 5 * 10**9), (".0_", ".0_"), ("._5", "._5"), (".5__0", ".5__0"),
            (".5e_1", ".5e_1"), ("+.5_", 0.5), ("0b11", 3), ("-0x1F", -31), ("1e", "1e"), ("=", "="), ("1e400", "1e400"), ("0o8", "0o8"),
        ("9223372036854775807", 2**63 - 1), ("18446744073709551616", 2.0**64), ("~", None), ("1" * 400, "1" * 400),
            ("0x" + "f" * 17, "0x" + "f" * 17), ("2.0", 2), ("_1", "_1"), ("-", "-"), (".", "."),
    ],
)  # fmt: skip
def test_plain_scalars_are_read_as_kubectl_reads_them(text: str, value: Any) -> None:
    found = plain_value(text)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(("old", "new", "message"), MISTAKES)
def test_a_mistake_is_told_with_its_line_its_field_and_what_is_valid(old: str, new: str, message: str) -> None:
    assert told(changed(old, new)) == [f"j.yaml:{message}"]


def test_all_mistakes_of_a_file_are_told_in_its_order() -> None:
    text = changed("nodes: 2", "nodes: 0").replace("Stage2", "Stage9").replace("name: x", "name: X")
    assert [line.split(": ")[:2] for line in told(text)] == [
        ["j.yaml:3", "metadata.name"],
        ["j.yaml:5", "spec.nodes"],
        ["j.yaml:9", "spec.training.zeroStage"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "j.yaml: is empty; must hold one object of kind TrainingJob, apiVersion lockstep.dev/v1alpha1"),
        (OTHER, "j.yaml: holds ConfigMap; must hold one object of kind TrainingJob, apiVersion lockstep.dev/v1alpha1"),
        ("a: b", "j.yaml: holds an object without kind; must hold one object of kind TrainingJob, apiVersion lockstep.dev/v1alpha1"),
        (f"{JOB}---\n{JOB}", "j.yaml: holds 2 objects of kind TrainingJob (lines 1, 11); must hold exactly one"),
        ("- a", "j.yaml:1: must be a mapping with apiVersion, kind, metadata and spec"),
        ("a: {", "j.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'"),
        ("kind: TrainingJob\nspec: &a {x: *a}", "j.yaml:2: an alias refers to a value that contains it"),
    ],
)
def test_a_file_without_one_job_is_told_as_such(text: str, message: str) -> None:
    assert told(text) == [message]
