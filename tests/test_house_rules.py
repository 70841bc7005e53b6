"""The rules of the house (CONTRIBUTING.md), checked on the source text."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "treadle"
FOLDERS = ("src", "tests", "examples", "benches", "scripts", "recipes", "docs", ".ci")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt", ".importlinter")
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".ini", ""}

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_LONG_FUNCTION_LINES, MAX_PARAMETERS, MAX_METHODS = 500, 60, 80, 8, 18
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
# What is optional or belongs to one seam is imported by its own files only.
OWNERS = {
    "ray": ("run/ray/",),
    "vllm": ("weights/vllm_plugin.py", "weights/vllm_receiver.py"),  # they run inside vLLM
    "sglang": ("rollout/engines/sglang_engine",),
    "wandb": ("observe/wandb_sink.py",),
    "tensorboard": ("observe/sinks.py",),
}
LOADED_BY_THEM = {"weights/vllm_receiver.py"}  # by the optional package itself, so it is there
SPEAKERS = ("cli.py", "observe/")  # who may print
TREE_HEADINGS = re.compile(r"layout|file tree|what is where|where things are|map of", re.IGNORECASE)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_files() -> list[Path]:
    files = [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    files += [ROOT / page for page in PAGES if (ROOT / page).is_file()]
    return [p for p in files if p.suffix in TEXT and "__pycache__" not in p.parts and ".egg-info" not in str(p)]


FILES = {path: path.read_text() for path in text_files()}
TREES = {path: ast.parse(text) for path, text in FILES.items() if path.suffix == ".py"}
PACKAGE = {path.relative_to(SOURCE).as_posix(): tree for path, tree in TREES.items() if SOURCE in path.parents}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def report(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_the_source_was_found():
    assert len(PACKAGE) > 50
    assert {"cli.py", "run/loop.py", "types.py"} <= PACKAGE.keys()


# Size


def test_files_are_short():
    lines = {relative(path): FILES[path].count("\n") for path in TREES}
    report([f"{name}: {n} lines, at most {MAX_FILE_LINES}" for name, n in lines.items() if n > MAX_FILE_LINES])


def test_functions_are_short():
    """60 lines, or 80 where a comment `# long: reason` stands on the line of the `def`."""
    faults = []
    for path, tree in TREES.items():
        source = FILES[path].splitlines()
        for node in functions(tree):
            length = (node.end_lineno or 0) - node.lineno + 1
            has_reason = re.search(r"# long: \w", source[node.lineno - 1])
            if length > (MAX_LONG_FUNCTION_LINES if has_reason else MAX_FUNCTION_LINES):
                faults.append(f"{relative(path)}:{node.lineno}: {node.name} has {length} lines")
    report(faults)


def test_functions_have_few_parameters():
    faults = []
    for path, tree in TREES.items():
        for node in functions(tree):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            names = names[1:] if names[:1] in (["self"], ["cls"], ["ctx"]) else names
            if len(names) > MAX_PARAMETERS:
                faults.append(f"{relative(path)}:{node.lineno}: {node.name} has {len(names)} parameters; make a record")
    report(faults)


def test_classes_have_few_methods():
    faults = []
    for name, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
                if count > MAX_METHODS:
                    faults.append(f"{name}:{node.lineno}: {node.name} has {count} methods, at most {MAX_METHODS}")
    report(faults)


# Names and words


def test_no_module_has_a_name_that_says_nothing():
    report([relative(p) for p in TREES if VAGUE_NAMES & {p.stem, *(part for part in p.relative_to(ROOT).parts)}])


def test_every_public_module_class_and_function_says_what_it_is():
    """Rules of the configuration are named by what they demand, and each says its sentence to the user."""
    faults = []
    for name, tree in PACKAGE.items():
        if not ast.get_docstring(tree):
            faults.append(f"{name}: the module has no docstring")
        if re.fullmatch(r"config/rules_\w+\.py", name):
            continue
        for node in tree.body:
            is_public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_public and not node.name.startswith("_") and not ast.get_docstring(node):
                faults.append(f"{name}:{node.lineno}: {node.name} has no docstring")
    report(faults)


def test_nothing_is_left_to_be_done():
    marks = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
    report([f"{relative(path)}: {found[0]}" for path, text in FILES.items() if (found := marks.search(text))])


def test_no_phrase_that_a_newcomer_would_stumble_over():
    phrases = (
        "anew|hears of|signs? of life|glances?|taken for dead|computes no air|plain twin|the plain way|whoever|"
        "who does not come|the one before|no longer|where not given"
    ).replace(" ", r"\s+(?:#\s*)?")  # a phrase may go on in the next line
    faults = []
    for path, text in FILES.items():
        if path.parts[len(ROOT.parts)] in ("src", "docs") and path.name != "log.md":
            found = re.finditer(rf"\b(?:{phrases})\b", text, flags=re.IGNORECASE)
            faults += [f"{relative(path)}:{text[: m.start()].count(chr(10)) + 1}: {m[0]!r}" for m in found]
    report(faults)


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    paths = re.compile(r"(?<![\w.~-])/(" + "|".join(("wo" + "rk", "ro" + "ot", "ho" + "me", "tm" + "p/w")) + r")(/|\b)")
    faults = []
    for path, text in FILES.items():
        faults += [f"{relative(path)}: {line.strip()}" for line in text.splitlines() if paths.search(line)]
    report(faults)


# Calls that are not made


def test_no_pickle_is_loaded_and_no_setting_is_read_by_a_name_in_a_string():
    faults = []
    for name, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and any(a.name.split(".")[0] in ("pickle", "dill") for a in node.names):
                faults.append(f"{name}:{node.lineno}: imports pickle")
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("pickle", "dill"):
                faults.append(f"{name}:{node.lineno}: imports pickle")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.serialization.load"):
                faults.append(f"{name}:{node.lineno}: torch.load")
            if isinstance(node, ast.Call) and re.match(r"(has|get)attr\((self\.)?config\b", ast.unparse(node)):
                hf_config = name.startswith("models/") and ast.unparse(node).startswith("hasattr")  # no class of ours
                faults += [] if hf_config else [f"{name}:{node.lineno}: {ast.unparse(node)}"]
    report(faults)


def test_code_of_a_model_or_a_data_set_is_never_run():
    """Every loader is told so: one that is not told asks on stdin."""
    loaders = {"from_pretrained", "from_config", "load_dataset"}
    faults = []
    for name, tree in PACKAGE.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                continue
            called = ast.unparse(node.func)
            if called.split(".")[-1] not in loaders or called.startswith("GenerationConfig."):  # that one holds numbers
                continue
            told = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
            if [ast.unparse(value) for value in told] != ["False"]:
                faults.append(f"{name}:{node.lineno}: {called} without trust_remote_code=False")
    report(faults)


def test_only_the_command_line_and_the_display_print():
    report(
        [
            f"{name}:{node.lineno}: print; hand text to a `warn` or `Progress` that the caller gives"
            for name, tree in PACKAGE.items()
            if not name.startswith(SPEAKERS)
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id == "print"
        ]
    )


# Imports


def test_each_optional_package_is_imported_by_its_own_files_only():
    faults = []
    for name, tree in PACKAGE.items():
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for package in {m.split(".")[0] for m in modules} & OWNERS.keys():
                if not name.startswith(OWNERS[package]):
                    faults.append(f"{name}:{node.lineno}: imports {package}; only {OWNERS[package]} may")
                if node in tree.body and name not in LOADED_BY_THEM:
                    faults.append(f"{name}:{node.lineno}: imports {package} at the top; do it where it is used")
    report(faults)


def test_imports_run_one_way():
    command = Path(sys.executable).with_name("lint-imports")
    if not command.is_file():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_test_folders_mirror_the_source():
    unit = ROOT / "tests" / "unit"
    folders = [p.relative_to(unit) for p in unit.rglob("*") if p.is_dir() and p.name != "__pycache__"]
    report([f"tests/unit/{p}: there is no src/treadle/{p}" for p in folders if not (SOURCE / p).is_dir()])


def test_test_files_mirror_the_source():
    """A file tests the module of its name; more tests of it are in files that go on after its name, or after the folder's."""
    unit = ROOT / "tests" / "unit"
    modules = {name.removesuffix(".py") for name in PACKAGE}
    faults = []
    for path in unit.rglob("test_*.py"):
        folder, name = path.parent.relative_to(unit).as_posix(), path.stem.removeprefix("test_")
        here = {module.rpartition("/")[2] for module in modules if (module.rpartition("/")[0] or ".") == folder}
        if not any(name == module or name.startswith(f"{module}_") for module in here):
            faults.append(f"{relative(path)}: there is no module {folder}/{name}.py")
    report(faults)


# Pages


def file_tree(page: str) -> list[str]:
    """Paths of the first fenced block under a heading such as "Layout", children joined to their parents.

    A line is `name` or `name  name  …`, indented below its folder (or behind tree lines), then two spaces or more and
    what it is.
    """
    paths: list[str] = []
    for section in re.split(r"^#+ ", page, flags=re.MULTILINE)[1:]:
        block = re.search(r"^```\w*\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        if not TREE_HEADINGS.search(section.splitlines()[0]) or block is None:
            continue
        above: list[tuple[int, str]] = []
        for line in block[1].splitlines():
            bare = re.sub(r"[│├└─|`]", " ", line)
            names = re.split(r"\s+", bare.strip())
            indent = len(bare) - len(bare.lstrip())
            names = [names[0], *(n for n in names[1:] if re.fullmatch(r"[\w./-]+(\.py|\.md|\.toml|\.txt|/)", n))]
            if names == [""] or not re.fullmatch(r"[\w./*-]+", names[0]):
                continue
            above = [(at, folder) for at, folder in above if at < indent]
            parent = "".join(folder for _, folder in above)
            paths += [parent + name for name in names]
            if names[0].endswith("/"):
                above.append((indent, names[0]))
    return paths


def test_the_file_tree_of_the_readme_is_there():
    readme = ROOT / "README.md"
    paths = file_tree(readme.read_text()) if readme.is_file() else []
    if not paths:
        pytest.skip("README.md has no file tree yet")
    report([f"README.md names {path}, which is not there" for path in paths if not list(ROOT.glob(path.rstrip("/")))])


def test_how_a_file_tree_is_read():
    page = "# T\n## Layout\n```\nscripts/   install\nsrc/treadle/\n  run/   loop.py  the loop\n  types.py  errors.py  x\ndocs/ y\n```\n"
    want = ["scripts/", "src/treadle/", "src/treadle/run/", "src/treadle/loop.py", "src/treadle/types.py"]
    assert file_tree(page) == [*want, "src/treadle/errors.py", "docs/"]
    drawn = "## Layout\n```text\nsrc/\n├── a/   what\n│   └── b.py   it is\n└── c.py\n```\n"
    assert file_tree(drawn) == ["src/", "src/a/", "src/a/b.py", "src/c.py"]
    assert file_tree("## Usage\n```\nscripts/\n```\n") == []


def test_files_that_the_pages_name_are_there():
    faults = []
    for path, text in FILES.items():
        if path.suffix != ".md" or path.name in ("CHANGELOG.md", "log.md"):
            continue
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|toml|md))`", prose):
            if not any((folder / name).exists() for folder in (ROOT, SOURCE, SOURCE.parent, path.parent)):
                faults.append(f"{relative(path)} names {name}, which is not there")
    report(faults)
