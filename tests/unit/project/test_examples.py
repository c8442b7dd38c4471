"""Every sample, scaffold, cluster file and every YAML block of the documentation is valid, can be rendered, and its plan says that it fits.

The tables are read from the files, so that a new example can't escape. A block that isn't whole says in a comment before it what it is part
of:

    <!-- example: part of clusters/template.yaml -->              its keys are merged into that file's
    <!-- example: part of spec of manifests/samples/x.yaml -->    into a section of it
    <!-- example: replaces spec.training.data of FILE -->         its one key takes the place of that section
    <!-- example: on clusters/barcelona.yaml -->                  a whole job that leaves its cluster out
    <!-- example: Kueue's own configuration -->                   not Lockstep's; it must be YAML
"""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.clusterkeys import KEYS
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.job import TrainingJobSpec
from lockstep.api.training import Training
from lockstep.cli.clusters.deploymentplan import Mode, planned
from lockstep.cli.main import app
from lockstep.cli.shared.places import Verb
from lockstep.plan.render.run import trainer_config
from lockstep_spec.families import shape_from_config
from lockstep_spec.fit import choose_recomputed, plan_memory
from lockstep_spec.memory import Place, trained_elements
from lockstep_spec.settings import size_settings
from support.checkout import ROOT

Object = dict[str, Any]
VERBS: Any = typer.main.get_command(app)
SAMPLES = sorted((ROOT / "manifests/samples").rglob("*.yaml"))
SHAPES: dict[str, Object] = json.loads((ROOT / "manifests/samples/models/shapes.json").read_text(encoding="utf-8"))
MODELS = {name.rpartition("/")[2]: name for name in SHAPES}
"""Models whose sizes are built in, by what their folders are usually called."""
CLUSTERS = sorted(path for path in (ROOT / "clusters").glob("*.yaml") if "platform: hosts" not in path.read_text(encoding="utf-8"))
SCAFFOLDS = sorted((ROOT / "operator/lockstep/cli/clusters/scaffolds").iterdir())
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"(?:^ *<!-- example: (?P<note>[^>]+) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
TOP_KEYS = {"apiVersion", "kind", "metadata", "spec", *(re.split(r"[.\[]", key)[0] for key in KEYS)}


@dataclass(frozen=True)
class Example:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    note: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _examples() -> list[Example]:
    return [
        Example(page, text.count("\n", 0, block.start("text")), block["language"], block["note"] or "", block["text"])
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for block in BLOCK.finditer(text)
    ]


EXAMPLES = _examples()
YAML = [example for example in EXAMPLES if example.language == "yaml"]


def typed(*words: str | Path, code: int = 0) -> str:
    """The output of a lockstep command that must end with this exit code."""
    printed = io.StringIO()
    command = f"lockstep {' '.join(map(str, words))}"
    with redirect_stdout(printed):
        try:
            ended = VERBS.main([str(word) for word in words], prog_name="lockstep", standalone_mode=False)
        except ConfigError as error:
            pytest.fail(f"{command}\n{error}")
    assert (ended or 0) == code, f"{command}\n{printed.getvalue()}"
    return printed.getvalue()


def check_job(job: Object, cluster: Path | None, folder: Path, file: Path | None = None) -> None:
    """`file`: the job as it is written, if there is one. Raises AssertionError with the command that didn't take it."""
    path = file or folder / "job.yaml"
    if file is None:
        path.write_text(json.dumps(job), encoding="utf-8")
    on: list[str | Path] = [] if cluster is None else ["--cluster", cluster]
    assert typed("validate", "-f", path, *on).endswith("ok\n")
    assert {"StatefulSet", "Service"} <= {item["kind"] for item in json.loads(typed("render", "-f", path, *on, "-o", "json"))["items"]}
    training = job["spec"].get("training")
    model: list[str | Path] = []
    if training is not None and (name := MODELS.get(Path(training["model"]["name"]).name)):
        model = ["--model-config", name]
    sized = training is None or model != []  # a memory that is not known is a risk
    place = on if on or "cluster" in job["spec"] else ["--on", "2x4xH100"]
    plan = json.loads(typed("plan", "-f", path, *place, *model, "--offline", "-o", "json", code=0 if sized else 4))
    on_gpus = any("GPUs" in line["message"] for line in plan["lines"] if line["section"] == "job")
    memory = [line["outcome"] for line in plan["lines"] if line["section"] == "memory"]
    if training is not None and on_gpus:
        assert memory[0] == "ok", f"{plan}; if the model's shape is not known: manifests/samples/models/shapes.json lacks it"


def check_cluster(cluster: Object, folder: Path, file: Path | None = None) -> None:
    """A dev environment and a script run on it."""
    path = file or folder / "cluster.yaml"
    if file is None:
        path.write_text(json.dumps(cluster), encoding="utf-8")
    typed("cluster", "lint", path, "--offline")
    for sample in ("dev-environment", "trainingjob-script"):
        job = yaml.safe_load((ROOT / f"manifests/samples/{sample}.yaml").read_text(encoding="utf-8"))
        del job["spec"]["cluster"]
        check_job(job, path, folder)


def cluster_of(job: Object, folder: Path) -> Path | None:
    """A page that writes `my-cluster` or `mine` means the template's; a name of clusters/ is found by the verbs themselves."""
    name = job["spec"].get("cluster")
    if name not in ("my-cluster", "mine"):
        return None
    path = folder / f"{name}.yaml"
    path.write_text(
        (ROOT / "clusters/template.yaml").read_text(encoding="utf-8").replace("name: my-cluster", f"name: {name}", 1), encoding="utf-8"
    )
    return path


def merged(base: Object, part: Object) -> Object:
    """`base` with the keys of `part`: sections are joined, everything in a section is replaced."""
    both = {
        key: {**base[key], **part[key]} for key in base.keys() & part.keys() if isinstance(base[key], dict) and isinstance(part[key], dict)
    }
    return {**base, **part, **both}


def completed(example: Example, part: Object) -> Object:
    """The file that the block is part of, with the block in it."""
    match = re.fullmatch(r"(?:part of|(?P<replaces>replaces)) (?:(?P<section>[\w.]+) of )?(?P<file>\S+\.yaml)", example.note)
    assert match is not None, (
        f"{example}: a block that is part of a file says of which: <!-- example: part of FILE -->, not: {example.note!r}"
    )
    whole: Object = yaml.safe_load((ROOT / match["file"]).read_text(encoding="utf-8"))
    *above, last = (match["section"] or "").split(".")
    section = whole
    for key in above:
        section = section[key]
    if match["replaces"]:
        assert list(part) == [last]
        section[last] = part[last]
    elif last:
        section[last] = merged(section[last], part)
    else:
        whole = merged(whole, part)
    return whole


def check_document(example: Example, document: Object, folder: Path) -> None:
    if document.get("cluster", {}).get("platform") == "hosts":
        assert parse_cluster_file(example.text, str(example)).hosts
    elif document.get("kind") not in (None, "TrainingJob"):
        assert "apiVersion" in document and "name" in document["metadata"]
    elif example.note.startswith("on "):
        check_job(document, ROOT / example.note.removeprefix("on "), folder)
    elif not example.note and "cluster" in document:
        check_cluster(document, folder)
    elif not example.note:
        assert document.get("kind") == "TrainingJob", f"{example}: say what it is part of: <!-- example: part of FILE -->"
        check_job(document, cluster_of(document, folder), folder)
    elif "cluster" in (whole := completed(example, document)):
        check_cluster(whole, folder)
    else:
        check_job(whole, cluster_of(whole, folder), folder)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_is_valid_can_be_rendered_and_fits_its_cluster(path: Path, tmp_path: Path) -> None:
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_job(job, cluster_of(job, tmp_path), tmp_path, path)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_file_that_ships_can_be_deployed_and_takes_jobs(path: Path, tmp_path: Path) -> None:
    check_cluster(yaml.safe_load(path.read_text(encoding="utf-8")), tmp_path, path)
    assert {"TrainingCluster", "Deployment"} <= {item["kind"] for item in planned(Verb(), str(path), Mode.AUTO).objects}


@pytest.mark.parametrize("path", SCAFFOLDS, ids=lambda path: path.stem)
def test_a_scaffold_fits_once_its_model_is_named(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word, value in (("NAME", "mine"), ("CLUSTER", "barcelona"), ("MODEL", "Llama-3.1-8B")):
        text = re.sub(rf"\b{word}\b", value, text)
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    check_job(yaml.safe_load(text), None, tmp_path, tmp_path / "mine.yaml")


@pytest.mark.parametrize("example", YAML, ids=str)
def test_a_yaml_block_of_a_page_is_what_the_api_takes(example: Example, tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all(example.text))
    assert documents and all(isinstance(document, dict) for document in documents)
    if example.note and not re.match(r"(part of|replaces|on) ", example.note):
        assert not any(str(document.get("apiVersion", "")).startswith("lockstep.dev/") for document in documents)
        return
    for document in documents:
        check_document(example, document, tmp_path)


def test_no_yaml_of_lockstep_hides_in_a_block_without_a_language() -> None:
    fields = TOP_KEYS | {field.alias or name for model in (TrainingJobSpec, Training) for name, field in model.model_fields.items()}
    hidden = []
    for example in EXAMPLES:
        if example.language in ("yaml", "json", "python"):
            continue
        first = re.match(r"([A-Za-z_]+):(?:\s|$)", example.text)
        if first is not None and first[1] in fields:
            hidden.append(str(example))
    assert hidden == []


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.language == "python"], ids=str)
def test_a_python_block_can_be_compiled(example: Example) -> None:
    ast.parse(example.text)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if example.language == "json"], ids=str)
def test_a_json_block_is_json_but_for_what_it_leaves_out(example: Example) -> None:
    """Or keys of an object, without its braces."""
    text = re.sub(r", …(?=[\]}])", "", example.text)
    json.loads(text if text.startswith("{") else f"{{{text}}}")


def test_every_language_of_a_block_is_looked_at() -> None:
    assert {example.language for example in EXAMPLES} == {"", "yaml", "json", "python"}
    assert len(YAML) > 15 and len(SAMPLES) > 5


def test_the_plan_that_its_page_shows_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page leaves lines out, and the end of long ones, with `…`."""
    monkeypatch.chdir(ROOT)
    shown = next(example for example in EXAMPLES if example.page.name == "plan.md" and "--offline" in example.text)
    command, *lines = shown.text.splitlines()
    printed = typed(*command.removeprefix("$ lockstep ").split()).splitlines()
    for line in lines:
        assert line == "…" or any(row == line or (line.endswith(" …") and row.startswith(line[:-2])) for row in printed), line


def test_the_memory_plan_that_its_page_shows_is_the_samples() -> None:
    text = (ROOT / "manifests/samples/trainingjob-rdma.yaml").read_text(encoding="utf-8")
    training = parse_job_file(text, "trainingjob-rdma.yaml").spec.training
    assert training is not None
    shape = shape_from_config(SHAPES["meta-llama/Llama-3.1-8B"])
    place, size = Place(world_size=8, ranks_per_node=4, gpu=True), 80 * 10**9
    stated = size_settings(trainer_config(training))
    settings, _ = choose_recomputed(shape, stated, place, [(stated.micro_batch_size, size)])
    printed = plan_memory(shape, settings, place, size).lines()
    shown = next(example for example in EXAMPLES if example.page.name == "memory.md" and example.text.startswith("Memory plan"))
    assert [line.strip() for line in printed[:4]] == [line.strip() for line in shown.text.splitlines() if line.strip() != "…"]


def test_the_figures_of_a_config_yaml_s_page_follow_from_the_sample() -> None:
    text = (ROOT / "manifests/samples/trainingjob-glm-air.yaml").read_text(encoding="utf-8")
    training = parse_job_file(text, "trainingjob-glm-air.yaml").spec.training
    assert training is not None
    shape = shape_from_config(SHAPES["zai-org/GLM-4.5-Air"])
    settings = size_settings(trainer_config(training))
    trained = trained_elements(shape, settings)
    page = (ROOT / "docs/how-to/from-config-yaml.md").read_text(encoding="utf-8")
    for figure in (
        f"{trained:,} trained",
        f"{trained * 2 / 1e6:.0f} MB in BF16",
        f"{trained * 12 / 1e6:.0f} MB",
        f"{shape.numel / 1e9:.1f} billion",
        f"{shape.numel * 2 / 1e9:.1f} GB",
    ):
        assert figure in page, figure


def test_the_sample_of_a_config_yaml_fits_two_nodes_and_says_how(tmp_path: Path) -> None:
    """On H200 with a second copy of the weights on each node; on cards of 80 GB no copy is taken that would leave less than 15 %."""
    shown = {}
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        cluster = tmp_path / "cluster.yaml"
        cluster.write_text(
            (ROOT / "clusters/template.yaml").read_text().replace("NVIDIA H100 80GB HBM3", gpu).replace("per_node: 4 ", "per_node: 8 ")
        )
        sample, model = ROOT / "manifests/samples/trainingjob-glm-air.yaml", "zai-org/GLM-4.5-Air"
        given = ["plan", "-f", str(sample), "--cluster", str(cluster), "--model-config", model, "--set", "gpusPerNode=8"]
        shown[gpu] = typed(*given, "--samples", "16000", "--tokens-per-second", "6170", "--offline")
    levels = (
        "all but attention's output in 29 of 46 layers and norms and gates in 17 of 46 layers, so that the plan takes at most 85% of each"
        " device's memory"
    )
    assert (
        f"that is with Stage3 in BF16, recompute Auto ({levels}), a second copy of the weights on each node's 8 ranks"
        in shown["NVIDIA H200"]
    )
    for text in shown.values():
        assert "ok       memory     a GPU needs about " in text
        assert "time       at most 1d10h: 1470 steps of 85s" in text
        needed, of = re.search(r"a GPU needs about ([\d.]+) GB of ([\d.]+) GB", text).groups()  # type: ignore[union-attr]
        assert float(needed) < 0.85 * float(of)
