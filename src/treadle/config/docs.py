"""The generated pages: every flag from the sections, every metric from its table."""

from __future__ import annotations

from collections.abc import Iterator

from treadle.config.fields import ConfigField, config_fields, override_fields, section_models
from treadle.config.recipe import to_toml_value
from treadle.metrics import METRICS, MetricSpec

_FLAGS_HEAD = """\
# Flags

<!-- Made by `treadle config --docs flags`; edit the descriptions of the fields in src/treadle/config/ instead. -->

Every setting has one name. In a recipe it stands in its section (`[rollout]`, `rollout_batch_size = 16`), on the
command line it is the flag (`--rollout-batch-size 16`). A flag wins over the recipe, the recipe over the default.
A switch is turned on by `--name` and off by `--no-name`; a list takes several words (`--rm-type math exact`);
`None` unsets what may be unset.
"""

_METRICS_HEAD = """\
# Metrics

<!-- Made by `treadle config --docs metrics`; edit the table in src/treadle/metrics.py instead. -->

Every metric says how the numbers of many micro-batches or processes become one. A `<word>` in a name stands for any
text. Fractions are between 0 and 1.
"""


def flags_markdown() -> str:
    """The page of all flags, one table per section."""
    blocks = [_FLAGS_HEAD]
    for section, model in section_models().items():
        rows = [_flag_row(field) for field in config_fields().values() if field.section == section]
        blocks.append(
            "\n".join(
                [
                    f"## [{section}]",
                    "",
                    f"{model.__doc__}",
                    "",
                    "| flag | value | default | meaning |",
                    "|---|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(blocks)


def _flag_row(field: ConfigField) -> str:
    name = f"`{field.flag}`"
    if field.recipe_only:
        name = f"`{field.name}` (recipe only)" if field.holds_tables else f"`{field.flag}-…`"
    value = " ".join([_cell(field.kind), *([_cell(field.bounds)] if field.bounds else [])])
    meaning = _cell(field.description)
    if field.holds_tables:
        meaning += " " + _cell(f"Settings: {', '.join(f'`{item}`' for item in override_fields())}.")
    return f"| {name} | {value} | {_default(field)} | {meaning} |"


def _default(field: ConfigField) -> str:
    if field.default in (None, (), {}, ""):
        return "—"
    return f"`{_cell(to_toml_value(field.default))}`"


def metrics_markdown() -> str:
    """The page of all metrics, one table per group."""
    return "\n".join([_METRICS_HEAD, *_metric_tables()])


def _metric_tables() -> Iterator[str]:
    groups: dict[str, list[MetricSpec]] = {}
    for spec in METRICS:
        groups.setdefault(spec.name.split("/", 1)[0], []).append(spec)
    for group, specs in groups.items():
        rows = [f"| `{s.name}` | {s.unit or '—'} | {s.reduction} | {_cell(s.description)} |" for s in specs]
        yield "\n".join([f"## {group}", "", "| metric | unit | joined by | meaning |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    """Text that can't end its table cell or be read as HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
