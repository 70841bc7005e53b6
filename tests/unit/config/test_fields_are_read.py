"""A setting that nothing reads is a lie to the user: every field must be read, of its own section, where something happens."""

import ast
from collections.abc import Iterator
from pathlib import Path

import treadle
from treadle import catalog
from treadle.config.fields import config_fields, section_models

SOURCE = Path(treadle.__file__).parent
NOT_READERS = {
    # They describe, check or print fields; none of them makes a field do anything.
    *(
        SOURCE / "config" / f"{name}.py"
        for name in ("fields", "flags", "docs", "recipe", "load", "checks", "conditions")
    ),
    *(SOURCE / "config").glob("rules_*.py"),
    SOURCE / "run" / "plan.py",
    SOURCE / "run" / "memory.py",
}
CLASSES = {model.__name__: section for section, model in section_models().items()}


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c` and of `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def sections_by_name(tree: ast.AST) -> dict[str, set[str]]:
    """What names stand for which sections in a file: a section's own name, what is annotated with its class, and what is
    assigned from it."""
    names = {section: {section} for section in CLASSES.values()}

    def stands_for(name: str, sections: set[str]) -> None:
        names[name] = names.get(name, set()) | sections

    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            found = {CLASSES[n.id] for n in ast.walk(node.annotation) if isinstance(n, ast.Name) and n.id in CLASSES}
            stands_for(node.arg if isinstance(node, ast.arg) else last_name(node.target), found)
        for target, value in assigned(node):
            if isinstance(value, ast.Attribute) and value.attr in section_models():
                stands_for(last_name(target), {value.attr})
    return names


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def is_setting(node: ast.AST) -> bool:
    """True for a call that says when a field has an effect, as `setting(None, when(lambda config: …))` does."""
    return isinstance(node, ast.Call) and last_name(node.func) in ("setting", "when")


def reads_of(text: str) -> set[tuple[str, str]]:
    """Every (section, field) that a file reads."""
    tree = ast.parse(text)
    names = sections_by_name(tree)
    reads: set[tuple[str, str]] = set()
    conditions = [node for node in ast.walk(tree) if is_setting(node)]
    in_conditions = {id(node) for condition in conditions for node in ast.walk(condition)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in in_conditions:
            reads |= {(section, node.attr) for section in names.get(last_name(node.value), ())}
        if isinstance(node, ast.ClassDef) and node.name in CLASSES:
            own = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and last_name(n.value) == "self"}
            reads |= {(CLASSES[node.name], name) for name in own}
    return reads


def test_every_field_is_read():
    """A parameter of an algorithm is read by `Record.load`, which `test_catalog.py` checks, and the arguments of a server by
    `EngineSection.arguments`."""
    reads = set().union(*(reads_of(p.read_text()) for p in SOURCE.rglob("*.py") if p not in NOT_READERS))
    made = catalog.PARAMETERS.keys() | catalog.SERVERS.keys()
    fields = {(field.section, field.name) for field in config_fields().values() if field.name not in made}
    unread = [f"{name} of [{section}]" for section, name in sorted(fields - reads)]
    assert not unread, f"nothing reads {', '.join(unread)}: use them or remove them from the sections"


def test_only_a_section_s_own_field_counts():
    text = """
def f(config, section: OptimSection, own):
    part, other = config.train, own.place
    section.lr, part.seed, other.progress, own.load, config.checkpoint.save
    section.min_lr = 3
    when(lambda config: config.train.num_epoch)
"""
    assert reads_of(text) == {("optim", "lr"), ("train", "seed"), ("checkpoint", "save")}
