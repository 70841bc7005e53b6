"""What a run says of its steps."""

from types import SimpleNamespace

import pytest

from treadle.metrics import metric
from treadle.run.loop import Schedule
from treadle.run.record import Record


@pytest.mark.parametrize(("gap", "warned"), [(0.04, False), (0.2, True)])
def test_a_gap_between_engine_and_trainer_is_warned_about(make_config, gap, warned):
    said: list[str] = []
    ignore = lambda *_: None  # noqa: E731
    outputs = SimpleNamespace(
        sink=SimpleNamespace(write=ignore), progress=SimpleNamespace(step=ignore, warn=said.append)
    )
    record = Record(make_config(max_logprob_diff=0.1), Schedule(0, 9), outputs)
    record.step(7, [metric("train/rollout_logprob_abs_diff", gap)])
    assert [text.startswith("rollout 7: the engine's logprobs are 0.2 nats from the trainer's") for text in said] == (
        [True] if warned else []
    )
