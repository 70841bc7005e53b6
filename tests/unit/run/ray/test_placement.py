"""How many bundles a run asks for; placing them needs Ray and is in tests/flow."""

import pytest

from treadle.run.ray.placement import wanted_bundles


@pytest.mark.parametrize(
    ("fields", "gpus", "want"),
    [
        ({}, False, [{"CPU": 1}] * 2),
        ({"rollout_num_gpus": 3, "num_cpus_per_worker": 2}, False, [{"CPU": 2}] * 4),
        ({"rollout_num_gpus": 3}, True, [{"GPU": 1, "CPU": 1}] * 4),
        ({"colocate": True}, True, [{"GPU": 1, "CPU": 1}]),
        ({"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}, True, [{"GPU": 1, "CPU": 1}] * 5),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "colocate": True}, False, [{"CPU": 1}] * 4),
        ({"critic_num_nodes": 2, "rollout_num_gpus": 3}, False, [{"CPU": 1}] * 6),
        ({"critic_num_nodes": 2, "rollout_num_gpus": 1, "colocate": True}, False, [{"CPU": 1}] * 3),
    ],
)
def test_one_bundle_for_each_gpu_or_cpu_worker(make_config, fields, gpus, want):
    assert wanted_bundles(make_config(**fields).cluster, gpus, trains=True, generates=True) == want


def test_half_a_loop_asks_for_its_half(make_config):
    cluster = make_config(rollout_num_gpus=3).cluster
    assert len(wanted_bundles(cluster, False, trains=True, generates=False)) == 1
    assert len(wanted_bundles(cluster, False, trains=False, generates=True)) == 3
