"""Samples that no memory holds are refused before anything starts."""

import pytest

from treadle.cli import main
from treadle.errors import ConfigError
from treadle.run.memory import MachineMemory, check_samples_fit

MACHINE = MachineMemory(total=2**35, available=2**34)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"rollout_batch_size": 2**63 - 1}, "rollout_batch_size × n_samples_per_prompt = 73786976294838206456 samples"),
        ({"n_samples_per_prompt": 10**12}, "rollout_batch_size × n_samples_per_prompt"),
        ({"over_sampling_batch_size": 10**12, "group_filter": "zero_signal"}, "over_sampling_batch_size × n_samples"),
        (
            {"n_samples_per_eval_prompt": 10**12, "eval_prompt_data": ("x=y",)},
            "n_samples_per_eval_prompt = 1000000000000",
        ),
    ],
)
def test_more_samples_than_memory_holds(fields, part, make_config):
    with pytest.raises(ConfigError, match="lower them") as caught:
        check_samples_fit(make_config(**fields), MACHINE)
    assert part in str(caught.value)


def test_what_may_fit_is_left_alone(make_config):
    check_samples_fit(make_config(rollout_batch_size=10**6, n_samples_per_prompt=64), MACHINE)
    check_samples_fit(make_config(n_samples_per_eval_prompt=10**12), MACHINE)
    check_samples_fit(make_config(rollout_batch_size=10**12, debug_train_only=True), MACHINE)
    check_samples_fit(make_config(rollout_batch_size=10**12), MACHINE, evaluation_only=True)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_train_refuse_them_in_one_line(command, capsys):
    words = "--hf-checkpoint m --prompt-data d.jsonl --rm-type last_number --label-key a --num-rollout 1"
    assert main([command, *words.split(), "--rollout-batch-size", str(10**15)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "samples take at least" in err
