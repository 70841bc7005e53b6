"""The contract of group filters, with those that come along and with ones that break it."""

import pytest

from treadle.rollout.filter_contract import check_filter
from treadle.rollout.filters import GROUP_FILTERS

EXAMPLE = """
def keep(group):
    return "too_easy" if min(sample.reward or 0 for sample in group.samples) == 1 else None
"""
BROKEN = """
count = 0

def forgets(group):
    global count
    count += 1
    return "odd" if count % 2 else None

def first_only(group):
    return "low" if (group.samples[0].reward or 0) < 0.5 else None

def changes(group):
    group.samples[0].loss_mask[:] = True

def number(group):
    return 3

def needs_all(group):
    return "low" if sum(sample.reward for sample in group.samples) < 1 else None
"""


@pytest.fixture
def groups(make_groups):
    return make_groups((4, 2, 3))


@pytest.mark.parametrize("name", GROUP_FILTERS)
def test_the_built_in_filters_hold_to_the_contract(groups, name):
    check_filter(name, groups)


def test_the_one_of_the_docs_holds_to_it(groups, tmp_path):
    (tmp_path / "own_filter.py").write_text(EXAMPLE)
    check_filter(f"{tmp_path}/own_filter.py:keep", groups)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("forgets", "said 'odd' of a group, and then None"),
        ("first_only", "of its samples in another order"),
        ("changes", "changed a sample of the group"),
        ("number", "returned 3"),
        ("needs_all", "raised TypeError"),
    ],
)
def test_one_that_breaks_it_is_named(groups, tmp_path, name, fault):
    (tmp_path / "own_filter.py").write_text(BROKEN)
    with pytest.raises(AssertionError, match=fault):
        check_filter(f"{tmp_path}/own_filter.py:{name}", groups)
