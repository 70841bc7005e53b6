"""A setting that nothing reads is a lie to the user: every field must be read where something happens."""

import ast
from pathlib import Path

import treadle
from treadle.config.fields import config_fields

SOURCE = Path(treadle.__file__).parent
NOT_READERS = {
    # They describe, check or print fields; none of them makes a field do anything.
    *(SOURCE / "config" / f"{name}.py" for name in ("fields", "flags", "docs", "recipe", "load", "checks", "chosen")),
    *(SOURCE / "config").glob("rules_*.py"),
    SOURCE / "run" / "plan.py",
    SOURCE / "run" / "memory.py",
}


def attributes_read() -> set[str]:
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if path not in NOT_READERS:
            nodes = ast.walk(ast.parse(path.read_text()))
            names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return names


def test_every_field_is_read():
    unread = sorted(set(config_fields()) - attributes_read())
    assert not unread, f"nothing reads {', '.join(unread)}: use them or remove them from the sections"
