"""Settings of a cluster that do nothing or contradict each other are named before anything starts."""

import pytest

from treadle.config.checks import findings_of

FAULTS = [
    ({"max_lag": 1}, "max_lag = 1 needs runtime = ray"),
    ({"runtime": "ray", "rollout_num_gpus_per_engine": 2}, "a torch engine runs on one"),
    ({"runtime": "ray", "colocate": True, "rollout_num_gpus": 2}, "the engines share the 1 that train"),
    ({"runtime": "ray", "colocate": True, "max_lag": 1}, "max_lag = 1 with colocate"),
    (
        {"runtime": "ray", "actor_num_nodes": 2, "critic_num_nodes": 3, "tensor_parallel_size": 2},
        "critic_num_nodes × critic_num_gpus_per_node = 3 critic workers can't be divided",
    ),
    ({"runtime": "ray", "max_lag": 1, "debug_rollout_only": True}, "needs both halves of the loop"),
    (
        {"runtime": "ray", "colocate": True, "weight_transport": "cuda_ipc", "device": "cpu"},
        "weight_transport = cuda_ipc hands over GPU memory and device = cpu has none",
    ),
    ({"runtime": "ray", "weight_transport": "cuda_ipc"}, "weight_transport = cuda_ipc without colocate"),
    (
        {"runtime": "ray", "colocate": True, "weight_transport": "cuda_ipc", "actor_num_nodes": 2},
        "weight_transport = cuda_ipc with 2 train workers",
    ),
    (
        {"runtime": "ray", "ray_address": "nonsense"},
        "ray_address = nonsense is not the address of a Ray cluster; give host:port",
    ),
    ({"runtime": "ray", "ray_address": "ray://head:10001"}, "is not the address of a Ray cluster"),
]
WARNINGS = [
    ({"rollout_num_gpus": 2, "colocate": True}, "rollout_num_gpus, colocate do nothing with runtime = local"),
    ({"runtime": "ray", "offload_train": False}, "offload_train = false does nothing without colocate"),
    ({"runtime": "ray", "on_publish": "abort"}, "on_publish = abort does nothing with max_lag = 0"),
    ({"runtime": "ray", "max_lag": 1}, "rollout_correction"),
    ({"runtime": "ray", "weight_folder": "/x"}, "read by the disk transports only"),
    ({"runtime": "ray", "ray_address": "auto", "ray_num_cpus": 3}, "ray_num_cpus does nothing with ray_address"),
    ({"runtime": "ray", "ray_address": "auto", "ray_bind_address": "10.0.0.1"}, "ray_bind_address does nothing"),
    ({"runtime": "ray", "ray_address": "auto", "ray_dashboard": True}, "ray_dashboard does nothing"),
]
FINE = [
    {},
    {"runtime": "ray"},
    {"runtime": "ray", "rollout_num_gpus": 3, "ray_num_cpus": 8},
    {"runtime": "ray", "colocate": True, "rollout_num_gpus": 1, "offload_train": False},
    {"runtime": "ray", "max_lag": 2, "on_publish": "pause", "rollout_correction": "tis"},
    {"runtime": "ray", "weight_transport": "disk", "weight_folder": "/x"},
    {"runtime": "ray", "colocate": True, "weight_transport": "cuda_ipc"},
    {"runtime": "ray", "ray_address": "head.local:6379"},
    {"runtime": "ray", "ray_address": "[::1]:6379"},
    {"runtime": "ray", "critic_num_nodes": 1, "colocate": True, "rollout_num_gpus": 2},
]


def findings(config):
    return findings_of(config, {"run"})


@pytest.mark.parametrize(("fields", "text"), FAULTS)
def test_what_is_refused(make_config, fields, text):
    faults = [finding.text for finding in findings(make_config(num_rollout=1, **fields)) if finding.fatal]
    assert len(faults) == 1
    assert text in faults[0]


@pytest.mark.parametrize(("fields", "text"), WARNINGS)
def test_what_is_warned_of(make_config, fields, text):
    found = findings(make_config(num_rollout=1, **fields))
    assert [finding.fatal for finding in found] == [False]
    assert text in found[0].text


@pytest.mark.parametrize("fields", FINE)
def test_what_is_fine(make_config, fields):
    assert findings(make_config(num_rollout=1, **fields)) == []


def test_evaluation_says_that_it_runs_in_one_process(make_config):
    sound = {"eval_prompt_data": ("a=x",), "rm_type": ("exact",)}
    assert findings_of(make_config(**sound), {"eval"}) == []
    (found,) = findings_of(make_config(**sound, runtime="ray"), {"eval"})
    assert (found.fatal, "one process" in found.text) == (False, True)


@pytest.mark.parametrize(
    ("fields", "train", "critic", "engines"),
    [
        ({}, 1, 0, 1),
        ({"rollout_num_gpus": 3}, 1, 0, 3),
        ({"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}, 1, 0, 2),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 4}, 8, 0, 8),
        ({"critic_num_nodes": 2}, 1, 2, 1),
        ({"critic_num_gpus_per_node": 3, "colocate": True}, 1, 3, 4),
        ({"critic_num_nodes": 2, "critic_num_gpus_per_node": 3}, 1, 6, 1),
    ],
)
def test_how_many_workers_there_are(make_config, fields, train, critic, engines):
    cluster = make_config(**fields).cluster
    assert (cluster.num_train_workers, cluster.num_critic_workers, cluster.num_engines) == (train, critic, engines)
