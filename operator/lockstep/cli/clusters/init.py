"""`lockstep init cluster|job|script`: a commented file to start from. Nothing that exists is written over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.jobargs import UNNAMED
from lockstep.platforms.output import put

app = typer.Typer(help="Write a commented file to start from: a cluster, a job, a script.", no_args_is_help=True)
SCAFFOLDS = Path(__file__).with_name("scaffolds")
SCRIPT_FILES = ("train_multi_node.py", "ds_config.json")

FileOption = Annotated[Path | None, typer.Option("-o", "--output", help="Where to write it.", show_default=False)]


@app.command("cluster")
def cluster(name: Annotated[str, typer.Argument(help="The cluster's name.")], output: FileOption = None) -> None:
    """Write a cluster file with every key and what it means. Default: clusters/NAME.yaml.

    Example: lockstep init cluster mine
    """
    from lockstep.api.files.clusterfile import parse_cluster_file
    from lockstep.cli.shared.checkout import checkout

    folder = checkout() / "clusters"
    text = (folder / "template.yaml").read_text(encoding="utf-8")
    text = re.sub(
        r"\A#.*\n", f"# The cluster {name}. Remove what you do not need: most keys have defaults. Check it: lockstep clusters\n", text
    )
    text = re.sub(r"^  name: my-cluster\b", f"  name: {name}", text, count=1, flags=re.MULTILINE)
    path = output or folder / f"{name}.yaml"
    parse_cluster_file(text, str(path))  # a name that can't be is refused before anything is written
    _write(path, text)
    put(f"Next: edit it, then lockstep deploy {name if output is None else path} --dry-run")


@app.command("job")
def job(
    name: Annotated[str, typer.Argument(help="The job's name.")],
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help=f"The cluster that it is for. {UNNAMED}"),
    ] = None,
    script: Annotated[bool, typer.Option("--script", help="For a program of your own instead of Lockstep's trainer.")] = False,
    output: FileOption = None,
) -> None:
    """Write a job file. Default: NAME.yaml in this folder.

    Example: lockstep init job glm-lora --cluster barcelona
    """
    from lockstep.api.files.jobfile import parse_job_file
    from lockstep.cli.shared.checkout import deployed_last
    from lockstep.cli.shared.target import EMBEDDED

    cluster = cluster or deployed_last() or EMBEDDED
    path = output or Path(f"{name}.yaml")
    text = (SCAFFOLDS / ("script-job.yaml" if script else "job.yaml")).read_text(encoding="utf-8")
    for word, value in (("NAME", name), ("CLUSTER", cluster), ("FILE", str(path))):
        text = re.sub(rf"\b{word}\b", value.replace("\\", r"\\"), text)
    parse_job_file(text, str(path))
    _write(path, text)
    put(f"Next: edit it, then lockstep validate -f {path}")


@app.command("script")
def script(folder: Annotated[Path, typer.Argument(help="Where to write them.")] = Path()) -> None:
    """Write train_multi_node.py and ds_config.json: a DeepSpeed script that runs on any number of nodes, stops and goes on as asked.

    Example: lockstep init script workspace
    """
    from lockstep.cli.shared.checkout import checkout

    taken = [str(folder / name) for name in SCRIPT_FILES if (folder / name).exists()]
    if taken:
        raise ConfigError(f"{', '.join(taken)} already exists: name another folder")
    for name in SCRIPT_FILES:
        _write(folder / name, (checkout() / "workspace" / name).read_text(encoding="utf-8"))
    put("Next: put your model and your data where its two comments say; a job for it: lockstep init job NAME --script")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} already exists: name another file with -o") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
    put(f"Wrote {path}")
