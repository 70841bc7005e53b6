"""What ranks share, as far as one process can tell: files of tensors, host memory, the grid, sums of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treadle.errors import CheckpointError, ConfigError, RankError
from treadle.models.offload import HostCopies
from treadle.training.micro_batches import with_last
from treadle.training.packing import empty_row
from treadle.training.parallel import ParallelSpec, as_parallel, gathered, part_of
from treadle.training.policy_loss import empty_loss
from treadle.training.ranks import ALONE, lost_ranks_are_named
from treadle.training.sharded_state import full_parameters, weight_specs
from treadle.training.tensor_files import TensorFiles, plan_files, write_files, write_index

# Files


def test_files_hold_every_tensor_once_within_the_limit() -> None:
    sizes = {f"w{i}": 1 + i * 7 % 11 for i in range(40)}
    for ranks in (1, 3, 8):
        plan = plan_files("model", sizes, ranks, max_bytes=16)
        assert [name for file in plan for name in file.names] == list(sizes)
        assert max(sum(sizes[n] for n in file.names) for file in plan) <= 16
        counts = [sum(file.rank == rank for file in plan) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1


def test_a_tensor_over_the_limit_has_a_file_of_its_own() -> None:
    plan = plan_files("model", {"a": 1, "big": 50, "b": 1}, 1, max_bytes=8)
    assert [file.names for file in plan] == [("a",), ("big",), ("b",)]


def test_tensors_are_read_back_one_by_one(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.full((i + 1, 2), float(i)) for i in range(5)}
    sizes = {name: t.nbytes for name, t in tensors.items()}
    plan = plan_files("model", sizes, 1, max_bytes=40)
    write_files(tmp_path, plan, tensors.__getitem__, ALONE)
    write_index(tmp_path, plan, sizes)
    files = TensorFiles(tmp_path, "model")
    assert len(plan) > 1
    assert set(files) == set(tensors)
    assert files.shape("w3") == (4, 2)
    assert all(torch.equal(files[name], t) for name, t in tensors.items())
    assert len(TensorFiles(tmp_path, "optimizer")) == 0


def test_a_disk_that_is_full_is_said(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    plan = plan_files("model", {"a": 4}, 1)
    with pytest.raises(OSError, match="taken"):
        write_files(tmp_path / "taken", plan, lambda _: torch.zeros(1), ALONE)


# Host memory


def test_memory_goes_away_and_comes_back_bit_for_bit(make_trainer, make_groups) -> None:
    trainer, twin = make_trainer(), make_trainer()
    for one in (trainer, twin):
        one.train(make_groups())
    assert trainer.sleep() == 0  # on a CPU there is nothing to free
    assert trainer.wake() == 0
    freed = trainer.sleep(force=True)
    assert freed >= 3 * sum(p.numel() * 4 for p in twin.optimizer.masters.values())
    assert all(p.untyped_storage().nbytes() == 0 for p in trainer.model.parameters())
    assert trainer.wake() == freed
    for one in (trainer, twin):
        one.train(make_groups(seed=1), 1)
    assert all(torch.equal(p, twin.model.get_parameter(name)) for name, p in trainer.model.named_parameters())


def test_tensors_that_share_memory_are_moved_once() -> None:
    whole = torch.arange(8.0)
    copies = HostCopies()
    assert copies.sleep([whole, whole[2:4], whole.view(2, 4)], force=True) == 32
    assert copies.is_asleep
    with pytest.raises(AssertionError, match="asleep already"):
        copies.sleep([whole])
    assert copies.wake() == 32
    assert whole.tolist() == list(range(8))


# The grid


def test_the_grid_must_come_out_even(make_config) -> None:
    config = make_config(fsdp_replicate_size=2, tensor_parallel_size=2)
    spec = ParallelSpec.of(config, 16)
    assert (spec.shard, spec.num_data_ranks) == (4, 8)
    with pytest.raises(ConfigError, match="2 × 2 does not divide the 6 ranks"):
        ParallelSpec.of(config, 6)


@pytest.mark.parametrize(("flag", "value"), [("--tensor-parallel-size", "2"), ("--fsdp-replicate-size", "3")])
def test_one_process_is_no_grid(toy_like_flags, flag: str, value: str) -> None:
    from treadle.config import load_config
    from treadle.run.build import check_one_process

    with pytest.raises(ConfigError, match="does not divide the 1 ranks that train"):
        check_one_process(load_config(None, [*toy_like_flags, flag, value]), pytest.fail)


@pytest.fixture
def toy_like_flags(tiny_model_dir: Path) -> list[str]:
    return ["--hf-checkpoint", str(tiny_model_dir), "--num-rollout", "1"]


def test_settings_of_shards_are_said_to_do_nothing_in_one_process(make_config) -> None:
    from treadle.run.build import check_one_process

    said: list[str] = []
    check_one_process(make_config(fsdp_cpu_offload=True), said.append)
    check_one_process(make_config(), said.append)
    assert said == ["in one process no model is sharded: fsdp_cpu_offload has no effect"]


# One rank


def test_alone_sums_are_the_numbers_themselves() -> None:
    values = torch.tensor([1.0, 2.0])
    assert ALONE.sum(values) is values
    assert ALONE.gather(values) is values
    assert ALONE.max(7) == 7
    assert part_of(values, values) is values
    assert gathered(values, values, torch.device("cpu")) is values


def test_only_what_a_lost_rank_raises_is_renamed() -> None:
    said = r"rank 1 of 2 lost the others while saving \(Connection closed by peer\)"
    with pytest.raises(RankError, match=said), lost_ranks_are_named("saving", 1, 2):
        raise RuntimeError("Connection closed by peer. GLHF!\nmore")
    with pytest.raises(RuntimeError, match="size mismatch"), lost_ranks_are_named("saving", 1, 2):
        raise RuntimeError("size mismatch")
    with pytest.raises(RuntimeError, match=r"^Connection"), lost_ranks_are_named("saving", 0, 1):
        raise RuntimeError("Connection closed")


def test_an_empty_pass_has_loss_zero_and_a_gradient_of_zeros(make_trainer) -> None:
    trainer = make_trainer()
    loss = empty_loss(as_parallel(trainer.model), empty_row(), "auto")
    loss.backward()
    assert loss.item() == 0.0
    for name, param in trainer.model.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


def test_the_last_one_is_marked() -> None:
    assert list(with_last([])) == []
    assert list(with_last("abc")) == [("a", False), ("b", False), ("c", True)]


def test_weights_for_others_are_named_before_they_are_sent(make_trainer) -> None:
    trainer = make_trainer()
    specs = weight_specs(trainer.policy)
    found = {name: (tuple(t.shape), t.dtype) for name, t in full_parameters(trainer.policy)}
    assert found == {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
    assert list(found) == list(specs)


@pytest.mark.parametrize("content", [b"", bytes(4096), b"\xff" * 64], ids=("empty", "zeros", "ones"))
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "optimizer.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors' is no sound safetensors file"):
        TensorFiles(tmp_path, "optimizer")
