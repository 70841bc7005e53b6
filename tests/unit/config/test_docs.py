"""The generated pages are those on disk."""

from pathlib import Path

import pytest

from treadle import catalog
from treadle.config.docs import PAGES, flags_markdown, metrics_markdown
from treadle.config.fields import config_fields
from treadle.metrics import METRICS

DOCS = Path(__file__).parents[3] / "docs"


FILES = {"flags": "flags.md", "metrics": "metrics.md", "algorithms": "algorithms/names.md"}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name):
    on_disk = (DOCS / FILES[name]).read_text()
    assert on_disk == PAGES[name](), f"run: treadle config --docs {name} > docs/{FILES[name]}"


def test_every_algorithm_has_a_page():
    for name in (*catalog.ESTIMATORS, *catalog.POLICY_LOSSES):
        assert (DOCS / "algorithms" / f"{name}.md").is_file()


def test_every_field_and_metric_is_on_its_page():
    flags, metrics = flags_markdown(), metrics_markdown()
    for field in config_fields().values():
        assert f"`{field.name if field.recipe_only else field.flag}`" in flags
        assert field.description
    for spec in METRICS:
        assert f"| `{spec.name}` |" in metrics


def test_tables_have_four_cells_in_every_row():
    for line in (flags_markdown() + metrics_markdown()).splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 5, line
