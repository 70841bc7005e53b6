"""docs/models.md says what is true of the installed transformers."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_page_of_families_is_what_the_checks_say(monkeypatch):
    spec = importlib.util.spec_from_file_location("model_families", ROOT / "scripts" / "model_families.py")
    families = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "model_families", families)  # dataclasses look their module up
    spec.loader.exec_module(families)
    assert families.page() == (ROOT / "docs" / "models.md").read_text()
