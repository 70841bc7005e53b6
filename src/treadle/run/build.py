"""Build the parts of a run from its configuration; everything that must be closed goes onto the caller's exit stack."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.chat import Codec
from treadle.config import Config, RewardSection, batch_arithmetic
from treadle.data import PromptSource, build_eval_sets, build_source
from treadle.errors import ConfigError
from treadle.models.bundled import resolve
from treadle.models.load import compute_dtype, load_model, pick_device
from treadle.models.value import value_model_of
from treadle.rollout.conversation import TurnLimits
from treadle.rollout.engines.base import Engine
from treadle.rollout.engines.torch_engine.engine import TorchEngine
from treadle.rollout.engines.torch_engine.scheduler import EngineLimits
from treadle.rollout.envs import IsolatedEnvironment
from treadle.rollout.filters import load_filter
from treadle.rollout.manager import RolloutManager
from treadle.rollout.rewards import RewardScorer, build_scorer
from treadle.run.compute import ComputeThread
from treadle.run.evaluate import EvalSet, eval_sampling
from treadle.run.rollouts import Generation
from treadle.training.critic import Critic
from treadle.training.objective import Objective
from treadle.training.parallel import Grid, ParallelModel, ParallelSpec, as_parallel
from treadle.training.reference import Reference
from treadle.training.rollout_plan import objective_of
from treadle.training.sharded_state import Wrap, load_parallel
from treadle.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30


def load_source(config: Config, codec: Codec, max_prompt: int, warn: Callable[[str], None]) -> PromptSource:
    """Load the prompts of the run, and warn of those that are too long."""
    source = build_source(config.data, codec=codec, max_prompt_len=max_prompt, seed=config.rollout.rollout_seed)
    if source.num_dropped:
        warn(f"{source.num_dropped} prompts longer than {max_prompt} tokens are left out; {len(source)} remain")
    return source


def load_policy(config: Config, path: str, *, trainable: bool = True) -> PreTrainedModel:
    """Load a model of the run in its compute dtype, on its device."""
    model = config.model
    dtype, device = compute_dtype(model.dtype, model.device), pick_device(model.device)
    return load_model(path, dtype, device, trainable=trainable, fused=model.fused_ops)


def load_on_ranks(
    config: Config, path: str, grid: Grid, *, trainable: bool = True, wrap: Wrap | None = None
) -> ParallelModel:
    """Load a model of the run onto the ranks of a grid, which all call this."""
    model = config.model
    dtype = compute_dtype(model.dtype, model.device)
    return load_parallel(path, dtype, grid, trainable=trainable, wrap=wrap, fused=model.fused_ops)


def _load_frozen(config: Config, path: str, grid: Grid) -> ParallelModel:
    """Load a model that only scores into host memory; it moves to the device while it scores."""
    model = load_on_ranks(config, path, grid, trainable=False)
    return model if model.is_sharded else model.to("cpu")


def check_one_process(config: Config, warn: Callable[[str], None]) -> None:
    """Raise `ConfigError` if the settings ask for several ranks in a run of one process; warn of those without effect."""
    spec = ParallelSpec.of(config, 1)
    unused = ("fsdp_cpu_offload", spec.cpu_offload), ("fsdp_sync_every_micro_batch", spec.sync_every_micro_batch)
    names = [name for name, given in unused if given]
    if names:
        warn(f"in one process no model is sharded: {', '.join(names)} has no effect")


def resolve_objective(config: Config) -> Objective:
    """Load the algorithm's functions, without any weights.

    Raises:
        ConfigError: if a function of the user's breaks its contract, if settings of a critic or of groups do nothing with
            the user's estimator, or if its bounds cross the usual ones.
    """
    objective = objective_of(config)
    own = config.algorithm.custom_advantage_path
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
    """Build the trainer, and the reference, critic and teacher that the algorithm needs.

    A model on the ranks of a grid makes the trainer of this rank; all ranks call this. `critic_elsewhere` is True if the
    critic is on ranks of its own.
    """
    arithmetic, policy, needs = batch_arithmetic(config), as_parallel(model), resolve_objective(config).needs
    reference = critic = teacher = None
    if needs.ref_logprobs:
        path = resolve(config.model.ref_load or config.model.hf_checkpoint)
        reference = Reference(_load_frozen(config, path, policy.grid), config.algorithm)
    if needs.values and not critic_elsewhere:
        critic = build_critic(config, policy.grid, num_rollout, warn)
    if teacher_path is not None:
        teacher = _load_frozen(config, teacher_path, policy.grid)
    policy_steps = (num_rollout - config.critic.num_critic_only_steps) * arithmetic.num_steps_per_rollout
    return Trainer(policy, config, arithmetic, policy_steps, reference, warn, critic, teacher)


def build_critic(config: Config, grid: Grid, num_rollout: int, warn: Callable[[str], None]) -> Critic:
    """Build the critic on the ranks of a grid, which all call this: those of the policy, or ranks of its own."""
    path = resolve(config.critic.critic_load or config.model.hf_checkpoint)
    value_model = load_on_ranks(config, path, grid, wrap=value_model_of(Path(path)))
    return Critic(value_model, config, num_rollout * batch_arithmetic(config).num_steps_per_rollout, warn)


def open_torch_engine(
    config: Config, model: PreTrainedModel, codec: Codec, compute: ComputeThread, *, owns_weights: bool = False
) -> TorchEngine:
    """Open the embedded engine on this module, stepped by this thread."""
    rollout = config.rollout
    limits = EngineLimits(rollout.max_running_requests, int(rollout.kv_cache_gib * GIB), config.model.fused_ops)
    return TorchEngine(model, codec, limits, compute.executor, owns_weights=owns_weights)


Scoring = tuple[RewardScorer, list[EvalSet]]
"""The rewards of the run, and its evaluation sets."""


async def open_scoring(config: Config, codec: Codec, max_prompt: int, stack: AsyncExitStack) -> Scoring:
    """Open the rewards and load the evaluation sets; a set with rewards of its own gets a scorer of its own."""
    scorer, sets = await open_scorer(config, config.reward, stack), []
    for name, prompts in build_eval_sets(config.data, config.eval, codec=codec, max_prompt_len=max_prompt).items():
        override, own = config.eval.eval_overrides.get(name), scorer
        if override is not None and override.rm_type is not None:
            rewards = {"rm_type": override.rm_type, "rm_weights": (), "custom_rm_path": None}
            own = await open_scorer(config, config.reward.model_copy(update=rewards), stack)
        sets.append(EvalSet(name, prompts, *eval_sampling(config, override), own))
    return scorer, sets


async def open_scorer(config: Config, reward: RewardSection, stack: AsyncExitStack) -> RewardScorer:
    """Open the rewards of the run or of one evaluation set; the rules of the configuration decide if there may be none."""
    scorer = build_scorer(
        reward,
        group_wait_seconds=config.rollout.rollout_timeout_seconds,
        required=False,
        needs_value=config.rollout.custom_env_path is not None and config.algorithm.opd_kl_coef == 0,
    )
    return await stack.enter_async_context(scorer)


async def open_generation(
    config: Config,
    engine: Engine,
    codec: Codec,
    context: int,
    source: PromptSource | None,
    scoring: Scoring,
    stack: AsyncExitStack,
) -> Generation:
    """Open what generates with an engine whose model has this context, and scores."""
    rollout, environment = config.rollout, None
    if rollout.custom_env_path is not None:
        environment = await IsolatedEnvironment.open(rollout.custom_env_path, rollout.env_timeout_seconds)
        stack.push_async_callback(environment.close)
    manager = RolloutManager(
        engine,
        codec,
        timeout_seconds=rollout.rollout_timeout_seconds,
        max_concurrent_prompts=rollout.max_concurrent_prompts,
        environment=environment,
        limits=TurnLimits(rollout.env_max_turns, context),
    )
    keep = None if source is None or rollout.group_filter is None else load_filter(rollout.group_filter)
    return Generation(manager, source, *scoring, keep)
