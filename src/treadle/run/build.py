"""Build the parts of a run from its configuration; everything that must be closed goes onto the caller's exit stack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.chat import Codec, load_codec
from treadle.config import Config, RewardSection, batch_arithmetic
from treadle.data import PromptSource, build_eval_sets, build_source
from treadle.errors import ConfigError, ModelError
from treadle.models.bundled import resolve
from treadle.models.load import check_loadable, compute_dtype, load_model, pick_device
from treadle.models.model_config import context_length, context_note, load_config
from treadle.models.value import value_model_of
from treadle.rollout.conversation import TurnLimits
from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.torch_engine.check import check_generation
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.envs import IsolatedEnvironment
from treadle.rollout.manager import RolloutManager
from treadle.rollout.rewards import RewardScorer, build_scorer
from treadle.run.compute import ComputeThread
from treadle.run.evaluate import EvalSet, eval_sampling
from treadle.training.critic import Critic
from treadle.training.objective import Objective, build_objective
from treadle.training.parallel import Grid, ParallelModel, ParallelSpec, as_parallel
from treadle.training.reference import Reference
from treadle.training.sharded_state import load_parallel
from treadle.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30


def longest_prompt(config: Config, model_path: str) -> int:
    """Most tokens a prompt may have: as configured, or what the model's context leaves beside the longest response.

    Raises `ConfigError` where the two do not fit the context together.
    """
    hf_config = load_config(model_path)
    context = context_length(hf_config)
    response = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    room = context - response
    asked = config.data.rollout_max_prompt_len
    if room < 1 or (asked is not None and asked > room):
        parts = f"{asked or 1} prompt and {response} response tokens"
        raise ConfigError(
            f"{parts} do not fit the model's context of {context}{context_note(hf_config)}; "
            "lower --rollout-max-prompt-len or --rollout-max-response-len"
        )
    return asked or room


def load_source(config: Config, codec: Codec, max_prompt: int, warn: Callable[[str], None]) -> PromptSource:
    """The prompts of the run; says how many were too long."""
    source = build_source(config.data, codec=codec, max_prompt_len=max_prompt, seed=config.rollout.rollout_seed)
    if source.num_dropped:
        warn(f"{source.num_dropped} prompts longer than {max_prompt} tokens are left out; {len(source)} remain")
    return source


def check_models(config: Config, model_path: str, *, fetch_missing: bool = True) -> None:
    """Check that the architecture of every model of the run is supported, before weights are read.

    Raises:
        ModelError: if Treadle does not compute what the model does, in training or (with the torch engine) token by token.
    """
    fused = config.model.fused_ops
    probe = check_loadable(model_path, load_config(model_path), fused=fused)
    generates = not config.debug.debug_train_only
    if generates and config.rollout.rollout_engine == "torch":
        try:
            check_generation(probe, fused=fused)
        except ModelError as error:
            raise ModelError(f"{model_path!r}: {error}") from error
    for name in config.models_beside.values():
        path = resolve(name, fetch_missing=fetch_missing)
        if path == name or (Path(path) / "config.json").is_file():  # else a bundled model that is not here yet
            check_loadable(path, load_config(path), fused=fused)


def load_policy(config: Config, path: str, *, trainable: bool = True) -> PreTrainedModel:
    """A model of the run, in its compute dtype and on its device."""
    model = config.model
    dtype, device = compute_dtype(model.dtype, model.device), pick_device(model.device)
    return load_model(path, dtype, device, trainable=trainable, fused=model.fused_ops)


def load_on_ranks(config: Config, path: str, grid: Grid, *, trainable: bool = True) -> ParallelModel:
    """A model of the run on the ranks of a grid, which all call this."""
    model = config.model
    dtype = compute_dtype(model.dtype, model.device)
    return load_parallel(path, dtype, grid, trainable=trainable, fused=model.fused_ops)


def _load_frozen(config: Config, path: str, grid: Grid) -> ParallelModel:
    """A model that only scores: in host memory, and lent to the device when it does."""
    model = load_on_ranks(config, path, grid, trainable=False)
    return model if model.is_sharded else model.to("cpu")


def check_one_process(config: Config, warn: Callable[[str], None]) -> None:
    """Raise `ConfigError` where the settings ask for more ranks than the one of a run in one process."""
    spec = ParallelSpec.of(config, 1)
    unused = ("fsdp_cpu_offload", spec.cpu_offload), ("fsdp_sync_every_micro_batch", spec.sync_every_micro_batch)
    names = [name for name, given in unused if given]
    if names:
        warn(f"in one process no model is sharded: {', '.join(names)} has no effect")


def find_teacher(config: Config, codec: Codec, max_prompt: int, *, fetch_missing: bool = True) -> str | None:
    """The model folder of the teacher, or None where nothing is distilled; loads no weights.

    Raises `ConfigError` where a token of the student is not the same token of the teacher, or where the longest sample
    is longer than its context.
    """
    name = config.model.opd_teacher_load
    if name is None or config.debug.debug_rollout_only:
        return None
    path = resolve(name, fetch_missing=fetch_missing)
    theirs, limits = load_codec(path).vocabulary(), load_config(path).get_text_config()
    needed = codec.largest_id[0] + 1
    other = next((token for token, number in codec.vocabulary().items() if theirs.get(token) != number), None)
    if other is not None or limits.vocab_size < needed:
        what = f"embeddings for {limits.vocab_size} of {needed} ids" if other is None else f"{other!r} differs"
        raise ConfigError(
            f"opd_teacher_load {name!r} has another vocabulary than {config.model.hf_checkpoint!r} ({what}): distillation "
            "compares the logprob of the same token; choose a teacher with the same tokenizer"
        )
    longest = max_prompt + config.rollout.rollout_max_response_len
    if longest > context_length(limits):
        raise ConfigError(
            f"opd_teacher_load {name!r} has a context of {context_length(limits)}, samples may have {longest} tokens; "
            "lower --rollout-max-prompt-len or --rollout-max-response-len"
        )
    return path


def resolve_objective(config: Config) -> Objective:
    """The algorithm as functions; loads no weights.

    Raises `ConfigError` for what can't be told from the configuration alone: functions of the user's that break their
    contract, a critic's flags or groups of one where the user's estimator says it has no critic or compares groups,
    and bounds that cross the usual ones.
    """
    algorithm = config.algorithm
    objective = build_objective(algorithm, config.rollout.rollout_max_response_len, config.reward.part_weights)
    own = algorithm.custom_advantage_path
    if own is None:  # the rules of the configuration know the others
        return objective
    if not objective.needs.values:
        fields = type(config.critic).model_fields
        given = [f"{k} = {v}" for k, v in config.critic.model_dump().items() if v != fields[k].default]
        given += [f"{k} = {v}" for k, v in config.cluster.critic_numbers.items() if v is not None]
        if given:
            raise ConfigError(f"{', '.join(given)} does nothing with custom_advantage_path {own!r}: it has no critic")
    if objective.needs.groups and config.rollout.n_samples_per_prompt == 1 and not objective.needs.teacher_logprobs:
        raise ConfigError(
            f"n_samples_per_prompt = 1 gives custom_advantage_path {own!r} nothing to compare; set 2 or more"
        )
    return objective


def build_trainer(
    config: Config,
    model: PreTrainedModel | ParallelModel,
    num_rollout: int,
    warn: Callable[[str], None],
    teacher_path: str | None = None,
    *,
    critic_elsewhere: bool = False,
) -> Trainer:
    """The trainer, with a reference model where the algorithm uses KL, a critic where it uses values (unless that is
    on ranks of its own), and the teacher.

    A model on the ranks of a grid makes the trainer of this rank; all ranks call this.
    """
    arithmetic = batch_arithmetic(config)
    policy = as_parallel(model)
    reference = None
    objective = resolve_objective(config)
    if objective.needs.ref_logprobs:
        path = resolve(config.model.ref_load or config.model.hf_checkpoint)
        reference = Reference(_load_frozen(config, path, policy.grid), config.algorithm)
    critic = None
    if objective.needs.values and not critic_elsewhere:
        critic = build_critic(config, policy.grid, num_rollout, warn)
    teacher = None
    if teacher_path is not None:
        teacher = _load_frozen(config, teacher_path, policy.grid)
    policy_steps = (num_rollout - config.critic.num_critic_only_steps) * arithmetic.num_steps_per_rollout
    return Trainer(policy, config, arithmetic, policy_steps, reference, warn, critic, teacher)


def build_critic(config: Config, grid: Grid, num_rollout: int, warn: Callable[[str], None]) -> Critic:
    """The critic on the ranks of a grid, which all call this: those of the policy, or ranks of its own."""
    path = resolve(config.critic.critic_load or config.model.hf_checkpoint)
    dtype = compute_dtype(config.model.dtype, config.model.device)
    value_model = load_parallel(path, dtype, grid, wrap=value_model_of(Path(path)), fused=config.model.fused_ops)
    return Critic(value_model, config, num_rollout * batch_arithmetic(config).num_steps_per_rollout, warn)


def open_torch_engine(
    config: Config, model: PreTrainedModel, codec: Codec, compute: ComputeThread, *, owns_weights: bool = False
) -> TorchEngine:
    """Open the embedded engine on this module, stepped by this thread."""
    rollout = config.rollout
    assert rollout.rollout_engine == "torch"
    limits = EngineLimits(rollout.max_running_requests, int(rollout.kv_cache_gib * GIB), config.model.fused_ops)
    return TorchEngine(model, codec, limits, compute.executor, owns_weights=owns_weights)


async def open_manager(
    config: Config, engine: Engine, codec: Codec, max_length: int, stack: AsyncExitStack
) -> RolloutManager:
    """Open the manager that feeds an engine whose model has a context of `max_length`."""
    rollout = config.rollout
    environment = None
    if rollout.custom_env_path is not None:
        environment = await IsolatedEnvironment.open(rollout.custom_env_path, rollout.env_timeout_seconds)
        stack.push_async_callback(environment.close)
    return RolloutManager(
        engine,
        codec,
        timeout_seconds=rollout.rollout_timeout_seconds,
        max_concurrent_prompts=rollout.max_concurrent_prompts,
        environment=environment,
        limits=TurnLimits(rollout.env_max_turns, max_length),
    )


async def open_scorer(config: Config, reward: RewardSection, stack: AsyncExitStack) -> RewardScorer:
    """Open the rewards of the run, or of one evaluation set; the rules of the configuration say where there may be none."""
    wait = config.rollout.rollout_timeout_seconds
    scorer = build_scorer(reward, group_wait_seconds=wait, required=False)
    scorer.needs_value = config.rollout.custom_env_path is not None and config.algorithm.opd_kl_coef == 0
    return await stack.enter_async_context(scorer)


async def open_eval_sets(
    config: Config, codec: Codec, max_prompt: int, scorer: RewardScorer, stack: AsyncExitStack
) -> list[EvalSet]:
    """The evaluation sets; a set with rewards of its own gets a scorer of its own."""
    sets = []
    for name, prompts in build_eval_sets(config.data, config.eval, codec=codec, max_prompt_len=max_prompt).items():
        override = config.eval.eval_overrides.get(name)
        own = scorer
        if override is not None and override.rm_type is not None:
            section = config.reward.model_copy(
                update={"rm_type": override.rm_type, "rm_weights": (), "custom_rm_path": None}
            )
            own = await open_scorer(config, section, stack)
        sampling, n = eval_sampling(config, override)
        sets.append(EvalSet(name, prompts, sampling, n, own))
    return sets
