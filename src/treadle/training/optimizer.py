"""AdamW on float32 master weights, with the schedule, clipping, and what happens to a broken gradient.

Where the module computes in bfloat16 the masters are copies of its parameters: gradients are summed into float32
as the backward pass makes them, and the new weights are cast into the module once a step. Where the module is
float32 its parameters are the masters, and nothing is copied. Where ranks hold shards, a master is this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treadle.config.sections import OptimSection
from treadle.errors import CheckpointError
from treadle.training.parallel import as_parallel, is_split, local_part, part_of
from treadle.training.ranks import ALONE


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. `broken` names the first parameter with a non-finite gradient, if any."""

    grad_norm: float
    lr: float
    skipped: bool
    broken: str = ""

    def cause(self, loss: float) -> str:
        """Why a step with this loss was skipped."""
        return f"the gradient of {self.broken} is not finite" if self.broken else f"the loss is {loss}"


def learning_rate(step: int, optim: OptimSection, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine decay."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    if optim.lr_decay_style == "constant":
        return optim.lr
    span = max(1, (optim.lr_decay_steps or total_steps) - optim.lr_warmup_steps)
    done = min(1.0, (step - optim.lr_warmup_steps) / span)
    left = 1 - done if optim.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return optim.min_lr + (optim.lr - optim.min_lr) * left


class MasterOptimizer:
    """The master weights of a module and their AdamW state."""

    def __init__(self, module: nn.Module, optim: OptimSection, total_steps: int):
        self.optim, self.total_steps = optim, total_steps
        parallel = as_parallel(module)
        self.is_sharded, self.grid, self.summed = parallel.is_sharded, parallel.grid, parallel.summed
        self.params = parallel.trainable.trained(parallel.model)
        self.masters: dict[str, nn.Parameter] = {}
        for name, param in self.params.items():
            if self.is_sharded:
                assert param.dtype == torch.float32, f"{name} is sharded in {param.dtype}; shards are the masters"
                self.masters[name] = nn.Parameter(local_part(param.detach()))
            elif param.dtype == torch.float32:
                self.masters[name] = param
            else:
                self.masters[name] = nn.Parameter(param.detach().float())
                param.register_post_accumulate_grad_hook(self._gatherer(self.masters[name]))
        matrices = [p for p in self.masters.values() if p.ndim >= 2]
        vectors = [p for p in self.masters.values() if p.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            fused=True,
        )
        self.num_steps = 0

    @staticmethod
    def _gatherer(master: nn.Parameter) -> Callable[[Tensor], None]:
        def gather(param: Tensor) -> None:
            assert param.grad is not None
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad.add_(param.grad)
            param.grad = None

        return gather

    def step(self, loss_is_finite: bool) -> StepResult:
        """Clip, update the masters, cast them into the module, and drop the gradients.

        A non-finite loss or gradient leaves weights and AdamW state untouched; the schedule moves on all the same.
        """
        lr = learning_rate(self.num_steps, self.optim, self.total_steps)
        self.num_steps += 1
        for name, master in self.masters.items():
            whole = self.params[name].grad
            if self.is_sharded and whole is not None:
                grad = local_part(whole)
                master.grad = self.grid.neighbours.sum(grad) if name in self.summed else grad
                self.params[name].grad = None
            if master.grad is None:
                # Nothing in the batch reached it: a gradient of zero, which momentum may still move.
                master.grad = torch.zeros_like(master)
        masters = list(self.masters.values())
        norm = self._total_norm()
        finite = loss_is_finite and bool(torch.isfinite(norm))
        broken = ""
        if finite:  # clipping by a norm that is not finite would spread it over all gradients
            torch.nn.utils.clip_grads_with_norm_(masters, self.optim.clip_grad, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.publish()
        else:
            broken = self._first_broken()
        self.adamw.zero_grad(set_to_none=True)
        return StepResult(float(norm), lr, skipped=not finite, broken=broken)

    def _total_norm(self) -> Tensor:
        """Return the norm of the full gradient, over the shards of all ranks."""
        grads = {name: p.grad for name, p in self.masters.items() if p.grad is not None}
        if not self.is_sharded:
            return torch.nn.utils.get_total_norm(list(grads.values()))
        split = [grad for name, grad in grads.items() if is_split(self.params[name])]
        copied = [grad for name, grad in grads.items() if not is_split(self.params[name])]
        squares = [torch.nn.utils.get_total_norm(part).double().square() for part in (split, copied)]
        # Each number is on as many ranks as there are replicas, and what is not split on all neighbours too.
        own = squares[0].to(self.grid.device) + squares[1].to(self.grid.device) / self.grid.spec.tensor
        return (self.grid.world.sum(own) / self.grid.spec.replicate).sqrt().float()

    def _first_broken(self) -> str:
        """Return the first parameter whose gradient is not finite, on any rank; an empty string if there is none."""
        names = list(self.masters)
        grads = [p.grad for p in self.masters.values()]
        found = next((i for i, g in enumerate(grads) if g is not None and not torch.isfinite(g).all()), len(names))
        ranks = self.grid.world if self.is_sharded else ALONE
        first = len(names) - ranks.max(len(names) - found)
        return names[first] if first < len(names) else ""

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters into the module's parameters; there is nothing to do if they are the same tensors."""
        if self.is_sharded:
            return
        apart = [(p, self.masters[name]) for name, p in self.params.items() if p is not self.masters[name]]
        if apart:
            torch._foreach_copy_([p for p, _ in apart], [m for _, m in apart])

    def state_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of AdamW's state by parameter name: `exp_avg.<name>`, `exp_avg_sq.<name>`, `step.<name>`."""
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                out[f"{key}.{name}"] = value
        return out

    def tensors(self) -> list[Tensor]:
        """Everything this optimizer holds that is large: masters and AdamW's moments."""
        moments = [value for state in self.adamw.state.values() for value in state.values()]
        return [*(master.detach() for master in self.masters.values()), *moments]

    def parameter_of(self, key: str) -> Tensor:
        """Return the parameter to which a tensor of `state_tensors` belongs."""
        return self.params[key.split(".", 1)[1]]

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set AdamW's state from whole tensors, read one by one; parameters without a state there start fresh."""
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            if name not in self.params:
                raise CheckpointError(f"the saved state of AdamW is of {name!r}, a weight that this run does not train")
            part = part_of(value, self.params[name]) if value.ndim else value
            # Fused AdamW wants its count of steps on the device too.
            by_name.setdefault(name, {})[kind] = part.to(self.masters[name].device, copy=True)
        for name, state in by_name.items():
            self.adamw.state[self.masters[name]] = state

    @torch.no_grad()
    def load_masters(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the master weights from whole tensors (same names and shapes) and cast them into the module."""
        for name, master in self.masters.items():
            master.copy_(part_of(tensors[name], self.params[name]))
        self.publish()
