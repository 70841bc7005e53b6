"""What every group filter must hold to, as a check that any can be run through, yours too.

check_filter("my_filter.py:keep", groups)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.errors import ConfigError
from treadle.rollout.filters import GroupFilter, load_filter
from treadle.rollout.trajectory import failed
from treadle.types import Group, sample_to_json


def check_filter(group_filter: str | GroupFilter, groups: Sequence[Group]) -> None:
    """Check a group filter, by name, path or function, on scored groups and on odd forms of them.

    It must return None or a short word for every group: also for one sample, for samples that failed, and for none that
    was scored. It must say the same again, whatever the order of the samples, and leave the group as it was.

    Raises:
        AssertionError: if one of these does not hold; the text says which.
    """
    assert groups, "check_filter needs at least one group"
    keep = load_filter(group_filter) if isinstance(group_filter, str) else group_filter
    for group in groups:
        _check(keep, group)
        lost = tuple(failed(sample, "its reward raised") for sample in group.samples)
        for odd in (group.samples[:1], (*group.samples[1:], lost[0]), lost):
            _check(keep, replace(group, samples=odd))


def _check(keep: GroupFilter, group: Group) -> None:
    before = [sample_to_json(sample) for sample in group.samples]
    try:
        said = [keep(group), keep(group), keep(replace(group, samples=group.samples[::-1]))]
    except ConfigError as error:
        raise AssertionError(str(error)) from error
    assert all(word is None or (isinstance(word, str) and word) for word in said), f"returned {said[0]!r}"
    assert said[0] == said[1], f"said {said[0]!r} of a group, and then {said[1]!r}"
    assert said[0] == said[2], f"said {said[0]!r} of a group, and {said[2]!r} of its samples in another order"
    assert [sample_to_json(sample) for sample in group.samples] == before, "changed a sample of the group"
