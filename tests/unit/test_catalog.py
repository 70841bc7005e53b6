"""The records of algorithms and rewards are what the code and the configuration have."""

import inspect
import subprocess
import sys

import pytest

from treadle import algorithms, catalog
from treadle.config.fields import config_fields
from treadle.rollout.rewards import BUILTIN_REWARDS

TABLES = {
    "estimator": (catalog.ESTIMATORS, algorithms.ESTIMATORS),
    "policy loss": (catalog.POLICY_LOSSES, algorithms.POLICY_LOSSES),
    "kl": (catalog.KL_ESTIMATORS, algorithms.KL_ESTIMATORS),
    "correction": (catalog.CORRECTIONS, algorithms.CORRECTIONS),
    "reward": (catalog.REWARDS, BUILTIN_REWARDS),
}
RECORDS = [record for table, _ in TABLES.values() for record in table.values()]


def test_torch_is_not_imported():
    code = "import sys; import treadle.catalog, treadle.config; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("kind", TABLES)
def test_every_table_has_the_names_of_its_records(kind):
    records, table = TABLES[kind]
    assert list(records) == list(table) == [record.name for record in records.values()]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_every_record_says_what_it_is_and_its_function_takes_its_parameters(record):
    assert record.help
    assert callable(record.load())
    function = getattr(record.load(), "func", record.load())
    assert {p.name for p in record.parameters} <= set(inspect.signature(function).parameters)


def test_parameters_are_fields_with_the_same_default():
    for record in RECORDS:
        for parameter in record.parameters:
            field = config_fields()[parameter.name]
            assert (field.section, field.default, field.description) == ("algorithm", parameter.default, parameter.help)


def test_every_default_policy_loss_exists():
    assert {record.policy_loss for record in catalog.ESTIMATORS.values()} <= set(catalog.POLICY_LOSSES)


def test_a_parameter_is_what_its_setting_says():
    loss = catalog.POLICY_LOSSES["sapo"].load({"sapo_tau_positive": 3.0, "lr": 1.0})
    assert loss.keywords == {"sapo_tau_positive": 3.0, "sapo_tau_negative": 1.05}


NEW_ALGORITHMS = """
from dataclasses import replace
from treadle import catalog
from treadle.algorithms import losses


def gentle(inputs, *, gentleness):
    result = losses.ppo(inputs)
    return replace(result, loss=result.loss / gentleness)


losses.gentle = gentle
record = catalog.PolicyLossRecord(
    "gentle", "ppo, divided", reads=("eps_clip",), parameters=(catalog.Parameter("gentleness", 2.0, "Divisor.", {"gt": 0}),)
)
catalog.POLICY_LOSSES["gentle"] = record

import torch
from treadle.algorithms import shaping

shaping.powered = lambda rewards, lengths, power: rewards ** power * lengths
catalog.ESTIMATORS["powered"] = catalog.EstimatorRecord(
    "powered", "r^p", function="powered", parameters=(catalog.Parameter("power", 2.0, "Exponent.", {"ge": 1}),)
)

from treadle.algorithms.advantages import AdvantageInputs, AdvantageSettings
from treadle.config import check_config, load_config
from treadle.config.docs import flags_markdown
from treadle.errors import ConfigError
from treadle.training.objective import build_objective

SOUND = "--hf-checkpoint m --prompt-data d.jsonl --num-rollout 1 --rm-type exact --label-key a".split()
config = load_config(None, [*SOUND, "--policy-loss", "gentle", "--gentleness", "4"])
assert check_config(config) == []
inputs = (torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor([0]), 1)
assert build_objective(config.algorithm, 64).policy_loss(*inputs).loss.tolist() == [-0.25]
assert "`--gentleness`" in flags_markdown()
config = load_config(None, [*SOUND, "--advantage-estimator", "powered", "--power", "3"])
assert check_config(config) == []
rewards = AdvantageInputs(torch.tensor([2.0, 1.0]), torch.zeros(2).long(), torch.tensor([0, 0, 1]))
assert build_objective(config.algorithm, 64).estimator.shape(rewards, AdvantageSettings()).tolist() == [16.0, 1.0]
for words, fault in ((["--gentleness", "4"], "gentleness = 4.0 does nothing with policy loss ppo: it is read by gentle"),
                     (["--power", "3"], "power = 3.0 does nothing with grpo: it is read by powered"),
                     (["--policy-loss", "gentel"], "did you mean 'gentle'")):
    try:
        check_config(load_config(None, [*SOUND, *words]))
    except ConfigError as error:
        assert fault in str(error), error
    else:
        raise AssertionError(fault)
print("done")
"""


def test_a_new_loss_or_estimator_is_a_function_and_a_record():
    """Its flag, its help, its checks and the trainer follow from them."""
    found = subprocess.run([sys.executable, "-c", NEW_ALGORITHMS], capture_output=True, text=True)
    assert found.stdout == "done\n", found.stderr[-2000:]
