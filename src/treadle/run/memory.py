"""The memory that a run takes, by worker and part, and the memory that the machine has.

Estimates: weights and optimizer are exact; activations are counted from the widths of the linear layers with a factor
measured on Llama-shaped models without fused operations (saved tensors of a packed forward pass, within 5 %); fused layers
keep less of their MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from treadle.config import Config, batch_arithmetic
from treadle.errors import ConfigError
from treadle.metrics import Metric, metric

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_SAVED_PER_LINEAR_WIDTH = 1.2
"""Saved tensors of the body, in units of (input + output width of all its linear layers) per token."""
_WHOLE_WIDTHS = 7
"""Sides of a layer's matrices that have the model's width and are whole on tensor-parallel neighbours (Llama's shape)."""
_LOGIT_TILES = 4
"""Tiles of logits that exist at once."""
_LEAST_SAMPLE_BYTES = 512
"""Bytes of a sample without its tokens: an object with four arrays."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that memory depends on.

    `parameters` counts tied weights once. `kv_dim` is the width of the keys (and of the values) of one layer.
    `linear_width` sums input and output widths of all linear layers but the head. `teacher_parameters` are those of
    the teacher of distillation, or 0.
    """

    name: str
    parameters: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    kv_dim: int
    linear_width: int
    context: int
    dtype: str
    device: str
    teacher_parameters: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return _DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.itemsize


class MemoryPart(NamedTuple):
    """One line of the estimate."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What each of `count` processes of a kind holds when it holds most."""

    kind: str
    count: int
    parts: tuple[MemoryPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


class MachineMemory(NamedTuple):
    """The memory of a device in bytes, and the device's name in messages."""

    total: int
    available: int
    what: str = "this machine"


def gib(num_bytes: float) -> str:
    """Return bytes as GiB with three significant digits.

    >>> gib(3 * 2**30), gib(2**29)
    ('3.00 GiB', '0.50 GiB')
    """
    value = num_bytes / 2**30
    return f"{value:.2f} GiB" if value < 100 else f"{value:.0f} GiB"


def memory_of_workers(config: Config, shape: ModelShape) -> tuple[WorkerMemory, ...]:
    """Return what each worker of the run holds when it holds most; the local runtime has one process."""
    cluster, trains = config.cluster, not config.debug.debug_rollout_only
    generation = () if config.debug.debug_train_only else tuple(_generation(config, shape))
    if cluster.runtime == "local":
        training = _training(config, shape, 1) if trains else ()
        return (WorkerMemory("process", 1, (*_weights(config, shape, 1), *training, *generation)),)
    found = []
    if trains:
        ranks, own = cluster.num_train_workers, cluster.num_critic_workers
        parts = (*_weights(config, shape, ranks), *_training(config, shape, ranks))
        found.append(WorkerMemory("train worker", ranks, parts))
        if _has_critic(config) and own:
            parts = (*_model(config, shape, own), _activations(config, shape, own))
            found.append(WorkerMemory("critic worker", own, parts))
    if generation:
        found.append(WorkerMemory("engine", cluster.num_engines, (*_weights(config, shape, 1), *generation)))
    return tuple(found)


def _weights(config: Config, shape: ModelShape, ranks: int) -> Iterator[MemoryPart]:
    """Return the bytes of the weights with which a rank computes: all, or those that a sharded model gathers at a time."""
    size, note = float(shape.weight_bytes), ""
    if ranks > 1:
        embeddings = shape.vocab_size * shape.hidden_size
        layer = (shape.parameters - embeddings) / shape.num_layers / config.parallel.tensor_parallel_size
        size, note = shape.itemsize * (embeddings + 2 * layer), "gathered: two layers at a time"
    yield MemoryPart(f"weights ({shape.dtype})", int(size), note)


def _trained_state(config: Config, shape: ModelShape, ranks: int) -> Iterator[MemoryPart]:
    """Master weights, gradients and Adam's moments of a model on so many ranks; shards are masters."""
    parallel, parameters, is_sharded = config.parallel, shape.parameters, ranks > 1
    own = parameters * parallel.fsdp_replicate_size // ranks if is_sharded else parameters
    note = f"a shard, 1/{ranks // parallel.fsdp_replicate_size}" if own < parameters else ""
    on_host = is_sharded and parallel.fsdp_cpu_offload and shape.device == "cuda"
    if not on_host and (shape.dtype != "float32" or is_sharded):
        yield MemoryPart("master weights (float32)", own * 4, note)
    if not is_sharded or parallel.fsdp_sync_every_micro_batch:
        yield MemoryPart("gradients (float32)", own * 4, note)
    else:
        whole = parameters * 4 // parallel.tensor_parallel_size
        yield MemoryPart("gradients (float32)", whole, "whole until ranks join them")
    if not on_host:
        yield MemoryPart("Adam (two moments)", own * 8, note)


def _model(config: Config, shape: ModelShape, ranks: int) -> Iterator[MemoryPart]:
    """Return the memory of a model that is trained on this many ranks."""
    yield from _weights(config, shape, ranks)
    yield from _trained_state(config, shape, ranks)


def _training(config: Config, shape: ModelShape, ranks: int) -> Iterator[MemoryPart]:
    """Return what a rank of the policy holds beside its weights."""
    yield from _trained_state(config, shape, ranks)
    pieces = ranks // config.parallel.fsdp_replicate_size if ranks > 1 else 1
    frozen_here = ranks == 1 or shape.device != "cuda"  # shards of frozen models stay on the host
    if frozen_here and (config.algorithm.use_kl_loss or config.algorithm.kl_coef > 0):
        name = config.model.ref_load or "the starting model"
        yield MemoryPart("reference model", shape.weight_bytes // pieces, name)
    if frozen_here and shape.teacher_parameters:
        size = shape.teacher_parameters * shape.itemsize // pieces
        yield MemoryPart("teacher", size, config.model.opd_teacher_load or "")
    alone = config.cluster.runtime == "ray" and config.cluster.num_critic_workers
    if _has_critic(config) and not alone:
        size = sum(part.num_bytes for part in _model(config, shape, ranks))
        yield MemoryPart("critic", size, "weights, masters, gradients, Adam")
    yield _activations(config, shape, ranks)
    yield MemoryPart("logits", _logit_bytes(shape), "made in tiles")


def _has_critic(config: Config) -> bool:
    return config.algorithm.estimator is not None and config.algorithm.estimator.needs_values


def _generation(config: Config, shape: ModelShape) -> Iterator[MemoryPart]:
    """Return what an engine holds beside its weights."""
    per_token = 2 * shape.num_layers * shape.kv_dim * shape.itemsize
    room, longest = int(config.rollout.kv_cache_gib * 2**30), _sample_tokens(config)
    if config.rollout.rollout_engine != "torch" and not config.engine.rollout_external_engine_addrs:
        yield MemoryPart("the server's weights", shape.weight_bytes, "and what it needs itself")
    at_once = min(room // (per_token * longest), config.rollout.max_running_requests)
    yield MemoryPart("KV cache", room, f"{room // per_token} tokens: {at_once} samples of {longest} tokens at once")


def _sample_tokens(config: Config) -> int:
    """Return the tokens of a long sample: the limits of the response and, if there is one, of the prompt."""
    return config.rollout.rollout_max_response_len + (config.data.rollout_max_prompt_len or 0)


def micro_batch_tokens(config: Config) -> int:
    """Return the most tokens in a micro-batch, which is never more than an optimizer step has."""
    longest, batch = _sample_tokens(config), batch_arithmetic(config).global_batch_size
    if config.train.use_dynamic_batch_size:
        return max(longest, min(config.train.max_tokens_per_gpu, batch * longest))
    return min(config.train.micro_batch_size or 1, batch) * longest


def _activations(config: Config, shape: ModelShape, ranks: int) -> MemoryPart:
    tokens, tensor = micro_batch_tokens(config), config.parallel.tensor_parallel_size if ranks > 1 else 1
    whole = min(shape.linear_width, _WHOLE_WIDTHS * shape.num_layers * shape.hidden_size)
    per_token = _SAVED_PER_LINEAR_WIDTH * shape.itemsize * (whole + (shape.linear_width - whole) / tensor)
    if config.model.gradient_checkpointing:
        per_token = per_token / shape.num_layers + shape.num_layers * shape.hidden_size * shape.itemsize
    return MemoryPart("activations", int(tokens * per_token), f"a micro-batch of {tokens} tokens")


def _logit_bytes(shape: ModelShape) -> int:
    from treadle.algorithms.logprobs import CPU_TILE, GPU_TILE

    rows, columns = GPU_TILE if shape.device == "cuda" else CPU_TILE
    return _LOGIT_TILES * rows * min(columns, shape.vocab_size) * 4


def check_samples_fit(config: Config, machine: MachineMemory, *, evaluation_only: bool = False) -> None:
    """Raise `ConfigError` if the samples that exist at once are more than the machine's memory could ever hold.

    Counts only what every sample takes however short it is, so what it refuses would run out of memory for certain.
    """
    rollout, section = config.rollout, config.eval
    counts: dict[str, int] = {}
    if not (evaluation_only or config.debug.debug_train_only):
        drawn, extra = rollout.rollout_batch_size, rollout.over_sampling_batch_size or 0
        name = "over_sampling_batch_size" if extra > drawn else "rollout_batch_size"
        counts[f"{name} × n_samples_per_prompt"] = max(drawn, extra) * rollout.n_samples_per_prompt
    if section.eval_prompt_data:
        own = [override.n_samples_per_eval_prompt or 0 for override in section.eval_overrides.values()]
        counts["n_samples_per_eval_prompt"] = max([section.n_samples_per_eval_prompt, *own])
    for name, count in counts.items():
        if count * _LEAST_SAMPLE_BYTES > machine.total:
            raise ConfigError(
                f"{name} = {count} samples take at least {gib(count * _LEAST_SAMPLE_BYTES)} of memory, but {machine.what} has "
                f"{gib(machine.total)}; lower them"
            )


class PeakMemory:
    """Measures the memory of this process, or of its GPU if it computes on one, and remembers the most it found."""

    def __init__(self, device: str) -> None:
        self._device, self._peak = device, 0.0

    def metrics(self) -> list[Metric]:
        """Return the memory in use now, and the most so far."""
        now, _ = self._measure()
        return [metric("perf/memory_gib", now / 2**30), metric("perf/peak_memory_gib", self._peak / 2**30)]

    def turn(self) -> float:
        """Return the most since the last call, in GiB (on a CPU the memory in use now); a new turn begins."""
        import torch

        _, peak = self._measure()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return peak / 2**30

    def _measure(self) -> tuple[float, float]:
        import psutil
        import torch

        if self._device == "cuda":
            now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        else:
            now = peak = psutil.Process().memory_info().rss
        self._peak = max(self._peak, peak)
        return now, peak


def machine_memory(device: str) -> MachineMemory:
    """Return the memory of the GPU, or of this machine (of its container if that has a limit)."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return MachineMemory(total, free, "the GPU")
    import psutil

    memory = psutil.virtual_memory()
    texts = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    limit = min([memory.total, *(int(text) for text in texts if text.isdigit())])
    return MachineMemory(limit, min(limit, memory.available))
