"""Everything a run needs, put together: data, model, engine, and the state it starts from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep_train.checkpoint import resume, zero_access
from lockstep_train.checkpoint.chain import Claim
from lockstep_train.checkpoint.load import ShardReader, direct, exchanged
from lockstep_train.checkpoint.manifest import Identity, Manifest
from lockstep_train.checkpoint.save import Saver
from lockstep_train.config import RunConfig, TrainingConfig
from lockstep_train.data import sampler
from lockstep_train.data.load import Dataset, load_dataset
from lockstep_train.data.tokenize import Tokeniser
from lockstep_train.engine.ranks import Ranks
from lockstep_train.engine.settings import deepspeed_settings
from lockstep_train.engine.start import prepare_deepspeed, start_engine
from lockstep_train.environment import RankEnvironment
from lockstep_train.errors import ConfigError
from lockstep_train.model.load import base_digest, load_base, load_tokeniser, model_folder
from lockstep_train.model.lora import adapter_description, adapter_names, add_lora
from lockstep_train.report import Reporter


@dataclass(frozen=True)
class Run:
    """A run that is ready to take its next step."""

    config: RunConfig
    ranks: Ranks
    reporter: Reporter
    dataset: Dataset
    tokeniser: Tokeniser
    plan: sampler.Plan
    engine: Any
    saver: Saver
    eval_loss_before: str | None
    """From the commit this run goes on from."""
    adapter: dict[str, Any]
    describe: Description


@dataclass
class Description:
    """What a manifest says of this run, but for the step and the shards."""

    template: Manifest
    plan: sampler.Plan
    engine: Any

    def __call__(self, step: int) -> Manifest:
        consumed = self.plan.cursor(step + 1)
        return replace(
            self.template,
            step=step,
            samples_consumed=consumed,
            optimizer_step=zero_access.optimizer_step(self.engine),
            loss_scaler=zero_access.loss_scaler_state(self.engine),
        )

    def set_eval_loss_before(self, loss: str | None) -> None:
        self.template = replace(self.template, eval_loss_before=loss)


def assemble(config: RunConfig, environment: RankEnvironment, ranks: Ranks, reporter: Reporter) -> Run:
    """Load data and model, agree on the start and load its state. Raises ConfigError, on every rank, for what can't be done."""
    training = config.training
    checkpoints = config.run_dir / "checkpoints"
    folder = model_folder(training.model)
    tokeniser = load_tokeniser(folder)
    dataset = load_dataset(training.data, training.evaluation, tokeniser)
    claim = Claim(environment.attempt, config.job_uid)
    start = resume.choose_start(ranks, checkpoints, training.checkpoint.resume_from, claim, reporter.say)
    plan = plan_run(training, dataset, ranks, start.source)
    engine, adapter = start_model(training, folder, plan)
    identity = run_identity(training, base_digest(folder), dataset, plan, zero_access.parameter_shapes(engine))
    if start.source is not None:
        resume.refuse_another(start.source.manifest, identity, start.source.folder)
        restore(engine, start.source, plan, ranks)
    resume.record_start(ranks, checkpoints, start, claim)
    describe = Description(_template(config, start, identity, adapter, ranks), plan, engine)
    saver = Saver(ranks, checkpoints, start.attempt, training.checkpoint.keep, describe)
    manifest = start.source.manifest if start.source else None
    before = manifest.eval_loss_before if manifest else None
    reporter.open_logs(config.run_dir / "logs", plan.done.steps, start.attempt)
    run = Run(config, ranks, reporter, dataset, tokeniser, plan, engine, saver, before, adapter, describe)
    _announce(run, start)
    return run


def start_model(training: TrainingConfig, folder: Path, plan: sampler.Plan) -> tuple[Any, dict[str, Any]]:
    """The engine, tested to keep its state where we look for it, and what an adapter folder says of it."""
    settings = deepspeed_settings(training, plan.accumulation)
    prepare_deepspeed()
    model = add_lora(load_base(folder, training.precision, settings), training.lora, training.seed)
    description = adapter_description(model)
    engine = start_engine(model, training.optimization, settings)
    zero_access.self_test(engine)
    return engine, {"config": description, "names": adapter_names(zero_access.parameter_shapes(engine))}


def plan_run(training: TrainingConfig, dataset: Dataset, ranks: Ranks, source: resume.Source | None) -> sampler.Plan:
    """The global batch is fixed at a run's first start: a commit's goes before the default. Raises ConfigError when both are stated and differ."""
    optimization = training.optimization
    stated = optimization.global_batch_size
    saved = source.manifest.identity.global_batch_size if source else None
    if stated is not None and saved is not None and stated != saved:
        raise ConfigError(
            f"training.optimization.globalBatchSize is {stated}, but the commit {source.folder if source else ''} was trained with {saved}; leave it out, or set resumeFrom to None"
        )
    size = stated or saved or optimization.micro_batch_size * ranks.world_size
    done = sampler.Done(source.manifest.step, source.manifest.samples_consumed) if source else sampler.Done()
    return sampler.plan(
        count=len(dataset.training),
        epochs=optimization.epochs,
        max_steps=optimization.max_steps,
        global_batch_size=size,
        world_size=ranks.world_size,
        micro=optimization.micro_batch_size,
        done=done,
    )


def run_identity(training: TrainingConfig, base: str, dataset: Dataset, plan: sampler.Plan, shapes: dict[str, tuple[int, ...]]) -> Identity:
    return Identity(
        base=base,
        rank=training.lora.rank,
        alpha=training.lora.alpha,
        target_modules=tuple(sorted(training.lora.target_modules)),
        parameters=hashlib.sha256(json.dumps(sorted(shapes.items())).encode()).hexdigest(),
        dataset=dataset.digest,
        seed=training.seed,
        global_batch_size=plan.global_batch_size,
    )


def restore(engine: Any, source: resume.Source, plan: sampler.Plan, ranks: Ranks) -> None:
    reader = ShardReader(source.folder, source.manifest)
    full = direct(reader) if source.everywhere else exchanged(reader, source.holders, ranks)
    zero_access.restore(engine, full, source.manifest.optimizer_step, plan.accumulation, plan.global_batch_size)
    zero_access.restore_loss_scaler(engine, source.manifest.loss_scaler)


def _template(config: RunConfig, start: resume.Start, identity: Identity, adapter: dict[str, Any], ranks: Ranks) -> Manifest:
    training = config.training
    return Manifest(
        step=0,
        attempt=start.attempt,
        job=config.job_name,
        job_uid=config.job_uid,
        world_size=ranks.world_size,
        zero_stage=training.zero_stage.value,
        precision=training.precision.value,
        base_model=training.model.name,
        identity=identity,
        samples_consumed=0,
        optimizer_step=0,
        eval_loss_before=start.source.manifest.eval_loss_before if start.source else None,
        adapter=adapter,
        shards=(),
        content=training.checkpoint.content.value,
    )


def _announce(run: Run, start: resume.Start) -> None:
    training, dataset, plan, ranks = run.config.training, run.dataset, run.plan, run.ranks
    run.reporter.say(
        f"Training {Path(training.model.name).name} | {training.zero_stage.value} {training.precision.value} | {ranks.world_size} ranks on {ranks.nodes} nodes | "
        f"{len(dataset.training)} samples, {len(dataset.evaluation)} for evaluation | global batch {plan.global_batch_size} "
        f"(accumulation {plan.accumulation}) | {plan.total_steps} steps"
    )
    if dataset.cut:
        run.reporter.say(f"{dataset.cut} samples are longer than maxLength = {training.data.max_length} tokens and lose their end")
    if start.source is not None:
        run.reporter.say(f"Resuming from {start.source.folder} (step {start.source.manifest.step})")
