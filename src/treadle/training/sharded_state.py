"""Load a model's weights onto the ranks that share it, and gather them again one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from treadle.models.attention import PackedAttention
from treadle.models.forward import hidden_states
from treadle.models.layout import Family, PackedLayout
from treadle.models.load import empty_model, load_model, load_parameters, renames_weights
from treadle.models.saving import save_model, write_model_config
from treadle.models.trainable import stored_buffers
from treadle.training.parallel import Grid, ParallelModel, gathered, local_part, part_of, shard
from treadle.training.tensor_files import TensorFiles, plan_files, write_files, write_index
from treadle.weights import WeightSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Wrap = Callable[["PreTrainedModel"], nn.Module]


def load_parallel(
    path: str,
    dtype: torch.dtype,
    grid: Grid,
    *,
    trainable: bool = True,
    wrap: Wrap | None = None,
    fused: bool = True,
) -> ParallelModel:
    """Load a model folder onto the ranks of a grid, which all call this; computes in `dtype`.

    One process has the whole model. Of many, the first reads the files into host memory (and checks that packing is
    exact for the model), the others make room only, and each weight is sent to them when its turn comes. `wrap` turns
    the language model into what is trained (a value model), and reads its own files if the model has memory.
    """
    wrap = wrap or (lambda model: model)
    if grid.mesh is None:
        return ParallelModel(wrap(load_model(path, dtype, grid.device, trainable=trainable, fused=fused)), grid)
    kept = torch.float32 if trainable else dtype
    source = wrap(load_model(path, kept, torch.device("cpu"), fused=fused)) if grid.is_first else None
    body = empty_model(path, kept, trainable=trainable, fused=fused)
    parallel = shard(wrap(body), body, grid, dtype, trainable=trainable)
    on_host = grid.spec.cpu_offload or not trainable
    parallel.to_empty(device="cpu" if on_host else grid.device)
    for module in parallel.modules():  # FSDP brings weights from the host, not the tables of rotary positions
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=grid.device))
    _send(parallel, source, grid)
    del source
    _first_pass(parallel, body)
    return parallel


@torch.no_grad()
def _send(parallel: ParallelModel, source: nn.Module | None, grid: Grid) -> None:
    """Fill the shards of every rank from the model that the first rank has."""
    weights: dict[str, Tensor] = {} if source is None else dict(source.named_parameters(remove_duplicate=False))
    weights |= {} if source is None else dict(source.named_buffers(remove_duplicate=False))
    targets = [*parallel.model.named_parameters(), *parallel.model.named_buffers(remove_duplicate=False)]
    for name, target in targets:
        full = torch.empty(target.shape, dtype=target.dtype, device=grid.device)
        if source is not None:
            full.copy_(weights[name])
        dist.broadcast(full, 0)
        local_part(target).copy_(part_of(full, target))


def _first_pass(parallel: ParallelModel, body: PreTrainedModel) -> None:
    """Run one token: FSDP allocates its shards for good in its first forward pass."""
    layout = PackedLayout((Family(1, ()),), parallel.grid.device)
    token = torch.zeros(1, dtype=torch.int64, device=parallel.grid.device)
    with torch.no_grad():
        parallel(lambda _: hidden_states(body, token, layout.position_ids, PackedAttention(layout)))
    parallel.free_gathered()


@torch.no_grad()
def full_parameters(parallel: ParallelModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each published weight in full, one at a time, on every rank; all ranks must run through it at the same time.

    Weights are in `dtype`, by default the compute dtype, on the device.

    Use a tensor before you ask for the next one: nothing else keeps it, and no rank ever has two copies of the model.
    """
    for name, param in parallel.trainable.published(parallel.model).items():
        yield (
            name,
            gathered(local_part(param.detach()).to(dtype or parallel.compute_dtype), param, parallel.grid.device),
        )


def weight_specs(parallel: ParallelModel) -> dict[str, WeightSpec]:
    """Return name, shape and dtype of each weight that `full_parameters` yields, in its order."""
    weights = parallel.trainable.published(parallel.model)
    return {name: WeightSpec(tuple(p.shape), parallel.compute_dtype) for name, p in weights.items()}


@torch.no_grad()
def gathered_parameter(param: Tensor, parallel: ParallelModel) -> Tensor:
    """Return one full weight in its own dtype; every rank calls this."""
    return gathered(local_part(param.detach()), param, parallel.grid.device)


# Files


@torch.no_grad()
def write_model_folder(parallel: ParallelModel, body: PreTrainedModel, prefix: str, folder: Path) -> None:
    """Write the float32 weights of sharded ranks as a Hugging Face folder; all ranks call this.

    `prefix` is what the names of `body` begin with inside the model. Where transformers stores an architecture's
    weights under other names than it trains them (fused experts), or has buffers beside them, the first rank
    gathers all of them in host memory.
    """
    published = parallel.trainable.published(parallel.model)
    params = {name: weight for name, weight in published.items() if name.startswith(prefix)}
    device = parallel.grid.device

    def gather(name: str) -> Tensor:
        param = params[prefix + name]
        return gathered(local_part(param.detach()).float(), param, device)

    names = [name.removeprefix(prefix) for name in params]
    if renames_weights(body, names) or stored_buffers(body):
        whole: dict[str, Tensor] = {}
        for name in names:
            tensor = gather(name)
            if parallel.grid.is_first:
                whole[name] = tensor.cpu()
        if parallel.grid.is_first:
            save_model(body, whole, folder)
        return
    sizes = {name: 4 * params[prefix + name].numel() for name in names}
    plan = plan_files("model", sizes, parallel.grid.world.size)
    write_files(folder, plan, gather, parallel.grid.world)
    if parallel.grid.is_first:
        write_index(folder, plan, sizes)
        write_model_config(body, folder)


@torch.no_grad()
def write_parts(
    folder: Path, stem: str, parts: Mapping[str, Tensor], like: Callable[[str], Tensor], parallel: ParallelModel
) -> None:
    """Write tensors of which each rank has a part, laid out as the parameter `like(name)`; all ranks call this.

    One number (AdamW's count of steps) is the same everywhere.
    """
    device = parallel.grid.device

    def gather(name: str) -> Tensor:
        part = parts[name]
        return part if part.ndim == 0 else gathered(part, like(name), device)

    sizes = {name: t.element_size() * (like(name).numel() if t.ndim else 1) for name, t in parts.items()}
    if sizes:
        write_files(folder, plan_files(stem, sizes, parallel.grid.world.size), gather, parallel.grid.world)


def stored_parameters(folder: Path, names: list[str]) -> Mapping[str, Tensor]:
    """Return the weights of a model folder by the module's names, float32, read one by one if the files use those names."""
    files = TensorFiles(folder, "model")
    return files if set(names) <= set(files) else load_parameters(folder)
