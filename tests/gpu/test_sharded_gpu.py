"""Sharded training on one GPU: the same code as on many (NCCL, FSDP), with a single shard."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from treadle.config import Config, batch_arithmetic
from treadle.training.parallel import Grid, ParallelSpec, alone, build_grid
from treadle.training.ranks import join_ranks, leave_ranks
from treadle.training.sharded_state import full_parameters, load_parallel
from treadle.training.trainer import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICE = torch.device("cuda", 0)
FIELDS = {"rollout_batch_size": 3, "n_samples_per_prompt": 3, "adam_eps": 1.0, "lr": 0.2, "max_tokens_per_gpu": 24}


@pytest.fixture
def join() -> Iterator[Callable[..., Grid]]:
    def make(**fields: bool) -> Grid:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        join_ranks(0, 1, at=port, device=DEVICE, timeout_seconds=60)
        return build_grid(ParallelSpec(**fields), DEVICE)

    yield make
    leave_ranks()


def trainer_on(grid: Grid, folder: Path, config: Config, dtype: torch.dtype = torch.float32) -> Trainer:
    return Trainer(load_parallel(str(folder), dtype, grid), config, batch_arithmetic(config), 10)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_one_shard_trains_as_the_whole(join, tiny_model_dir, make_config, make_groups, cpu_offload) -> None:
    config = make_config(**FIELDS)
    whole = trainer_on(alone(DEVICE), tiny_model_dir, config)
    sharded = trainer_on(join(cpu_offload=cpu_offload), tiny_model_dir, config)
    assert sharded.policy.is_sharded
    assert {p.device.type for p in sharded.optimizer.masters.values()} == {"cpu" if cpu_offload else "cuda"}
    for seed in range(3):
        for trainer in (whole, sharded):
            trainer.train(make_groups(seed=seed), seed)
    expected = dict(full_parameters(whole.policy))
    for name, weight in full_parameters(sharded.policy):
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)


def test_bfloat16_shards_keep_float32_masters(join, tiny_model_dir, make_config, make_groups) -> None:
    trainer = trainer_on(join(), tiny_model_dir, make_config(**FIELDS), torch.bfloat16)
    trainer.train(make_groups())
    assert {p.dtype for p in trainer.optimizer.masters.values()} == {torch.float32}
    assert {weight.dtype for _, weight in full_parameters(trainer.policy)} == {torch.bfloat16}


@pytest.mark.parametrize("sharded", [False, True])
def test_sleep_frees_the_device_and_wakes_bit_for_bit(join, tiny_model_dir, make_config, make_groups, sharded) -> None:
    grid = join() if sharded else alone(DEVICE)
    trainer = trainer_on(grid, tiny_model_dir, make_config(**FIELDS))
    trainer.train(make_groups())
    before = {name: tensor.clone().cpu() for name, tensor in trainer.optimizer.state_tensors().items()}
    weights = {name: p.detach().clone().cpu() for name, p in trainer.optimizer.masters.items()}
    held = torch.cuda.memory_allocated()
    freed = trainer.sleep()
    assert freed >= 3 * sum(weight.nbytes for weight in weights.values())
    assert torch.cuda.memory_allocated() <= held - freed
    assert trainer.wake() == freed
    assert all(torch.equal(p.detach().cpu(), weights[name]) for name, p in trainer.optimizer.masters.items())
    assert all(torch.equal(t.cpu(), before[name]) for name, t in trainer.optimizer.state_tensors().items())
    trainer.train(make_groups(seed=1), 1)
