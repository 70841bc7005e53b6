"""The optimizer against torch's own, schedules by hand, and what a broken gradient leaves alone."""

import copy
import math

import pytest
import torch
from torch import nn

from treadle.config import OptimSection
from treadle.errors import CheckpointError
from treadle.training.optimizer import MasterOptimizer, learning_rate

SECTION = OptimSection(lr=0.1, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, clip_grad=0.5)


class Small(nn.Module):
    """A matrix and a vector that are trained, and one that is not."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.vector = nn.Parameter(torch.randn(4, generator=generator).to(dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(self.matrix.dtype)
        return (torch.tanh(x @ self.matrix.T + self.vector) ** 2).sum()


def torch_adamw(module: Small, section: OptimSection, **kind) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [
            {"params": [module.matrix], "weight_decay": section.weight_decay},
            {"params": [module.vector], "weight_decay": 0.0},
        ],
        lr=section.lr,
        betas=(section.adam_beta1, section.adam_beta2),
        eps=section.adam_eps,
        **kind,
    )


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


@pytest.mark.parametrize(("kind", "tolerance"), [({"fused": True}, 0.0), ({"foreach": False}, 1e-6)])
def test_float32_steps_are_torch_adamw(kind, tolerance):
    ours, theirs = Small(), Small()
    optimizer = MasterOptimizer(ours, SECTION, total_steps=10)
    reference = torch_adamw(theirs, SECTION, **kind)
    for seed in range(6):
        ours.loss(seed).backward()
        theirs.loss(seed).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), SECTION.clip_grad)
        reference.step()
        reference.zero_grad()
        result = optimizer.step(loss_is_finite=True)
        assert result.grad_norm == float(norm) > SECTION.clip_grad
        assert not result.skipped
        for name, weight in weights(theirs).items():
            torch.testing.assert_close(ours.get_parameter(name).detach(), weight, atol=tolerance, rtol=tolerance)
    assert ours.matrix.grad is None


def test_one_step_by_hand():
    module = nn.Linear(1, 1, bias=True)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(3.0)
    section = OptimSection(lr=0.1, weight_decay=0.5, adam_beta1=0.9, adam_beta2=0.99, adam_eps=1.0, clip_grad=5.0)
    optimizer = MasterOptimizer(module, section, total_steps=1)
    module.weight.grad, module.bias.grad = torch.tensor([[6.0]]), torch.tensor([8.0])
    result = optimizer.step(loss_is_finite=True)
    assert result.grad_norm == pytest.approx(10.0)
    # Clipped by a half: 3 and 4. First step of Adam: g / (|g| + eps). Decay only on the matrix: 2 · 0.1 · 0.5.
    assert module.weight.item() == pytest.approx(2.0 - 0.1 - 0.1 * 3 / 4, abs=1e-5)
    assert module.bias.item() == pytest.approx(3.0 - 0.1 * 4 / 5, abs=1e-5)


def test_frozen_parameters_have_no_master():
    module = Small()
    optimizer = MasterOptimizer(module, SECTION, total_steps=10)
    assert list(optimizer.masters) == ["matrix", "vector"]
    assert optimizer.masters["matrix"] is module.matrix


def test_bfloat16_gradients_are_summed_in_float32():
    module = Small(torch.bfloat16)
    alone = copy.deepcopy(module)
    optimizer = MasterOptimizer(module, SECTION, total_steps=10)
    sums = {"matrix": torch.zeros(4, 3), "vector": torch.zeros(4)}
    for seed in range(5):
        module.loss(seed).backward()
        alone.loss(seed).backward()
        for name, total in sums.items():
            total += alone.get_parameter(name).grad.float()
        alone.zero_grad()
    assert module.matrix.grad is None  # handed over as soon as it was made
    for name, total in sums.items():
        assert torch.equal(optimizer.masters[name].grad, total)


def test_bfloat16_masters_keep_what_the_module_rounds_away():
    module = Small(torch.bfloat16)
    section = SECTION.model_copy(update={"lr": 1e-5})
    optimizer = MasterOptimizer(module, section, total_steps=100)
    twin = Small()
    with torch.no_grad():
        twin.matrix.copy_(module.matrix)
        twin.vector.copy_(module.vector)
    reference = MasterOptimizer(twin, section, total_steps=100)
    before = weights(module)
    for seed in range(5):
        module.loss(seed).backward()
        for name in ("matrix", "vector"):
            twin.get_parameter(name).grad = optimizer.masters[name].grad.clone()
        optimizer.step(loss_is_finite=True)
        reference.step(loss_is_finite=True)
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master, twin.get_parameter(name))
        assert torch.equal(module.get_parameter(name), master.to(torch.bfloat16))
        moved = (master.detach() - before[name].float()).abs()
        assert 1e-6 < float(moved.max()) < 1e-3  # far below what bfloat16 resolves near 1


def test_a_step_without_gradients_is_one_with_zero_gradients():
    ours, theirs = Small(), Small()
    optimizer, reference = MasterOptimizer(ours, SECTION, 10), torch_adamw(theirs, SECTION, fused=True)
    ours.loss(0).backward()
    theirs.loss(0).backward()
    optimizer.step(loss_is_finite=True)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), SECTION.clip_grad)
    reference.step()
    before = weights(ours)
    for parameter in (theirs.matrix, theirs.vector):
        parameter.grad = torch.zeros_like(parameter)
    reference.step()
    result = optimizer.step(loss_is_finite=True)
    assert result.grad_norm == 0.0
    assert not result.skipped
    assert_equal(weights(ours), weights(theirs))
    assert not torch.equal(ours.matrix, before["matrix"])  # momentum goes on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_a_broken_gradient_changes_nothing_and_is_named(name, bad, dtype):
    module = Small(dtype)
    optimizer = MasterOptimizer(module, SECTION, total_steps=10)
    module.loss(0).backward()
    optimizer.step(loss_is_finite=True)
    before, masters = weights(module), {n: m.detach().clone() for n, m in optimizer.masters.items()}
    state = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    module.loss(1).backward()
    optimizer.masters[name].grad.view(-1)[1] = bad
    result = optimizer.step(loss_is_finite=True)
    assert result.skipped
    assert result.broken == name
    assert not math.isfinite(result.grad_norm)
    assert_equal(weights(module), before)
    assert_equal({n: m.detach() for n, m in optimizer.masters.items()}, masters)
    assert_equal(optimizer.state_tensors(), state)
    assert optimizer.num_steps == 2  # the schedule moves on
    assert all(master.grad is None for master in optimizer.masters.values())


def test_a_broken_loss_changes_nothing():
    module = Small()
    optimizer = MasterOptimizer(module, SECTION, total_steps=10)
    before = weights(module)
    module.loss(0).backward()
    result = optimizer.step(loss_is_finite=False)
    assert (result.skipped, result.broken) == (True, "")
    assert_equal(weights(module), before)
    assert optimizer.state_tensors() == {}
    module.loss(1).backward()  # the gradient of the skipped step is gone
    twin = Small()
    twin_optimizer = MasterOptimizer(twin, SECTION, total_steps=10)
    twin.loss(1).backward()
    optimizer.step(loss_is_finite=True)
    twin_optimizer.step(loss_is_finite=True)
    assert_equal(weights(module), weights(twin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_on_bit_for_bit(dtype):
    def steps(module, optimizer, seeds):
        for seed in seeds:
            module.loss(seed).backward()
            optimizer.step(loss_is_finite=True)

    module = Small(dtype)
    section = SECTION.model_copy(update={"lr_decay_style": "cosine", "lr_warmup_steps": 2})
    optimizer = MasterOptimizer(module, section, total_steps=6)
    steps(module, optimizer, range(3))
    saved = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    masters = {name: master.detach().clone() for name, master in optimizer.masters.items()}
    assert sorted(saved) == sorted(
        f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in ("matrix", "vector")
    )
    steps(module, optimizer, range(3, 6))

    other = Small(dtype)
    with torch.no_grad():
        other.matrix.zero_()
    resumed = MasterOptimizer(other, section, total_steps=6)
    resumed.load_masters(masters)
    resumed.load_state_tensors(saved)
    resumed.num_steps = 3
    steps(other, resumed, range(3, 6))
    assert_equal(weights(other), weights(module))
    assert_equal(resumed.state_tensors(), optimizer.state_tensors())


def rates(total: int, **fields) -> list[float]:
    section = OptimSection(lr=8.0, **fields)
    return [learning_rate(step, section, total) for step in range(total)]


@pytest.mark.parametrize("key", ["exp_avg.other", "exp_avg", ""])
def test_state_of_another_weight_is_refused(key):
    optimizer = MasterOptimizer(Small(), SECTION, total_steps=1)
    with pytest.raises(CheckpointError, match="a weight that this run does not train"):
        optimizer.load_state_tensors({key: torch.zeros(1)})


def test_constant_after_warm_up():
    assert rates(6, lr_warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(3) == [8.0, 8.0, 8.0]


def test_linear_decay():
    assert rates(5, lr_decay_style="linear", min_lr=3.0) == [8.0, 7.0, 6.0, 5.0, 4.0]
    assert rates(6, lr_decay_style="linear", lr_warmup_steps=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


def test_cosine_decay():
    # 1 + 7 · (1 + cos(π k/4)) / 2
    assert rates(4, lr_decay_style="cosine", min_lr=1.0) == pytest.approx([8.0, 6.974874, 4.5, 2.025126], abs=1e-6)


def test_decay_ends_where_it_is_told_and_stays_there():
    assert rates(5, lr_decay_style="linear", lr_decay_steps=2, min_lr=2.0) == [8.0, 5.0, 2.0, 2.0, 2.0]
    assert rates(4, lr_decay_style="cosine", lr_decay_steps=3, lr_warmup_steps=1)[3] == pytest.approx(0.0, abs=1e-12)


def test_a_warm_up_longer_than_the_decay():
    assert rates(4, lr_decay_style="linear", lr_decay_steps=1, lr_warmup_steps=2, min_lr=1.0) == [4.0, 8.0, 8.0, 1.0]


def test_the_rate_of_each_step_is_used_and_reported():
    module = Small()
    section = SECTION.model_copy(update={"lr_warmup_steps": 4})
    optimizer = MasterOptimizer(module, section, total_steps=10)
    reported = []
    for seed in range(5):
        module.loss(seed).backward()
        reported.append(optimizer.step(loss_is_finite=True).lr)
        assert {group["lr"] for group in optimizer.adamw.param_groups} == {reported[-1]}
    assert reported == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
