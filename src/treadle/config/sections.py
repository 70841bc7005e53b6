"""The settings of a run: one frozen section per owner, joined in `Config`.

A field name is unique across sections, so it is also the flag (`rollout_batch_size` is `--rollout-batch-size`);
a recipe groups the same names under `[section]`. Defaults are the field's usual ones. Rules that join fields of
two sections are in `checks.py`.
"""

from __future__ import annotations

# fmt: off  # one field a line: it is a table
from typing import Literal

from pydantic import Field

from treadle.catalog import ESTIMATORS, POLICY_LOSSES, reward_names
from treadle.config.cluster import ClusterSection
from treadle.config.data import DataSection
from treadle.config.engine import EngineSection
from treadle.config.section import MAX_SECONDS, Section, with_parameters


class ModelSection(Section):
    """The model that is trained."""

    hf_checkpoint: str = Field(
        "", description="Model folder in Hugging Face format, a hub id, or a bundled name (`smollm2-135m-instruct`)."
    )
    ref_load: str | None = Field(
        None, description="Reference model for KL; the starting model where KL is used and this is not given."
    )
    opd_teacher_load: str | None = Field(
        None, description="Teacher of on-policy distillation, a model of the same vocabulary (with opd_kl_coef)."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Compute dtype; master weights are always float32. `auto` is bfloat16 where the hardware is fast at it.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model lives.")
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    fused_ops: bool = Field(
        True,
        description="Compute norms, attention's projections and MLP in training, and on a CPU the engine's whole layers, with fewer and larger operations where the architecture is known; off runs the module as it is.",
    )
    attention_backend: Literal["auto", "batched", "sdpa"] = Field(
        "auto",
        description="How packed sequences attend: `batched` matmuls over similar lengths, `sdpa` one call per sequence; `auto` is one compiled call in bfloat16 on a CPU, where GCC is there and the processor multiplies bfloat16, and else chooses between the two.",
    )


class RolloutSection(Section):
    """How samples are generated."""

    rollout_batch_size: int = Field(16, ge=1, description="Prompts in a rollout.")
    n_samples_per_prompt: int = Field(8, ge=1, description="Samples of each prompt: the size of a group.")
    rollout_temperature: float = Field(1.0, ge=0, description="Sampling temperature.")
    rollout_top_p: float = Field(
        1.0, gt=0, le=1, description="Nucleus sampling: keep the most likely tokens up to this mass."
    )
    rollout_top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0 keeps all.")
    rollout_min_p: float = Field(
        0.0, ge=0, lt=1, description="Keep tokens at least this share as likely as the most likely one."
    )
    rollout_max_response_len: int = Field(256, ge=1, description="Most new tokens in a sample.")
    rollout_stop: tuple[str, ...] = Field((), description="Strings that end a sample.")
    rollout_stop_token_ids: tuple[int, ...] = Field(
        (), description="Token ids that end a sample, beside the model's own."
    )
    rollout_seed: int = Field(42, ge=0, description="Seed of the prompt order and of every sample.")
    rollout_engine: Literal["torch", "vllm", "sglang"] = Field(
        "torch",
        description="What generates: `torch` is the embedded engine, on the trainer's own weights; `vllm` and `sglang` are servers of their own.",
    )
    group_filter: str | None = Field(
        None,
        description="Drop groups and draw others instead: zero_signal (dynamic sampling), any_failed, or your own.",
    )
    over_sampling_batch_size: int | None = Field(
        None, ge=1, description="Prompts drawn at a time with a group filter; rollout_batch_size where not given."
    )
    max_filter_rounds: int = Field(
        4, ge=1, description="Draws of a rollout with a group filter; then dropped groups fill what is missing."
    )
    max_running_requests: int = Field(256, ge=1, description="Most samples the engine decodes at once.")
    kv_cache_gib: float = Field(
        2.0, gt=0, description="Memory for keys and values; bounds how many samples run at once."
    )
    max_concurrent_prompts: int | None = Field(
        None, ge=1, description="Most prompts in flight at once; all of a rollout where not given."
    )
    custom_env_path: str | None = Field(
        None,
        description="Your own environment, `file.py:object` or `package.module:object`: answers the model between its turns.",
    )
    env_max_turns: int = Field(8, ge=1, description="Most turns of the model in a sample with an environment.")
    env_timeout_seconds: float = Field(
        60.0, gt=0, le=MAX_SECONDS, description="An environment slower than this marks its sample failed."
    )
    max_failed_fraction: float = Field(
        0.5, ge=0, le=1, description="A rollout of which a larger share of samples failed ends the run; 1 never does."
    )
    rollout_timeout_seconds: float = Field(
        3600.0, gt=0, le=MAX_SECONDS, description="Deadline of one rollout's generation and scoring."
    )


class RewardSection(Section):
    """How samples are scored."""

    rm_type: tuple[str, ...] = Field(
        (),
        description="Rewards by name (math, last_number, exact, regex, reasoning_gym) or as `package.module:function`; several are added by weight.",
    )
    rm_weights: tuple[float, ...] = Field((), description="Weight of each reward; all 1 where not given.")
    custom_rm_path: str | None = Field(
        None, description="Your own reward: `file.py:function` or `package.module:function`."
    )
    rm_regex: str | None = Field(
        None, description="Pattern of the `regex` reward: 1 where it matches somewhere in the response."
    )
    rm_timeout_seconds: float = Field(
        30.0, gt=0, le=MAX_SECONDS, description="A reward slower than this marks its sample failed."
    )
    rm_num_workers: int = Field(1, ge=1, description="Processes that run rewards.")
    reward_scale: float = Field(
        1.0, gt=0, description="Factor on the reward that is trained on; logs keep the raw one."
    )
    reward_bias: float = Field(0.0, description="Added to the scaled reward.")
    reward_clip_low: float | None = Field(None, description="Lower bound of the scaled reward.")
    reward_clip_high: float | None = Field(None, description="Upper bound of the scaled reward.")
    normalize_rewards_running: bool = Field(
        False,
        description="Then subtract the mean of all rewards of the run so far and divide by their standard deviation.",
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """Every reward given: rm_type, then custom_rm_path."""
        return self.rm_type + ((self.custom_rm_path,) if self.custom_rm_path else ())

    @property
    def part_weights(self) -> dict[str, float]:
        """Weight of each reward by the name of its part; where numbers are missing all weigh 1."""
        names = reward_names(self.targets)
        weights = self.rm_weights if len(self.rm_weights) == len(names) else (1.0,) * len(names)
        return dict(zip(names, weights, strict=True))


@with_parameters(ESTIMATORS, POLICY_LOSSES)
class AlgorithmSection(Section):
    """How rewards become a gradient."""

    advantage_estimator: str = Field(
        "grpo", description="How rewards become advantages; see the algorithms page for the names."
    )
    grpo_std_normalization: bool = Field(
        True, description="Divide by the group's standard deviation; off is Dr. GRPO's advantage."
    )
    normalize_advantages: bool = Field(False, description="Whiten advantages over all trained tokens of the rollout.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    lambd: float = Field(1.0, ge=0, le=1, description="GAE's lambda (needs a critic).")
    kl_coef: float = Field(
        0.0, ge=0, description="KL penalty inside the reward, for estimators with per-token rewards."
    )
    use_kl_loss: bool = Field(False, description="Add a KL term to the loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of the KL term.")
    kl_target: float | None = Field(
        None,
        gt=0,
        description="Steer the weight of KL so that train/kl (nats a trained token) comes to this (with kl_horizon).",
    )
    kl_horizon: int | None = Field(
        None, ge=1, description="Samples over which that weight follows; the larger, the slower."
    )
    opd_kl_coef: float = Field(
        0.0,
        ge=0,
        description="On-policy distillation: take this times (logprob of student - of teacher) off each token's advantage.",
    )
    kl_loss_type: str = Field("low_var_kl", description="KL estimator: k1, k2, k3, low_var_kl, abs, k3+.")
    entropy_coef: float = Field(0.0, description="Weight of the entropy bonus.")
    eps_clip: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Clip range of the ratio below 1, and above it unless eps_clip_high is given; 1 for no lower bound.",
    )
    eps_clip_high: float | None = Field(None, gt=0, description="Clip range of the ratio above 1.")
    eps_clip_c: float | None = Field(
        None,
        gt=1,
        description="Dual clip: bound of the loss where the advantage is negative; for dppo_tv the cap of the ratio (20).",
    )
    custom_advantage_path: str | None = Field(
        None,
        description="Your own advantages, `file.py:object`: a function of AdvantageInputs and settings, or an Estimator.",
    )
    custom_loss_path: str | None = Field(
        None, description="Your own policy loss, `file.py:function`: PolicyLossInputs to PolicyLoss."
    )
    ref_update_interval: int | None = Field(
        None, ge=1, description="Set the reference model to the policy every this many rollouts."
    )
    ref_ema_decay: float | None = Field(
        None, gt=0, lt=1, description="Let the reference model follow the policy as a moving average, once a rollout."
    )
    policy_loss: str | None = Field(
        None, description="ppo, gspo, gmpo, cispo, sapo or dppo_tv; the one the estimator is used with where not given."
    )
    use_unbiased_kl: bool = Field(
        False,
        description="Multiply the KL in the loss by the probability ratio: unbiased for tokens of the old policy.",
    )
    rollout_correction: str | None = Field(
        None,
        description="Weigh tokens by trainer over engine probability: tis, icepop, sequence, geometric or decoupled.",
    )
    correction_bound: Literal["truncate", "clip", "mask"] | None = Field(
        None, description="What happens outside the bounds: cut from above, cut, or drop; the correction's usual one."
    )
    correction_low: float | None = Field(
        None, ge=0, description="Lower bound of that weight; the correction's usual one."
    )
    correction_high: float | None = Field(
        None, gt=0, description="Upper bound of that weight; the correction's usual one."
    )
    correction_veto: float | None = Field(
        None, gt=0, lt=1, description="Drop a sample in which any token's weight is below this (1e-4, say)."
    )
    correction_reject_level: Literal["token", "sequence", "geometric"] | None = Field(
        None,
        description="Also drop tokens, or whole samples by product or geometric mean, whose weight is out of bounds.",
    )
    correction_reject_low: float | None = Field(None, ge=0, description="Lower bound of that; none where not given.")
    correction_reject_high: float | None = Field(None, gt=0, description="Upper bound of that; none where not given.")
    correction_batch_mean_one: bool = Field(
        False, description="Divide the weights by their mean over the rollout's trained tokens."
    )
    m2po_threshold: float | None = Field(
        None,
        gt=0,
        description="Drop the tokens with the largest squared gap (trainer - engine logprob) until the mean is below (0.04).",
    )
    opsm_delta: float | None = Field(
        None, gt=0, description="Drop samples with a negative advantage that drifted further than this (nats a token)."
    )
    top_entropy_fraction: float | None = Field(
        None, gt=0, le=1, description="Train only on this fraction of the tokens, those with the highest entropy."
    )
    mask_truncated: bool = Field(False, description="Leave samples that ran into the length limit out of the loss.")
    overlong_buffer_len: int | None = Field(
        None, ge=1, description="DAPO's soft penalty: the last this many tokens before the limit cost reward."
    )
    overlong_penalty_factor: float = Field(1.0, gt=0, description="Penalty at the length limit.")
    calculate_per_token_loss: bool = Field(
        False, description="Every token counts the same; otherwise every sample does."
    )
    loss_length_divisor: int | None = Field(
        None, ge=1, description="Divide each sample's token sum by this constant (Dr. GRPO) instead of its length."
    )


class CriticSection(Section):
    """The critic of `ppo`: a value model of its own, with its own optimizer."""

    critic_load: str | None = Field(
        None,
        description="Model the critic starts from, with or without a saved value head; the policy's where not given.",
    )
    critic_lr: float = Field(1e-5, gt=0, description="Peak learning rate of the critic; its schedule is the policy's.")
    critic_lr_warmup_steps: int = Field(0, ge=0, description="Optimizer steps of the critic's linear warm-up.")
    value_clip: float = Field(
        0.2, gt=0, description="The value loss does not reward moving a value further than this from the old one."
    )
    num_critic_only_steps: int = Field(
        0, ge=0, description="Rollouts in which only the critic is trained, at the start."
    )


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a decay.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Schedule after the warm-up."
    )
    lr_warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    lr_decay_steps: int | None = Field(
        None, ge=1, description="Optimizer steps until min_lr; the whole run where not given."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, on matrices only.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the gradient mean.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the squared gradient mean.")
    adam_eps: float = Field(1e-8, gt=0, description="Added to the denominator.")
    clip_grad: float = Field(1.0, gt=0, description="Clip the gradient to this global norm.")


class TrainSection(Section):
    """How long, and in what batches."""

    num_rollout: int | None = Field(None, ge=0, description="Rollouts in the run.")
    num_epoch: int | None = Field(None, ge=1, description="Instead of num_rollout: passes over the data.")
    start_rollout_id: int | None = Field(None, ge=0, description="First rollout id; a loaded checkpoint sets it.")
    global_batch_size: int | None = Field(None, ge=1, description="Samples in an optimizer step.")
    num_steps_per_rollout: int | None = Field(None, ge=1, description="Optimizer steps on each rollout.")
    use_dynamic_batch_size: bool = Field(
        True, description="Fill micro-batches up to max_tokens_per_gpu instead of a number of samples."
    )
    max_tokens_per_gpu: int = Field(
        8192, ge=1, description="Tokens in a micro-batch; one longer sample makes a micro-batch of its own."
    )
    skip_zero_advantage: bool = Field(
        True,
        description="Leave samples without advantage out of forward and backward where they add nothing to the loss: same gradient, less work.",
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="Samples in a micro-batch, with --no-use-dynamic-batch-size."
    )
    seed: int = Field(1234, ge=0, description="Seed of everything random outside the rollout.")


class ParallelSection(Section):
    """How many ranks share a model; the grid is replicate × shard × tensor, shards are what the others leave."""

    fsdp_replicate_size: int = Field(
        1,
        ge=1,
        description="Copies of the sharded model (HSDP): weights are sharded inside a copy, gradients joined over all.",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share the matrices of each layer and see the same samples."
    )
    fsdp_cpu_offload: bool = Field(
        False, description="Keep shards, gradients and AdamW in host memory and step there: slower, room for more."
    )
    fsdp_sync_every_micro_batch: bool = Field(
        False,
        description="Join gradients after each micro-batch, not once a step: more traffic, but no rank holds a whole gradient.",
    )
    distributed_timeout_seconds: float = Field(
        600.0, gt=0, le=MAX_SECONDS, description="A rank that keeps the others waiting for longer ends them."
    )


class EvalOverride(Section):
    """Settings of one evaluation set that differ from the others."""

    n_samples_per_eval_prompt: int | None = Field(None, ge=1)
    eval_temperature: float | None = Field(None, ge=0)
    eval_top_p: float | None = Field(None, gt=0, le=1)
    eval_top_k: int | None = Field(None, ge=0)
    eval_max_response_len: int | None = Field(None, ge=1)
    input_key: str | None = None
    label_key: str | None = None
    tools_key: str | None = None
    rm_type: tuple[str, ...] | None = None


class EvalSection(Section):
    """Evaluation before, during and after training."""

    eval_prompt_data: tuple[str, ...] = Field(
        (), description="Evaluation sets as `name=source`, sources as in prompt_data."
    )
    eval_interval: int | None = Field(
        None, ge=1, description="Evaluate at the start, every this many rollouts, and at the end."
    )
    n_samples_per_eval_prompt: int = Field(1, ge=1, description="Samples of each evaluation prompt.")
    eval_temperature: float = Field(0.0, ge=0, description="Evaluation temperature; 0 is greedy.")
    eval_top_p: float = Field(1.0, gt=0, le=1, description="Evaluation nucleus mass.")
    eval_top_k: int = Field(0, ge=0, description="Evaluation top-k; 0 keeps all.")
    eval_max_response_len: int | None = Field(
        None, ge=1, description="Most new tokens in an answer; the rollout's where not given."
    )
    eval_overrides: dict[str, EvalOverride] = Field(
        default_factory=dict,
        description="Per set (recipe only): `[eval.eval_overrides.NAME]` with any of the settings above.",
    )


class CheckpointSection(Section):
    """Saving and resuming."""

    save: str | None = Field(
        None, description="Folder for checkpoints; `checkpoints` in the run folder where only save_interval is given."
    )
    save_interval: int | None = Field(None, ge=1, description="Save every this many rollouts, and at the end.")
    keep_checkpoints: int | None = Field(
        None, ge=1, description="Delete all but this many newest checkpoints; all are kept where not given."
    )
    load: str | None = Field(
        None, description="Resume from a run folder, a save folder (its newest sound checkpoint), or one checkpoint."
    )


class ObserveSection(Section):
    """What is written and shown."""

    run_dir: str | None = Field(
        None, description="Run folder; the one that `load` names, or a new `runs/<recipe>-<time>`, where not given."
    )
    save_samples: bool = Field(
        True, description="Write every rollout to `samples/` in the run folder, one JSON object a line."
    )
    tensorboard: bool = Field(True, description="Write TensorBoard events to the run folder.")
    wandb_project: str | None = Field(
        None, description="Also log to this Weights & Biases project (needs the `wandb` extra)."
    )
    progress: Literal["auto", "rich", "plain", "off"] = Field(
        "auto", description="Live display; `auto` is rich on a terminal, else one line a step."
    )
    num_samples_shown: int = Field(3, ge=0, description="Sampled answers shown before and after training.")


class DebugSection(Section):
    """Run one half of the loop."""

    debug_rollout_only: bool = Field(False, description="Generate and score, never train.")
    debug_train_only: bool = Field(
        False, description="Train from saved rollouts, never generate (needs load_debug_rollout_data)."
    )
    save_debug_rollout_data: str | None = Field(
        None, description="Folder to save every rollout in, for load_debug_rollout_data."
    )
    load_debug_rollout_data: str | None = Field(
        None, description="Folder of saved rollouts to train from instead of generating."
    )


class Config(Section):
    """The whole resolved configuration of a run."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    critic: CriticSection = Field(default_factory=CriticSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    debug: DebugSection = Field(default_factory=DebugSection)
