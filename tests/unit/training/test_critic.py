"""The critic: its values, its loss, and its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treadle.errors import CheckpointError, ModelError
from treadle.metrics import Metric
from treadle.models.attention import PackedAttention
from treadle.models.layout import PackedLayout
from treadle.models.load import load_model
from treadle.models.value import ValueModel, load_value_head, save_value_head
from treadle.training.batch import Batch, batch_of
from treadle.training.checkpoint import save_checkpoint
from treadle.training.critic import Critic


@pytest.fixture
def make_critic(tiny_model_dir: Path, make_config):
    """A critic whose head is not zero, so that its values differ between tokens."""

    def make(seed: int = 0, **fields) -> Critic:
        model = ValueModel(load_model(str(tiny_model_dir), torch.float32, torch.device("cpu")))
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            model.value_head.weight.copy_(torch.randn(1, 32, generator=generator))
            model.value_head.bias.fill_(0.5)
        return Critic(model, make_config(advantage_estimator="ppo", **fields), total_steps=10, warn=print)

    return make


def scored(critic: Critic, groups, weight: float = 0.1) -> Batch:
    """A batch with the critic's values, and returns and weights that differ between tokens."""
    batch = batch_of([s for g in groups for s in g.samples])
    count = batch.token_ids.shape[0]
    batch = replace(batch, values=values_of(critic, batch))
    returns = torch.where(batch.loss_mask, torch.sin(torch.arange(count).float()), 0.0)
    return replace(batch, returns=returns, loss_weights=torch.where(batch.loss_mask, weight, 0.0))


def values_of(critic: Critic, batch: Batch) -> torch.Tensor:
    return critic.values(batch, critic.plan(batch, [range(len(batch))]))


def step(critic: Critic, batch: Batch) -> list[Metric]:
    return critic.train(batch, critic.plan(batch, [range(len(batch))]))


def naive_values(critic: Critic, batch: Batch) -> torch.Tensor:
    """One plain forward pass a sample: the hidden state before each trained token, times the head."""
    out = torch.zeros(batch.token_ids.shape[0])
    model = critic.model.model
    for start, length in zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=True):
        tokens = batch.token_ids[start : start + length]
        layout = PackedLayout.of_lengths([length])
        hidden = model.base_model(
            input_ids=tokens[None],
            position_ids=layout.position_ids[None],
            treadle_plan=PackedAttention(layout, "sdpa"),
            use_cache=False,
        ).last_hidden_state[0]
        value = critic.model.value_head(hidden).squeeze(1)
        out[start + 1 : start + length] = value[:-1]
    return torch.where(batch.loss_mask, out, 0.0)


def test_a_new_head_predicts_zero(tiny_model) -> None:
    model = ValueModel(tiny_model)
    layout = PackedLayout.of_lengths([5])
    values = model.values(torch.arange(3, 8), layout.position_ids, PackedAttention(layout), torch.arange(5))
    assert values.tolist() == [0.0] * 5


def test_values_are_those_of_one_pass_a_sample(make_critic, make_groups) -> None:
    critic = make_critic()
    batch = batch_of([s for g in make_groups() for s in g.samples])
    with torch.no_grad():
        torch.testing.assert_close(values_of(critic, batch), naive_values(critic, batch), atol=1e-5, rtol=1e-5)
    assert values_of(critic, batch)[batch.loss_mask].std() > 0.1


def test_a_step_follows_the_clipped_value_loss(make_critic, make_groups) -> None:
    """The metric and the new weights against the formula written out: max((V_clip - ret)², (V - ret)²), no ½."""
    ours, theirs = make_critic(critic_lr=1e-3, value_clip=0.3), make_critic()
    batch = scored(ours, make_groups())
    batch = replace(
        batch, values=batch.values + 0.5 * torch.cos(torch.arange(len(batch.values)).float())
    )  # V moved since
    metrics = {m.name: m.value for m in step(ours, batch)}
    value = naive_values(theirs, batch)
    clipped = batch.values + (value - batch.values).clamp(-0.3, 0.3)
    error = torch.maximum((clipped - batch.returns) ** 2, (value - batch.returns) ** 2)
    loss = (error * batch.loss_weights).sum()
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    params = dict(theirs.model.named_parameters())
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    norm = torch.sqrt(sum((g**2).sum() for g in grads if g is not None))
    assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for (name, before), grad in zip(params.items(), grads, strict=True):
        moved = ours.model.get_parameter(name) - before
        if grad is not None:  # the first AdamW step goes by the learning rate against the sign of the gradient
            clear = grad.abs() > 1e-4 * grad.abs().max()
            assert (torch.sign(moved[clear]) == -torch.sign(grad[clear])).all(), name


@pytest.mark.parametrize(
    "fields", [{"max_tokens_per_gpu": 16}, {"use_dynamic_batch_size": False, "micro_batch_size": 2}]
)
def test_the_split_into_micro_batches_changes_nothing(make_critic, make_groups, fields) -> None:
    whole, split = make_critic(), make_critic(**fields)
    for critic in (whole, split):
        step(critic, scored(critic, make_groups((4, 3, 5))))
    for name, weight in whole.model.named_parameters():
        torch.testing.assert_close(split.model.get_parameter(name), weight, atol=1e-6, rtol=1e-5)


def test_the_critics_schedule_is_the_policys_at_another_height(make_critic, make_groups) -> None:
    """Linear from lr to min_lr over 10 steps: 1e-2 to 5e-3 for the policy, so 1e-3 to 5e-4 for the critic."""
    critic = make_critic(lr=1e-2, min_lr=5e-3, lr_decay_style="linear", critic_lr=1e-3)
    found = []
    for _ in range(11):
        metrics = {m.name: m.value for m in step(critic, scored(critic, make_groups()))}
        found.append(metrics["critic/lr"])
    assert found[0] == pytest.approx(1e-3)
    assert found[5] == pytest.approx(7.5e-4)
    assert found[10] == pytest.approx(5e-4)


def test_a_broken_gradient_leaves_the_critic_alone(make_critic, make_groups) -> None:
    warnings: list[str] = []
    critic = make_critic()
    critic.warn = warnings.append
    batch = scored(critic, make_groups())
    before = {n: p.clone() for n, p in critic.model.named_parameters()}
    metrics = {m.name: m.value for m in step(critic, replace(batch, returns=batch.returns + float("nan")))}
    assert metrics["critic/skipped_steps"] == 1
    assert "critic step 0 skipped" in warnings[0]
    assert all((before[n] == p).all() for n, p in critic.model.named_parameters())


def save(critic: Critic, folder: Path, model_dir: Path):
    from treadle.training.checkpoint import find_checkpoint

    def write_model(target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text((model_dir / "config.json").read_text())

    save_checkpoint(
        folder,
        1,
        write_model=write_model,
        optimizer={"step.x": torch.zeros(1)},
        state={"critic_steps": critic.optimizer.num_steps},
        config={},
        write_rest=lambda work: critic.write(work / "critic"),
    )
    return find_checkpoint(folder, print)


def test_a_saved_critic_goes_on_bit_for_bit(make_critic, make_groups, tmp_path: Path, tiny_model_dir: Path) -> None:
    one, other = make_critic(), make_critic(seed=5)
    groups = make_groups()
    step(one, scored(one, groups))
    other.load(save(one, tmp_path, tiny_model_dir))
    assert other.optimizer.num_steps == 1
    for critic in (one, other):
        step(critic, scored(critic, groups))
    for name, weight in one.model.named_parameters():
        assert (other.model.get_parameter(name) == weight).all(), name


def test_a_critic_starts_from_a_saved_one(make_critic, tmp_path: Path, tiny_model_dir: Path) -> None:
    critic = make_critic()
    folder = save(critic, tmp_path, tiny_model_dir).path / "critic"
    model = ValueModel(load_model(str(folder), torch.float32, torch.device("cpu")))
    load_value_head(model, folder)
    for name, weight in critic.model.named_parameters():
        assert (model.get_parameter(name) == weight).all(), name


def test_the_head_of_another_model_is_refused(make_critic, tmp_path: Path, tiny_model_dir: Path) -> None:
    critic = make_critic()
    save_value_head({"weight": torch.zeros(1, 7), "bias": torch.zeros(1)}, tmp_path)
    with pytest.raises(ModelError, match="is not the value head of this model: 'weight'"):
        load_value_head(critic.model, tmp_path)
    other = save(critic, tmp_path / "saves", tiny_model_dir)
    del critic.optimizer.params["value_head.bias"]
    critic.optimizer.params["value_head.gain"] = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"another model: it has no weight 'value_head\.gain'"):
        critic.load(other)
