"""How metrics join, and that the table and the code name the same ones."""

import ast
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from treadle.metrics import METRICS, Metric, metric, reduce_metrics, spec_of

SOURCE = Path(treadle.__file__).parent
FAMILIES = {row.name.split("/")[0] for row in METRICS}
HOLE = "hole"  # stands for the {…} of an f-string

# Reductions


def test_a_mean_is_weighted():
    items = [metric("train/entropy", 1.0, weight=3), metric("train/entropy", 2.0, weight=1)]
    assert reduce_metrics(items) == {"train/entropy": 1.25}


def test_a_mean_of_nothing_is_left_out():
    assert reduce_metrics([metric("train/entropy", 5.0, weight=0)]) == {}
    items = [metric("train/entropy", float("nan"), weight=0.0), metric("train/lr", 1.0)]
    assert reduce_metrics(items) == {"train/lr": 1.0}


def test_sum_max_min_last():
    def three(name):
        return [metric(name, value) for value in (2.0, 5.0, -1.0)]

    names = ("train/num_tokens", "train/ratio_max", "rollout/reward_min", "train/lr")
    assert [spec_of(name).reduction for name in names] == ["sum", "max", "min", "last"]
    assert reduce_metrics(m for name in names for m in three(name)) == {
        "train/num_tokens": 6.0,
        "train/ratio_max": 5.0,
        "rollout/reward_min": -1.0,
        "train/lr": -1.0,
    }


def test_names_come_in_the_order_they_were_first_seen():
    items = [metric("train/lr", 1), metric("train/loss", 2), metric("train/lr", 3)]
    assert list(reduce_metrics(items)) == ["train/lr", "train/loss"]
    assert reduce_metrics([]) == {}


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 50)), min_size=1, max_size=12), st.randoms())
def test_a_mean_does_not_depend_on_how_it_was_split(parts, random):
    items = [metric("train/kl", value, weight) for value, weight in parts]
    whole = reduce_metrics(items)
    random.shuffle(items)
    assert reduce_metrics(items) == pytest.approx(whole)
    count = sum(weight for _, weight in parts)
    if count:
        assert whole["train/kl"] == pytest.approx(sum(v * w for v, w in parts) / count, abs=1e-6)


def test_what_is_not_finite_is_seen():
    found = reduce_metrics([metric("train/loss", 1.0), metric("train/loss", float("nan"))])
    assert math.isnan(found["train/loss"])


# Names


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rollout/reward/math", "rollout/reward/<part>"),
        ("rollout/reward/my.own-part", "rollout/reward/<part>"),
        ("rollout/dropped/failed", "rollout/dropped/<reason>"),
        ("eval/sums/accuracy", "eval/<set>/accuracy"),
        ("eval/sums/pass_at_8", "eval/<set>/pass_at_<k>"),
        ("rollout/reward_mean", "rollout/reward_mean"),
    ],
)
def test_a_name_finds_its_row(name, row):
    assert spec_of(name).name == row


@pytest.mark.parametrize(
    "name",
    [
        "train/unknown",
        "rollout/reward/",
        "rollout/reward/a/b",
        "eval/sums",
        "eval/sums/pass_at_",
        "eval//accuracy",
        "",
        "loss",
    ],
)
def test_a_name_that_is_not_described_is_refused(name):
    with pytest.raises(KeyError, match="is not described"):
        metric(name, 1.0)
    with pytest.raises(KeyError):
        reduce_metrics([Metric(name, 1.0)])


def test_values_become_plain_floats():
    import numpy as np

    made = metric("train/loss", np.float32(0.5), np.int64(3))
    assert (type(made.value), type(made.weight)) == (float, float)
    assert metric("train/skipped_steps", True).value == 1.0


def test_rows_are_unique_and_described():
    names = [row.name for row in METRICS]
    assert len(set(names)) == len(names)
    for row in METRICS:
        assert re.fullmatch(r"[a-z]+(/(<[a-z]+>|[a-z0-9_]+(<[a-z]+>)?))+", row.name), row.name
        assert row.description.endswith("."), row.name
        assert row.reduction in ("mean", "sum", "max", "min", "last")


# The table and the code


def text_of(node):
    """The text of a string or f-string literal, with HOLE where a value goes; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def literals():
    """Every metric name in the source, beside the table itself: (name, where, made there)."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path == SOURCE / "metrics.py":
            continue
        tree = ast.parse(path.read_text())
        made = {
            id(node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("metric", "mean")
            if node.args
        }
        pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            text = None if id(node) in pieces else text_of(node)
            if text and re.fullmatch(rf"({'|'.join(FAMILIES)})/[\w./<>-]+", text):
                yield text, f"{path.relative_to(SOURCE)}:{node.lineno}", id(node) in made


def is_known(name):
    try:
        return spec_of(name) is not None
    except KeyError:
        return False


def test_every_name_in_the_source_is_in_the_table():
    unknown = []
    for name, where, _ in literals():
        is_beginning = name.endswith("/") and any(row.name.startswith(name) for row in METRICS)
        if not is_beginning and not is_known(name):
            unknown.append(f"{where}: {name}")
    assert not unknown, "\n".join(unknown)


def test_every_row_of_the_table_is_made_somewhere():
    made = {spec_of(name).name for name, _, is_made in literals() if is_made}
    never = [row.name for row in METRICS if row.name not in made]
    assert not never, f"in the table, but nothing makes them: {', '.join(never)}"
