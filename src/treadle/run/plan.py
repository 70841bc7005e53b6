"""What a run will do, worked out before it starts: batches, length, schedule, evaluation, memory, and what is written.

`make_plan` is arithmetic on numbers it is given; `plan_run` finds those numbers without loading any weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.config import Config, RunLength, batch_arithmetic, check_config, parse_eval_sets, run_length
from treadle.errors import ModelError
from treadle.run.memory import MachineMemory, ModelShape, check_samples_fit, gib, machine_memory, memory_of_workers

if TYPE_CHECKING:
    from treadle.chat import Codec

_LABEL_WIDTH = 13


@dataclass(frozen=True, slots=True)
class DataSizes:
    """How many prompts there are (None where a run reads none), and how many saved rollouts where it reads those."""

    num_prompts: int | None
    num_dropped: int = 0
    saved_rollouts: int = 0
    eval_sets: Mapping[str, int] = field(default_factory=dict)


def make_plan(
    config: Config, shape: ModelShape, sizes: DataSizes, machine: MachineMemory, recipe_name: str = "run"
) -> str:
    """The plan as a page of text. Raises `ConfigError` for everything `check_config` refuses."""
    warnings = check_config(config)
    length = run_length(_with_length(config, sizes), sizes.num_prompts)
    blocks = [
        _rows(_model_rows(shape)),
        _rows(_run_rows(config, sizes, length)),
        _rows(_training_rows(config, length)),
        _rows(_cluster_rows(config)),
        _rows(_evaluation_rows(config, sizes, length)),
        _rows(_written_rows(config, shape, recipe_name)),
        _memory_block(config, shape, machine),
    ]
    if warnings:
        blocks.append("\n".join(["warnings", *(f"  - {text}" for text in warnings)]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _with_length(config: Config, sizes: DataSizes) -> Config:
    """Training from saved rollouts takes all of them unless told otherwise."""
    if not config.debug.debug_train_only or config.train.num_rollout is not None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"num_rollout": sizes.saved_rollouts})})


def plan_run(config: Config, recipe_name: str = "run") -> str:
    """Work out the plan of a configuration; reads the model's config.json and tokenizer and the data, starts nothing.

    Raises `ConfigError`, `ModelError` or `DataError` for what would stop the run.
    """
    check_config(config)
    check_samples_fit(config, machine_memory("cpu"))
    from treadle.chat import load_codec
    from treadle.models.bundled import resolve
    from treadle.run.build import check_models, find_teacher, longest_prompt, resolve_objective
    from treadle.run.vocabulary import check_vocabulary

    if not config.debug.debug_rollout_only:
        resolve_objective(config)
    name = config.model.hf_checkpoint
    path = resolve(name, fetch_missing=False)
    if path != name and not (Path(path) / "config.json").is_file():
        raise ModelError(f"{name} is not on this machine yet; `treadle model fetch {name}` downloads it")
    check_models(config, path, fetch_missing=False)
    shape = _model_shape(config, path)
    codec = load_codec(path, config.data.template_kwargs)
    check_vocabulary(config, codec, path, fetch_missing=False)
    max_prompt = longest_prompt(config, path)
    teacher = find_teacher(config, codec, max_prompt, fetch_missing=False)
    if teacher is not None:
        shape = replace(shape, teacher_parameters=_model_shape(config, teacher).parameters)
    sizes = _data_sizes(config, codec, max_prompt)
    return make_plan(config, shape, sizes, machine_memory(shape.device), recipe_name)


def _model_shape(config: Config, path: str) -> ModelShape:
    """The model's numbers from its config.json and a model without storage."""
    import torch

    from treadle.models.load import build_on_meta, compute_dtype, pick_device
    from treadle.models.model_config import context_length, kv_heads_of, load_config

    hf_config = load_config(path)
    model = build_on_meta(path, hf_config)
    text_config = hf_config.get_text_config()
    linears = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    kv_heads, head_dim = kv_heads_of(text_config)
    return ModelShape(
        name=config.model.hf_checkpoint,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=text_config.vocab_size,
        hidden_size=text_config.hidden_size,
        num_layers=text_config.num_hidden_layers,
        kv_dim=kv_heads * head_dim,
        linear_width=sum(linear.in_features + linear.out_features for linear in linears),
        context=context_length(text_config),
        dtype=str(compute_dtype(config.model.dtype, config.model.device)).removeprefix("torch."),
        device=pick_device(config.model.device).type,
    )


def _data_sizes(config: Config, codec: Codec, max_prompt_len: int) -> DataSizes:
    from treadle.data import build_eval_sets, build_source
    from treadle.observe.samples import rollout_ids

    saved = config.debug.load_debug_rollout_data
    if saved is not None:
        return DataSizes(None, saved_rollouts=max(rollout_ids(Path(saved)), default=-1) + 1)
    source = build_source(config.data, codec=codec, max_prompt_len=max_prompt_len, seed=config.rollout.rollout_seed)
    sets = build_eval_sets(config.data, config.eval, codec=codec, max_prompt_len=max_prompt_len)
    return DataSizes(len(source), source.num_dropped, eval_sets={name: len(prompts) for name, prompts in sets.items()})


Row = tuple[str, str]


def _rows(rows: Iterator[Row]) -> str:
    return "\n".join(f"{label:<{_LABEL_WIDTH}}{text}".rstrip() for label, text in rows)


def _model_rows(shape: ModelShape) -> Iterator[Row]:
    yield (
        "model",
        f"{shape.name} · {_million(shape.parameters)} parameters · {shape.num_layers} layers · "
        f"vocabulary {shape.vocab_size} · context {shape.context} tokens",
    )
    yield "compute", f"{shape.dtype} on {shape.device}, master weights in float32"


def _million(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _run_rows(config: Config, sizes: DataSizes, length: RunLength) -> Iterator[Row]:
    debug = config.debug
    if debug.debug_train_only:
        yield "data", f"saved rollouts from {debug.load_debug_rollout_data}"
    else:
        dropped = f" ({sizes.num_dropped} dropped: too long)" if sizes.num_dropped else ""
        yield "data", f"{' + '.join(config.data.prompt_data)} · {sizes.num_prompts} prompts{dropped}"
    if not debug.debug_rollout_only:
        yield "batches", f"{batch_arithmetic(config)} ✓"
        yield "", "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout"
    else:
        yield (
            "batches",
            f"{config.rollout.rollout_batch_size} × {config.rollout.n_samples_per_prompt} samples in a rollout",
        )
    steps = "no optimizer steps" if debug.debug_rollout_only else _count(length.optimizer_steps, "optimizer step")
    epochs = "" if length.epochs is None else f" · {length.epochs:.2f} epochs"
    yield "run", f"{_count(length.num_rollout, 'rollout')} · {steps} · {_count(length.samples, 'sample')}{epochs}"
    if length.leftover_prompts:
        yield (
            "",
            f"the data does not divide into rollouts: the last {length.leftover_prompts} prompts of the "
            f"{_count(config.train.num_epoch or 0, 'epoch')} are not drawn",
        )
    if not debug.debug_train_only:
        yield "sampling", _sampling(config)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _sampling(config: Config) -> str:
    rollout = config.rollout
    parts = [f"temperature {rollout.rollout_temperature:g}", f"at most {rollout.rollout_max_response_len} new tokens"]
    parts += [f"top-p {rollout.rollout_top_p:g}"] if rollout.rollout_top_p < 1 else []
    parts += [f"top-k {rollout.rollout_top_k}"] if rollout.rollout_top_k else []
    parts += [f"min-p {rollout.rollout_min_p:g}"] if rollout.rollout_min_p else []
    return f"{' · '.join(parts)} · reward {' + '.join(config.reward.targets) or 'none'}"


def _training_rows(config: Config, length: RunLength) -> Iterator[Row]:
    if config.debug.debug_rollout_only:
        return
    algorithm, train = config.algorithm, config.train
    high = algorithm.eps_clip_high if algorithm.eps_clip_high is not None else algorithm.eps_clip
    kl = "no KL"
    if algorithm.use_kl_loss:
        kl = f"KL loss {algorithm.kl_loss_coef:g} × {algorithm.kl_loss_type}"
    elif algorithm.kl_coef > 0:
        kl = f"KL {algorithm.kl_coef:g} in the reward"
    if algorithm.kl_target is not None:
        kl += f", steered to {algorithm.kl_target:g} nats a token over {algorithm.kl_horizon} samples"
    yield "algorithm", f"{algorithm.advantage_estimator} · clip -{algorithm.eps_clip:g} +{high:g} · {kl}"
    if config.model.opd_teacher_load is not None:
        yield "", f"distilled from {config.model.opd_teacher_load} × {algorithm.opd_kl_coef:g}"
    unit = (
        f"{train.micro_batch_size} samples"
        if not train.use_dynamic_batch_size
        else f"up to {train.max_tokens_per_gpu} tokens"
    )
    yield "micro-batch", unit
    yield "schedule", _schedule(config, length.optimizer_steps)


def _schedule(config: Config, total_steps: int) -> str:
    optim = config.optim
    warmup = f"warm-up over {_count(optim.lr_warmup_steps, 'step')}, then " if optim.lr_warmup_steps else ""
    if optim.lr_decay_style == "constant":
        course = "constant"
    else:
        end = optim.lr_decay_steps or total_steps
        course = f"{optim.lr_decay_style} decay to {optim.min_lr:g} at step {end} of {total_steps}"
    rest = f"weight decay {optim.weight_decay:g} · gradient clipped to {optim.clip_grad:g}"
    return f"lr {optim.lr:g}: {warmup}{course} · {rest}"


def _cluster_rows(config: Config) -> Iterator[Row]:
    cluster = config.cluster
    if cluster.runtime == "local":
        return
    where = f"Ray at {cluster.ray_address}" if cluster.ray_address else "a Ray of its own"
    trains, generates = not config.debug.debug_rollout_only, not config.debug.debug_train_only
    kinds = (
        ("train worker", cluster.num_train_workers if trains else 0),
        ("critic worker", cluster.num_critic_workers if trains else 0),
        ("engine", cluster.num_engines if generates else 0),
    )
    workers = [_count(number, kind) for kind, number in kinds if number]
    listed = " and ".join([", ".join(workers[:-1]), workers[-1]] if len(workers) > 1 else workers)
    shared = " on the same devices, taking turns" if cluster.colocate else ""
    yield "runtime", f"{where} · {listed}{shared} · weights by {cluster.weight_transport}"
    if cluster.max_lag:
        yield "", f"generation runs up to {_count(cluster.max_lag, 'rollout')} ahead of the weights"


def _evaluation_rows(config: Config, sizes: DataSizes, length: RunLength) -> Iterator[Row]:
    sets = parse_eval_sets(config.eval.eval_prompt_data)
    if not sets:
        yield "evaluation", "none"
        return
    every = config.eval.eval_interval
    times = f"at the start, every {_count(every, 'rollout')}, and at the end" if every else "with `treadle eval` only"
    yield "evaluation", times
    for name, source in sets.items():
        override = config.eval.eval_overrides.get(name)
        settings = config.eval.model_dump() | ({} if override is None else override.model_dump(exclude_none=True))
        prompts = f"{sizes.eval_sets[name]} prompts × " if name in sizes.eval_sets else ""
        longest = settings["eval_max_response_len"] or config.rollout.rollout_max_response_len
        heat = settings["eval_temperature"]
        yield (
            "",
            f"{name}: {source} · {prompts}{_count(settings['n_samples_per_eval_prompt'], 'sample')}, "
            f"{'greedy' if heat == 0 else f'temperature {heat:g}'}, at most {longest} new tokens",
        )


def _written_rows(config: Config, shape: ModelShape, recipe_name: str) -> Iterator[Row]:
    observe, checkpoint, debug = config.observe, config.checkpoint, config.debug
    folder = observe.run_dir or f"runs/{recipe_name}-<time>"
    files = ["config.json", "metrics.jsonl", "summary.json", "curve.png"]
    files += ["samples/"] if observe.save_samples else []
    files += ["tensorboard/"] if observe.tensorboard else []
    yield "run folder", f"{folder}: {', '.join(files)}"
    if checkpoint.load is not None:
        yield "resume", f"from {checkpoint.load}"
    if debug.save_debug_rollout_data is not None:
        yield "rollouts", f"saved in {debug.save_debug_rollout_data}"
    if debug.debug_rollout_only or (checkpoint.save is None and checkpoint.save_interval is None):
        yield "checkpoints", "none (set save_interval to keep the weights)"
        return
    every = checkpoint.save_interval
    when = f"every {_count(every, 'rollout')} and at the end" if every else "at the end"
    kept = f"the newest {checkpoint.keep_checkpoints} kept" if checkpoint.keep_checkpoints else "all kept"
    size = gib(shape.parameters * 12)
    yield "checkpoints", f"{when} in {checkpoint.save or f'{folder}/checkpoints'} · {kept} · about {size} each"
    if observe.wandb_project is not None:
        yield "wandb", f"project {observe.wandb_project}"


def _memory_block(config: Config, shape: ModelShape, machine: MachineMemory) -> str:
    """What each kind of worker holds. A worker has a GPU, or with `colocate` half the turns on it; on CPUs all share
    this machine, as far as it is known here."""
    workers = memory_of_workers(config, shape)
    width = max(len(part.name) for worker in workers for part in worker.parts)
    blocks = []
    shares_machine = shape.device != "cuda" and sum(worker.count for worker in workers) > 1
    for worker in workers:
        each = (
            ""
            if len(workers) == 1 and worker.count == 1
            else f" of {'each' if worker.count > 1 else 'the'} {worker.kind}"
        )
        lines = [f"memory{each} (estimate)"]
        lines += [f"  {part.name:<{width}}  {gib(part.num_bytes):>10}  {part.note}".rstrip() for part in worker.parts]
        verdict = "" if shares_machine else _verdict(worker.num_bytes, machine)
        lines.append(f"  {'total':<{width}}  {gib(worker.num_bytes):>10}  {verdict}".rstrip())
        blocks.append("\n".join(lines))
    if shares_machine:
        total = sum(worker.count * worker.num_bytes for worker in workers)
        where = _verdict(total, machine)
        blocks.append(f"  {'all workers':<{width}}  {gib(total):>10}  {where}")
    return "\n".join(blocks)


def _verdict(total: int, machine: MachineMemory) -> str:
    has = f"{machine.what} has {gib(machine.total)}, {gib(machine.available)} of it free"
    if total <= machine.available:
        return f"✓ {has}"
    remedy = "lower max_tokens_per_gpu or kv_cache_gib, add gradient_checkpointing, or use a smaller model"
    return f"✗ {has}: {remedy}"
