"""A model as the ranks hold it: whole on a single rank, in shards (FSDP2) on several.

In shards the float32 parameters are the master weights; a layer's are gathered in the compute dtype just before they
are used, and freed after. Ranks form a grid, `replicate × shard × tensor`: shards are the same in each replica
(HSDP), and a layer's matrices may be split over `tensor` neighbours that see the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from treadle.config import Config
from treadle.errors import ConfigError
from treadle.models.trainable import FULL, Trainable
from treadle.training.ranks import ALONE, Ranks
from treadle.training.tensor_parallel import check_heads, split_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Result = TypeVar("Result")


@dataclass(frozen=True)
class ParallelSpec:
    """How many ranks train, and how they share the model. `shard` is what the other two leave."""

    num_ranks: int = 1
    replicate: int = 1
    tensor: int = 1
    cpu_offload: bool = False
    sync_every_micro_batch: bool = False
    timeout_seconds: float = 600.0

    @property
    def shard(self) -> int:
        return self.num_ranks // (self.replicate * self.tensor)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that train on different samples."""
        return self.num_ranks // self.tensor

    @classmethod
    def of(cls, config: Config, num_ranks: int) -> ParallelSpec:
        """Return the configured grid over this many ranks; raises `ConfigError` if they do not divide evenly."""
        section = config.parallel
        replicate, tensor = section.fsdp_replicate_size, section.tensor_parallel_size
        if num_ranks % (replicate * tensor):
            raise ConfigError(
                f"fsdp_replicate_size × tensor_parallel_size = {replicate} × {tensor} does not divide the {num_ranks} "
                "ranks that train; choose sizes that do"
            )
        return cls(
            num_ranks=num_ranks,
            replicate=replicate,
            tensor=tensor,
            cpu_offload=section.fsdp_cpu_offload,
            sync_every_micro_batch=section.fsdp_sync_every_micro_batch,
            timeout_seconds=section.distributed_timeout_seconds,
        )


@dataclass(frozen=True, eq=False)
class Grid:
    """This rank's place: `data` are the ranks with other samples, `world` all ranks, `mesh` is None if it is alone."""

    spec: ParallelSpec
    device: torch.device
    data: Ranks = ALONE
    neighbours: Ranks = ALONE  # those with the same samples
    world: Ranks = ALONE
    mesh: DeviceMesh | None = None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The mesh over which FSDP shards: one axis, or two with replicas."""
        assert self.mesh is not None
        return self.mesh["replicate", "shard"] if self.spec.replicate > 1 else self.mesh["shard"]

    @property
    def reports(self) -> bool:
        """True on one of the ranks with the same samples: its metrics count."""
        return self.neighbours.rank == 0

    @property
    def is_first(self) -> bool:
        """True on the first rank, which reports for all."""
        return self.world.rank == 0


def alone(device: torch.device) -> Grid:
    """Return the grid of one process."""
    return Grid(ParallelSpec(), device)


def build_grid(spec: ParallelSpec, device: torch.device) -> Grid:
    """Arrange the ranks of the joined process group; every rank calls this with the same spec."""
    if not dist.is_initialized():
        assert spec.num_ranks == 1, "join the ranks first"
        return alone(device)
    assert dist.get_world_size() == spec.num_ranks, f"{dist.get_world_size()} ranks joined, not {spec.num_ranks}"
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh(device.type, (spec.replicate, spec.shard, spec.tensor), mesh_dim_names=names)
    world = Ranks(dist.get_rank(), spec.num_ranks, dist.group.WORLD, device)
    flat = mesh["replicate", "shard"]._flatten("data")
    data = Ranks(flat.get_local_rank(), spec.num_data_ranks, flat.get_group(), device)
    neighbours = ALONE
    if spec.tensor > 1:
        group = mesh["tensor"].get_group()
        neighbours = Ranks(mesh.get_local_rank("tensor"), spec.tensor, group, device)
    return Grid(spec, device, data, neighbours, world, mesh)


class ParallelModel(nn.Module):
    """A model, what of it is trained, and its grid.

    Calling it runs a function of the model with all weights gathered that the function may read.
    """

    def __init__(
        self, model: nn.Module, grid: Grid, compute_dtype: torch.dtype | None = None, trainable: Trainable = FULL
    ):
        super().__init__()
        self.model: Any = model
        self.grid, self.trainable = grid, trainable
        self.compute_dtype = compute_dtype or next(model.parameters()).dtype
        self.summed: frozenset[str] = frozenset()  # weights whose gradients the neighbours must add up

    def forward(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return `function(model, *args)`; tensors in its result may be differentiated."""
        return function(self.model, *args)

    @property
    def is_sharded(self) -> bool:
        return isinstance(self, FSDPModule)

    @property
    def ranks(self) -> Ranks:
        """The ranks that train on different samples."""
        return self.grid.data

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of one micro-batch; ranks reduce gradients after the last one of a step, or after each."""
        if isinstance(self, FSDPModule):
            self.set_is_last_backward(is_last)
            self.set_requires_gradient_sync(is_last or self.grid.spec.sync_every_micro_batch)
        loss.backward()

    def free_gathered(self) -> None:
        """Free weights that a forward pass gathered and no backward pass frees."""
        if isinstance(self, FSDPModule):
            self.reshard()


def as_parallel(model: nn.Module) -> ParallelModel:
    """Return a model as a `ParallelModel`; one that is none is the full model of one process."""
    if isinstance(model, ParallelModel):
        return model
    return ParallelModel(model, alone(next(model.parameters()).device))


def shard(model: nn.Module, body: PreTrainedModel, grid: Grid, dtype: torch.dtype, *, trainable: bool) -> ParallelModel:
    """Shard a model over the grid: each decoder layer of its `body` by itself, and what is left with the whole.

    Works on a model without memory (on the `meta` device) too. `dtype` is what it computes in; modules that are
    called `value_head` stay in float32. Gradients of the ranks are added up, in float32: the weights of the loss
    hold the denominators.
    """
    summed: list[nn.Module] = []
    if grid.spec.tensor > 1:
        check_heads(body, grid.spec.tensor)
        assert grid.mesh is not None
        summed = split_layers(body, grid.mesh["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    kept_on_host = grid.spec.cpu_offload or not trainable
    offload = CPUOffloadPolicy() if kept_on_host and grid.device.type == "cuda" else OffloadPolicy()
    layers = _layers(body)
    for name, module in model.named_modules():
        if name == "value_head":
            fully_shard(module, mesh=grid.shard_mesh, offload_policy=offload)
        elif any(module is layer for layer in layers):
            fully_shard(module, mesh=grid.shard_mesh, mp_policy=policy, offload_policy=offload)
    whole = ParallelModel(model, grid, dtype)
    inputs_as_they_are = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    fully_shard(whole, mesh=grid.shard_mesh, mp_policy=inputs_as_they_are, offload_policy=offload)
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
            if hasattr(
                module, "set_reduce_scatter_unused_params"
            ):  # torch 2.13: experts that no token of a rank went to
                module.set_reduce_scatter_unused_params(True, recurse=False)
    whole.summed = frozenset(
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if module in summed
        for weight in module._parameters
    )
    return whole


def _layers(body: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that transformers says must stay in one piece: the decoder layers."""
    names = set(body._no_split_modules or ())
    return [module for module in body.modules() if type(module).__name__ in names]


# Weights of one rank and of all


def local_part(param: Tensor) -> Tensor:
    """Return the part of a parameter that is on this rank, in the same memory; all of it if it is not sharded."""
    return param.to_local() if isinstance(param, DTensor) else param


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """Return the part of a full tensor that belongs to this rank's part of the parameter `like`; no rank waits for another."""
    for cut in _cuts(like):
        start = min(cut.index * cut.step, cut.length)
        full = full.narrow(cut.dim, start, min(cut.step, cut.length - start))
    return full


def gathered(part: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Return the full tensor of which every rank has a part, laid out as the parameter `like`; every rank calls this."""
    whole = part.to(device) if isinstance(like, DTensor) else part
    for cut in reversed(_cuts(like)):
        shape = list(whole.shape)
        shape[cut.dim] = cut.step
        own = whole.new_zeros(shape)
        own.narrow(cut.dim, 0, whole.shape[cut.dim]).copy_(whole)
        found = [torch.empty_like(own) for _ in range(cut.count)]
        dist.all_gather(found, own, group=cut.group)
        whole = torch.cat(found, cut.dim).narrow(cut.dim, 0, cut.length)
    return whole


def is_split(param: Tensor) -> bool:
    """Return True if tensor-parallel neighbours have different parts of the parameter, not copies."""
    return any(cut.axis == "tensor" for cut in _cuts(param))


@dataclass(frozen=True)
class _Cut:
    """A cut of a parameter along one axis of the grid, into `count` pieces of `step` rows; the last ones may be shorter."""

    axis: str
    dim: int
    length: int
    count: int
    index: int
    group: dist.ProcessGroup

    @property
    def step(self) -> int:
        return -(-self.length // self.count)


def _cuts(param: Tensor) -> list[_Cut]:
    """Return how a parameter is cut; FSDP shards the part that tensor parallelism left."""
    if not isinstance(param, DTensor):
        return []
    mesh, shape = param.device_mesh, list(param.shape)
    places: dict[str, Any] = dict(zip(mesh.mesh_dim_names or (), param.placements, strict=True))
    cuts = []
    for axis in ("tensor", "shard"):
        if axis in places and not places[axis].is_replicate():
            dim = places[axis].dim
            cut = _Cut(axis, dim, shape[dim], mesh[axis].size(), mesh.get_local_rank(axis), mesh.get_group(axis))
            shape[dim] = min(cut.step, max(0, shape[dim] - cut.index * cut.step))
            cuts.append(cut)
    return cuts
