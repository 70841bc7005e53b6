"""The generated pages: every flag from the sections, every metric from its table, every algorithm from the catalog."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle import catalog
from treadle.config.fields import ConfigField, config_fields, override_fields, section_models
from treadle.config.recipe import to_toml_value
from treadle.metrics import METRICS

_FLAGS = """\
# Flags

<!-- Made by `treadle config --docs flags`; edit the text below the fields in src/treadle/config/ instead. -->

Every setting has one name. In a recipe it stands in its section (`[rollout]`, `rollout_batch_size = 16`), on the
command line it is the flag (`--rollout-batch-size 16`). A flag wins over the recipe, the recipe over the default.
A switch is turned on by `--name` and off by `--no-name`. A list takes several words (`--rm-type math exact`).
`None` unsets a setting that has no value by default.
"""

_METRICS = """\
# Metrics

<!-- Made by `treadle config --docs metrics`; edit the table in src/treadle/metrics.py instead. -->

The column "joined by" says how the numbers of many micro-batches or processes become one. A `<word>` in a name stands
for any text. Fractions are between 0 and 1.
"""

_ALGORITHMS = """\
# Names of algorithms and rewards

<!-- Made by `treadle config --docs algorithms`; edit the records in src/treadle/catalog.py instead. -->

Formulas, flags and a comparison with other systems are on the page of each name; [the overview](README.md) lists them.
`lp` is the logprob now, `lp_old` that of the policy before the step, `lp_ref` that of the reference, `lp_roll` that of the
engine, ρ = exp(lp − lp_old), and w = exp(lp_old − lp_roll).
"""


def flags_markdown() -> str:
    """Return the page of all flags, one table per section."""
    blocks = [_FLAGS]
    for section, model in section_models().items():
        rows = [_flag_row(field) for field in config_fields().values() if field.section == section]
        blocks.append(_table(f"[{section}]", f"{model.__doc__}", ("flag", "value", "default", "meaning"), rows))
    return "\n".join(blocks)


def _flag_row(field: ConfigField) -> tuple[str, ...]:
    name = f"`{field.flag}`"
    if field.recipe_only:
        name = f"`{field.name}` (recipe only)" if field.holds_tables else f"`{field.flag}-…`"
    default = "—" if field.default in (None, (), {}, "") else f"`{to_toml_value(field.default)}`"
    settings = f" Settings: {', '.join(f'`{item}`' for item in override_fields())}." if field.holds_tables else ""
    return name, f"{field.kind} {field.bounds}".strip(), default, field.description + settings


def metrics_markdown() -> str:
    """Return the page of all metrics, one table per group."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for spec in METRICS:
        row = (f"`{spec.name}`", spec.unit or "—", spec.reduction, spec.description)
        groups.setdefault(spec.name.split("/", 1)[0], []).append(row)
    tables = [_table(group, "", ("metric", "unit", "joined by", "meaning"), rows) for group, rows in groups.items()]
    return "\n".join([_METRICS, *tables])


# fmt: off
_TRAITS = {
    "needs_group": "groups", "needs_parts": "two rewards or more", "divides_by_mean": "rewards ≥ 0",
    "needs_values": "a critic, `lambd`", "divides_by_std": "`grpo_std_normalization`", "per_token_reward": "`kl_coef`",
    "uses_gamma": "`gamma`",
}
_KINDS: tuple[tuple[str, tuple[str, ...], Mapping[str, Any], Callable[[Any], tuple[str, ...]]], ...] = (
    ("advantage_estimator", ("name", "advantage", "policy loss", "reads", "source"), catalog.ESTIMATORS,
     lambda r: (f"[{r.name}]({r.name}.md)", r.help, f"`{r.policy_loss}`", _traits(r), r.source)),
    ("policy_loss", ("name", "loss", "settings", "source"), catalog.POLICY_LOSSES,
     lambda r: (f"[{r.name}]({r.name}.md)", r.help, ", ".join(f"`{name}`" for name in r.all_read), r.source)),
    ("rollout_correction", ("name", "weight of a token", "outside its bounds", "bounds", "source"), catalog.CORRECTIONS,
     lambda r: (f"`{r.name}`", r.help, r.settings.bound, _bounds(r.settings), r.source)),
    ("kl_loss_type", ("name", "estimate, d = lp − lp_ref", "source"), catalog.KL_ESTIMATORS,
     lambda r: (f"`{r.name}`", r.help, r.source)),
    ("rm_type", ("name", "reward"), catalog.REWARDS, lambda r: (f"`{r.name}`", r.help)),
    ("weight_transport", ("name", "how weights travel"), catalog.TRANSPORTS, lambda r: (f"`{r.name}`", r.help)),
)
# fmt: on


def algorithms_markdown() -> str:
    """Return the page of all names that the catalog has, one table per kind."""
    tables = [_table(f"`{name}`", "", head, map(row, records.values())) for name, head, records, row in _KINDS]
    return "\n".join([_ALGORITHMS, *tables])


def _traits(record: catalog.EstimatorRecord) -> str:
    return ", ".join(text for trait, text in _TRAITS.items() if getattr(record, trait))


def _bounds(settings: catalog.CorrectionSettings) -> str:
    return f"{settings.low:g} … {'∞' if settings.high == math.inf else format(settings.high, 'g')}"


def _table(title: str, intro: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]
    return "\n".join([f"## {title}", "", *([intro, ""] if intro else []), *lines, ""])


def _cell(text: str) -> str:
    """Return text that can't end its table cell or be read as HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


PAGES = {"flags": flags_markdown, "metrics": metrics_markdown, "algorithms": algorithms_markdown}
