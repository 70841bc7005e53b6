"""What a run will do, worked out before it starts: batches, length, schedule, evaluation, memory, and what is written.

`make_plan` is arithmetic on numbers it is given; `plan_run` finds those numbers without loading any weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from treadle.config import Config, RunLength, batch_arithmetic, check_config, parse_eval_sets, run_length
from treadle.data import build_eval_sets, build_source
from treadle.models.load import build_on_meta, compute_dtype, name_of, pick_device
from treadle.models.model_config import context_length, kv_heads_of
from treadle.run.build import resolve_objective
from treadle.run.evaluate import eval_sampling
from treadle.run.memory import MachineMemory, ModelShape, check_samples_fit, gib, machine_memory, memory_of_workers
from treadle.run.model_files import POLICY, TEACHER, ModelFile, ModelFiles, find_model_files, find_teacher
from treadle.run.session import with_saved_length

_LABEL_WIDTH = 13
Row = tuple[str, str]
"""A label, which is empty if the row goes on with the one above, and a text."""


@dataclass(frozen=True, slots=True)
class DataSizes:
    """The number of prompts (None if the run reads none), of those that are too long, and of those of each evaluation set."""

    num_prompts: int | None
    num_dropped: int = 0
    eval_sets: Mapping[str, int] = field(default_factory=dict)


def plan_run(config: Config, recipe_name: str = "run") -> str:
    """Work out the plan of a configuration; reads the models' config.json, the tokenizer and the data, and starts nothing.

    Raises `ConfigError`, `ModelError` or `DataError` for what would stop the run.
    """
    check_config(config)
    check_samples_fit(config, machine_memory("cpu"))
    if not config.debug.debug_rollout_only:
        resolve_objective(config)
    files = find_model_files(config, fetch_missing=False)
    shape = _model_shape(config, files.models[POLICY])
    if find_teacher(config, files) is not None:
        teacher = _model_shape(config, files.models[TEACHER])
        shape = replace(shape, teacher_parameters=teacher.parameters)
    sizes = _data_sizes(config, files)
    return make_plan(with_saved_length(config), shape, sizes, machine_memory(shape.device), recipe_name)


def make_plan(
    config: Config, shape: ModelShape, sizes: DataSizes, machine: MachineMemory, recipe_name: str = "run"
) -> str:
    """Return the plan as a page of text; raises `ConfigError` for everything that `check_config` refuses."""
    warnings = check_config(config)
    length = run_length(config, sizes.num_prompts)
    tables = [
        _model_rows(shape),
        _run_rows(config, sizes, length),
        _training_rows(config, length),
        _cluster_rows(config),
        _evaluation_rows(config, sizes),
        _written_rows(config, shape, recipe_name),
    ]
    blocks = ["\n".join(f"{label:<{_LABEL_WIDTH}}{text}".rstrip() for label, text in rows) for rows in tables]
    blocks.append(_memory_block(config, shape, machine))
    if warnings:
        blocks.append("\n".join(["warnings", *(f"  - {text}" for text in warnings)]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _model_shape(config: Config, model: ModelFile) -> ModelShape:
    """Return the model's numbers, from its config.json and a model without storage."""
    meta, text_config = build_on_meta(model.path, model.hf_config), model.hf_config.get_text_config()
    linears = [m for m in meta.base_model.modules() if isinstance(m, torch.nn.Linear)]
    kv_heads, head_dim = kv_heads_of(text_config)
    return ModelShape(
        name=config.model.hf_checkpoint,
        parameters=sum(parameter.numel() for parameter in meta.parameters()),
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        num_layers=text_config.num_hidden_layers,
        kv_dim=kv_heads * head_dim,
        linear_width=sum(linear.in_features + linear.out_features for linear in linears),
        context=context_length(text_config),
        dtype=name_of(compute_dtype(config.model.dtype, config.model.device)),
        device=pick_device(config.model.device).type,
    )


def _data_sizes(config: Config, files: ModelFiles) -> DataSizes:
    if config.debug.debug_train_only:
        return DataSizes(None)
    codec, longest = files.codec, files.max_prompt
    source = build_source(config.data, codec=codec, max_prompt_len=longest, seed=config.rollout.rollout_seed)
    sets = build_eval_sets(config.data, config.eval, codec=codec, max_prompt_len=longest)
    return DataSizes(len(source), source.num_dropped, {name: len(prompts) for name, prompts in sets.items()})


def _line(*parts: str) -> str:
    """Join the parts that are not empty."""
    return " · ".join(part for part in parts if part)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _model_rows(shape: ModelShape) -> list[Row]:
    number = shape.parameters
    size = f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
    context = f"context {shape.context} tokens"
    sizes = (f"{size} parameters", f"{shape.num_layers} layers", f"vocabulary {shape.vocab_size}", context)
    return [
        ("model", _line(shape.name, *sizes)),
        ("compute", f"{shape.dtype} on {shape.device}, master weights in float32"),
    ]


def _run_rows(config: Config, sizes: DataSizes, length: RunLength) -> list[Row]:
    debug, rollout = config.debug, config.rollout
    data = f"saved rollouts from {debug.load_debug_rollout_data}"
    if not debug.debug_train_only:
        dropped = f" ({sizes.num_dropped} dropped: too long)" if sizes.num_dropped else ""
        data = f"{' + '.join(config.data.prompt_data)} · {sizes.num_prompts} prompts{dropped}"
    rows = [("data", data)]
    if debug.debug_rollout_only:
        rows += [("batches", f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples in a rollout")]
        steps = "no optimizer steps"
    else:
        rows += [("batches", f"{batch_arithmetic(config)} ✓")]
        rows += [("", "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout")]
        steps = _count(length.optimizer_steps, "optimizer step")
    epochs = "" if length.epochs is None else f"{length.epochs:.2f} epochs"
    rows += [("run", _line(_count(length.num_rollout, "rollout"), steps, _count(length.samples, "sample"), epochs))]
    if length.leftover_prompts:
        rest = f"the last {length.leftover_prompts} prompts of the {_count(config.train.num_epoch or 0, 'epoch')}"
        rows += [("", f"the data does not divide into rollouts: {rest} are not drawn")]
    if not debug.debug_train_only:
        sampling = (
            f"temperature {rollout.rollout_temperature:g}",
            f"at most {rollout.rollout_max_response_len} new tokens",
            f"top-p {rollout.rollout_top_p:g}" if rollout.rollout_top_p < 1 else "",
            f"top-k {rollout.rollout_top_k}" if rollout.rollout_top_k else "",
            f"min-p {rollout.rollout_min_p:g}" if rollout.rollout_min_p else "",
            f"reward {' + '.join(config.reward.targets) or 'none'}",
        )
        rows += [("sampling", _line(*sampling))]
    return rows


def _training_rows(config: Config, length: RunLength) -> list[Row]:
    if config.debug.debug_rollout_only:
        return []
    algorithm, train, optim = config.algorithm, config.train, config.optim
    high = algorithm.eps_clip_high if algorithm.eps_clip_high is not None else algorithm.eps_clip
    kl = f"KL {algorithm.kl_coef:g} in the reward" if algorithm.kl_coef > 0 else "no KL"
    if algorithm.use_kl_loss:
        kl = f"KL loss {algorithm.kl_loss_coef:g} × {algorithm.kl_loss_type}"
    if algorithm.kl_target is not None:
        kl += f", steered to {algorithm.kl_target:g} nats a token over {algorithm.kl_horizon} samples"
    rows = [("algorithm", _line(algorithm.advantage_estimator, f"clip -{algorithm.eps_clip:g} +{high:g}", kl))]
    if config.model.opd_teacher_load is not None:
        rows += [("", f"distilled from {config.model.opd_teacher_load} × {algorithm.opd_kl_coef:g}")]
    by_tokens = train.use_dynamic_batch_size
    unit = f"up to {train.max_tokens_per_gpu} tokens" if by_tokens else f"{train.micro_batch_size} samples"
    warmup = f"warm-up over {_count(optim.lr_warmup_steps, 'step')}, then " if optim.lr_warmup_steps else ""
    course, total = "constant", length.optimizer_steps
    if optim.lr_decay_style != "constant":
        end = optim.lr_decay_steps or total
        course = f"{optim.lr_decay_style} decay to {optim.min_lr:g} at step {end} of {total}"
    rest = f"weight decay {optim.weight_decay:g}", f"gradient clipped to {optim.clip_grad:g}"
    return [*rows, ("micro-batch", unit), ("schedule", _line(f"lr {optim.lr:g}: {warmup}{course}", *rest))]


def _cluster_rows(config: Config) -> list[Row]:
    cluster = config.cluster
    if cluster.runtime == "local":
        return []
    where = f"Ray at {cluster.ray_address}" if cluster.ray_address else "a Ray of its own"
    trains, generates = not config.debug.debug_rollout_only, not config.debug.debug_train_only
    kinds = {
        "train worker": cluster.num_train_workers if trains else 0,
        "critic worker": cluster.num_critic_workers if trains else 0,
        "engine": cluster.num_engines if generates else 0,
    }
    *first, last = [_count(number, kind) for kind, number in kinds.items() if number]
    listed = f"{', '.join(first)} and {last}" if first else last
    shared = " on the same devices, taking turns" if cluster.colocate else ""
    rows = [("runtime", _line(where, f"{listed}{shared}", f"weights by {cluster.weight_transport}"))]
    if cluster.max_lag:
        rows += [("", f"generation runs up to {_count(cluster.max_lag, 'rollout')} ahead of the weights")]
    return rows


def _evaluation_rows(config: Config, sizes: DataSizes) -> list[Row]:
    sets, every = parse_eval_sets(config.eval.eval_prompt_data), config.eval.eval_interval
    if not sets:
        return [("evaluation", "none")]
    times = f"at the start, every {_count(every, 'rollout')}, and at the end" if every else "with `treadle eval` only"
    rows = [("evaluation", times)]
    for name, source in sets.items():
        sampling, n = eval_sampling(config, config.eval.eval_overrides.get(name))
        prompts = f"{sizes.eval_sets[name]} prompts × " if name in sizes.eval_sets else ""
        heat = f"temperature {sampling.temperature:g}" if sampling.temperature else "greedy"
        settings = f"{prompts}{_count(n, 'sample')}, {heat}, at most {sampling.max_new_tokens} new tokens"
        rows += [("", f"{name}: {source} · {settings}")]
    return rows


def _written_rows(config: Config, shape: ModelShape, recipe_name: str) -> list[Row]:
    observe, checkpoint, debug = config.observe, config.checkpoint, config.debug
    folder = observe.run_dir or f"runs/{recipe_name}-<time>"
    files = ["config.json", "metrics.jsonl", "summary.json", "curve.png"]
    files += ["samples/"] if observe.save_samples else []
    files += ["tensorboard/"] if observe.tensorboard else []
    rows = [("run folder", f"{folder}: {', '.join(files)}")]
    if checkpoint.load is not None:
        rows += [("resume", f"from {checkpoint.load}")]
    if debug.save_debug_rollout_data is not None:
        rows += [("rollouts", f"saved in {debug.save_debug_rollout_data}")]
    every, kept, saved = (
        checkpoint.save_interval,
        checkpoint.keep_checkpoints,
        "none (set save_interval to keep the weights)",
    )
    if not debug.debug_rollout_only and (checkpoint.save is not None or every is not None):
        when = f"every {_count(every, 'rollout')} and at the end" if every else "at the end"
        where = f"{when} in {checkpoint.save or f'{folder}/checkpoints'}"
        saved = _line(
            where, f"the newest {kept} kept" if kept else "all kept", f"about {gib(shape.parameters * 12)} each"
        )
    rows += [("checkpoints", saved)]
    if observe.wandb_project is not None:
        rows += [("wandb", f"project {observe.wandb_project}")]
    return rows


def _memory_block(config: Config, shape: ModelShape, machine: MachineMemory) -> str:
    """Return what each kind of worker holds and whether it fits.

    A worker has a GPU, or with `colocate` half the turns on it; on CPUs all of them share this machine.
    """
    workers = memory_of_workers(config, shape)
    parts = [part.name for worker in workers for part in worker.parts]
    shares_machine = shape.device != "cuda" and sum(worker.count for worker in workers) > 1
    is_alone = len(workers) == 1 and workers[0].count == 1

    def row(name: str, num_bytes: int, text: str) -> str:
        return f"  {name:<{max(map(len, parts))}}  {gib(num_bytes):>10}  {text}".rstrip()

    blocks = []
    for worker in workers:
        each = "" if is_alone else f" of {'each' if worker.count > 1 else 'the'} {worker.kind}"
        verdict = "" if shares_machine else _verdict(worker.num_bytes, machine)
        rows = [row(*part) for part in worker.parts]
        blocks += [f"memory{each} (estimate)", *rows, row("total", worker.num_bytes, verdict)]
    if shares_machine:
        total = sum(worker.count * worker.num_bytes for worker in workers)
        blocks.append(row("all workers", total, _verdict(total, machine)))
    return "\n".join(blocks)


def _verdict(total: int, machine: MachineMemory) -> str:
    has = f"{machine.what} has {gib(machine.total)}, {gib(machine.available)} of it free"
    if total <= machine.available:
        return f"✓ {has}"
    remedy = "lower max_tokens_per_gpu or kv_cache_gib, add gradient_checkpointing, or use a smaller model"
    return f"✗ {has}: {remedy}"
