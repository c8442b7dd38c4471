"""Everything a run needs, put together: data, model, engine, and the state it starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep_spec import length
from lockstep_spec.choices import Batches
from lockstep_spec.modelnames import model_title
from lockstep_spec.shares import idle_words
from lockstep_spec.training import TrainingConfig
from lockstep_train.balance import Shares, measured_shares, sizes_of
from lockstep_train.base import limits
from lockstep_train.base.cache import cache_folder
from lockstep_train.base.errors import ConfigError
from lockstep_train.base.limits import UNWATCHED, Say, Watch
from lockstep_train.base.ranks import Ranks
from lockstep_train.base.runfile import RankEnvironment, RunConfig
from lockstep_train.base.volumes import nodes_share
from lockstep_train.checkpoint import resume
from lockstep_train.checkpoint.format.layout import kinds_of
from lockstep_train.checkpoint.format.volume import Claim
from lockstep_train.checkpoint.resume import restore_commit
from lockstep_train.checkpoint.save.save import Saver
from lockstep_train.checkpoint.save.upkeep import start_upkeep
from lockstep_train.data.dataset import Dataset, load_dataset, template_choice
from lockstep_train.data.sequences.batches import global_batch
from lockstep_train.data.tokens.tokenizer import Tokenizer, load_tokenizer
from lockstep_train.engine.build import start_model
from lockstep_train.engine.experts import count_experts
from lockstep_train.engine.loss import TokenLoss
from lockstep_train.engine.measure import MeasuredRank, measure_rank
from lockstep_train.memory.agree import agree_on_memory
from lockstep_train.memory.capacity import reserve_copy
from lockstep_train.model.base_files import RECORD, BaseHash, Copy, adapter_record, base_problem
from lockstep_train.model.fetched import with_base_name
from lockstep_train.model.isolation import settle_batches
from lockstep_train.model.load import base_digest, model_folder
from lockstep_train.report import Reporter
from lockstep_train.run import Description, Run, SaveReport, changed_settings, manifest_template, run_identity
from lockstep_train.zero import zero_access


def assemble(config: RunConfig, environment: RankEnvironment, ranks: Ranks, reporter: Reporter, watch: Watch = UNWATCHED) -> Run:
    """Load data and model, agree on the start and load its state. Raises ConfigError, on every rank, for what can't be done."""
    training = config.training
    checkpoints = config.run_dir / "checkpoints"
    folder = model_folder(training.model)
    shared = nodes_share(ranks, config.run_dir, config.storage)
    refuse_other_nodes(config.node_micro_batches, ranks)
    memory = agree_on_memory(training, folder, ranks, reporter, config.node_micro_batches)
    reporter.startup.done("memoryPlan")
    tokenizer = load_tokenizer(folder, template_choice(training.data))
    base = BaseHash(ranks, folder, cache_folder(config.run_dir))
    dataset = load_dataset(config, tokenizer, ranks, reporter.say, watch)
    watch.begin("Load of the model", limits.LOAD_SECONDS)
    claim = Claim(environment.attempt, config.job_uid)
    start = resume.choose_start(ranks, checkpoints, training.checkpoint.resume_from, claim, reporter.say, shared=shared)
    plan = plan_run(training, dataset, ranks, start.source)
    batches = begun_batches(training, start.source, reporter.say)
    optimization = training.optimization
    micro = optimization.micro_batch_size
    reporter.startup.done("data")
    engine, loss, trained = start_model(
        training,
        folder,
        plan,
        ranks,
        reporter,
        memory.recomputed,
        memory.partition,
        memory.plan.shape if memory.plan else None,
        joins=training.data.packing or batches is Batches.TOKENS,
    )
    adapter = with_base_name(trained, config)
    batches = settle_batches(engine, training, batches, dataset.training, min(micro, *memory.most), ranks.device, reporter.say)
    stated = [config.node_micro_batches[node] if config.node_micro_batches else 0 for node in memory.nodes]
    sizes = sizes_of(batches, optimization.balance, micro, memory.most, training.data.max_length, stated)
    shares = Shares(sizes, memory.nodes)
    recorded, commit = (start.source.manifest.identity.base_files, str(start.source.folder)) if start.source else ({}, "")
    files = base.finish(recorded, commit, watch)
    reporter.startup.done("baseHash")
    if training.lora.init_from is not None and start.source is None:
        refuse_other_record(training.lora.init_from, folder, files)
    identity = run_identity(training, base_digest(folder), files, dataset, plan, zero_access.parameter_shapes(engine))
    if start.source is not None:
        resume.refuse_another(start.source.manifest, identity, start.source.folder)
        restore_commit(engine, start.source, ranks, reporter.say)
    resume.record_start(ranks, checkpoints, start, claim)
    reporter.startup.done("restore")
    describe = Description(manifest_template(config, start, identity, adapter, ranks, batches), plan, engine)
    report = SaveReport(reporter)
    master = (environment.master_address, environment.master_port)
    upkeep = start_upkeep(config, ranks, start.attempt, master, folder, chats=dataset.chats, shared=shared, say=reporter.say)
    saver = Saver(ranks, checkpoints, start.attempt, upkeep, describe, kinds_of(training.checkpoint.content.value), report)
    reserve_copy(saver, engine, ranks)
    reporter.startup.done("saveMemory")
    shares = balanced(config, shares, dataset, tokenizer, plan, engine, loss, ranks, reporter)
    manifest = start.source.manifest if start.source else None
    before = manifest.eval_loss_before if manifest else None
    reporter.open_run(config, plan.done.steps, start.attempt)
    usage = count_experts(engine.module, ranks.device)
    run = Run(
        config,
        ranks,
        reporter,
        dataset,
        tokenizer,
        plan,
        shares,
        engine,
        loss,
        saver,
        report,
        before,
        adapter,
        describe,
        usage,
        watch,
        shared,
        base,
        start.source,
        memory.recomputed,
    )
    _announce(run, start)
    return run


def refuse_other_record(adapter: str, folder: Path, files: Mapping[str, str]) -> None:
    """Raise ConfigError for an adapter to start with that says it was trained on another base model."""
    remedy = f"set training.model.name to that one, or remove {RECORD} from the adapter's folder to use it anyway"
    problem = base_problem(folder, [Copy((0,), files)], adapter_record(Path(adapter)), f"training.lora.initFrom {adapter}", remedy)
    if problem is not None:
        raise ConfigError(problem)


def plan_run(training: TrainingConfig, dataset: Dataset, ranks: Ranks, source: resume.VerifiedCommit | None) -> length.Plan:
    """The global batch is fixed at a run's first start: a commit's goes before the default. Raises ConfigError when both are stated and
    differ.
    """
    optimization = training.optimization
    stated = optimization.global_batch_size
    saved = source.manifest.identity.global_batch_size if source else None
    if stated is not None and saved is not None and stated != saved:
        raise ConfigError(
            f"training.optimization.globalBatchSize is {stated}, but the commit {source.folder if source else ''} was trained with {saved};"
            " leave it out, or set resumeFrom to None"
        )
    size = stated or saved or optimization.micro_batch_size * ranks.world_size
    done = length.Done(source.manifest.step, source.manifest.samples_consumed) if source else length.Done()
    return length.plan(
        count=len(dataset.training),
        epochs=optimization.epochs,
        max_steps=optimization.max_steps,
        global_batch_size=size,
        world_size=ranks.world_size,
        micro=optimization.micro_batch_size,
        done=done,
    )


def begun_batches(training: TrainingConfig, source: resume.VerifiedCommit | None, say: Say) -> Batches:
    """Return how steps are divided: a run with a commit goes on as it began, since with trained routers and dropout, another division is
    another training.
    """
    wanted = training.optimization.batches
    if source is None or source.manifest.batches is wanted:
        return wanted
    begun = source.manifest.batches
    if not begun.is_known:
        say(f"Batches: {begun.value}, as in {source.folder}, is of another version of Lockstep: the run goes on with {wanted.value}")
        return wanted
    say(f"Batches: {begun.value}, as in {source.folder}, and not {wanted.value}: a run goes on as it began")
    return begun


def refuse_other_nodes(sizes: Sequence[int], ranks: Ranks) -> None:
    """Raise ConfigError for a run.json, written by hand, that doesn't say every node's micro-batch."""
    if sizes and len(sizes) != ranks.nodes:
        raise ConfigError(
            f"nodeMicroBatches of run.json has {len(sizes)} numbers, but the run has {ranks.nodes} nodes; give one for every node, 0 for"
            " those that training.optimization decides"
        )


LOOKED_AT = 64
"""Samples of the first step among which the longest is the one that ranks are timed with."""


def balanced(
    config: RunConfig,
    first: Shares,
    dataset: Dataset,
    tokenizer: Tokenizer,
    plan: length.Plan,
    engine: Any,
    loss: TokenLoss,
    ranks: Ranks,
    reporter: Reporter,
) -> Shares:
    """Shares by the ranks' times with the longest of the next samples; the first ones where nothing is left to train."""
    seed, examples = config.training.seed, dataset.training
    cursor = plan.cursor(plan.done.steps + 1)
    samples = global_batch(len(examples), seed, cursor, min(LOOKED_AT, plan.global_batch_size), plan.total_samples)
    if not samples:
        return first

    def measure(size: int) -> MeasuredRank:
        longest = max((examples[index] for index in samples), key=lambda example: len(example.ids))
        return measure_rank(engine, loss, longest, tokenizer.pad, size, ranks, first.sizes.batches)

    optimization = config.training.optimization
    shares = measured_shares(first, optimization.micro_batch_size, optimization.balance, measure, ranks, reporter)
    if shares is not first:
        reporter.startup.done("balance")
    return shares


def _announce(run: Run, start: resume.Start) -> None:
    training, dataset, plan, ranks = run.config.training, run.dataset, run.plan, run.ranks
    sizes, batch = run.shares.sizes, plan.global_batch_size
    by_tokens = sizes.batches is Batches.TOKENS
    run.reporter.say(
        f"Training {Path(model_title(training.model.name)).name} | {training.zero_stage.value} {training.precision.value} |"
        f" {ranks.world_size} ranks on {ranks.nodes} nodes | {len(dataset.training)}"
        f" {'packed sequences' if training.data.packing else 'samples'}, {len(dataset.evaluation)} for evaluation | global batch {batch}"
        f" ({'by tokens' if by_tokens else f'accumulation {sizes.turns(batch)}'}) | {plan.total_steps} steps"
    )
    idle = idle_words((1,) * ranks.world_size if by_tokens else sizes.samples, batch)
    for note in (*dataset.notes, *([f"Warning: {idle}"] if idle else [])):
        run.reporter.say(note)
    if start.source is not None:
        run.reporter.say(f"Resuming from {start.source.folder} (step {start.source.manifest.step})")
        changed = changed_settings(start.source.manifest, training)
        if changed:
            run.reporter.say(f"Changed since that commit: {', '.join(changed)}")
        run.reporter.resumed(plan.done.steps, plan.total_steps, start.source.folder)
