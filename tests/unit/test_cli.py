"""The command line: help, errors, exit codes, and what each command prints."""

import os
import shlex
import subprocess
import sys
import time

import pytest

import treadle
from treadle.cli import main
from treadle.config import Config, load_config
from treadle.errors import ConfigError


def run(*argv: str, capsys) -> tuple[int, str, str]:
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(argv, capsys):
    code, out, err = run(*argv, capsys=capsys)
    assert (code, err) == (0, "")
    for command in ("train", "eval", "plan", "config", "model"):
        assert f"\n  {command} " in out


def test_version(capsys):
    assert run("--version", capsys=capsys) == (0, f"treadle {treadle.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["trian"], "no command 'trian'; did you mean 'train'?"),
        (["zzz"], "commands are train, eval, plan, config, model"),
        (["quick.toml"], "treadle train quick.toml"),
        (["train", "no/such.toml"], "no recipe at no/such.toml"),
        (["train", "--rollout-batch-sze", "3"], "did you mean --rollout-batch-size?"),
        (["config", "--docs", "flag"], "flags or metrics"),
        (["config", "--docs"], "flags or metrics"),
        (["model"], "treadle model --help"),
        (["model", "ftch"], "'fetch'"),
        (["model", "export", "x"], "out"),
        (["model", "export", "x", "y", "--dtype", "int8"], "--dtype"),
        (["model", "fetch", "nothing-like-it"], "unknown bundled model 'nothing-like-it'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(argv, part, capsys):
    code, out, err = run(*argv, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("treadle: error: ")
    assert err.count("\n") == 1
    assert part in err


def test_plan_lists_all_faults(capsys):
    code, out, err = run("plan", capsys=capsys)
    assert (code, out) == (2, "")
    assert "4 faults" in err
    assert "hf_checkpoint is not given" in err


def test_config_prints_a_recipe_that_loads_back(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text('[data]\nprompt_data = ["a", "b"]\n')
    code, out, _ = run("config", str(path), "--lr", "1e-5", "--rollout-stop", "\n", capsys=capsys)
    assert code == 0
    path.write_text(out)
    config = load_config(path)
    assert config.data.prompt_data == ("a", "b")
    assert config.optim.lr == 1e-5
    assert config.rollout.rollout_stop == ("\n",)
    changed = {"data": {"prompt_data"}, "optim": {"lr"}, "rollout": {"rollout_stop"}}
    assert config.model_dump(exclude=changed) == Config().model_dump(exclude=changed)


@pytest.mark.parametrize("words", [("--docs", "flags"), ("--docs=flags",)])
def test_config_docs(words, capsys):
    code, out, _ = run("config", *words, capsys=capsys)
    assert code == 0
    assert out.startswith("# Flags\n")


def test_config_docs_metrics(capsys):
    assert run("config", "--docs", "metrics", capsys=capsys)[1].startswith("# Metrics\n")


def test_flag_help_exits_0(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    assert "usage: treadle train [RECIPE]" in capsys.readouterr().out


def test_interrupt_exits_130_with_one_line(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.cli._plan", interrupted)
    assert run("plan", capsys=capsys) == (130, "", "treadle: interrupted\n")


def treadle_process(*argv: str, **options) -> subprocess.CompletedProcess:
    code = f"import sys; from treadle.cli import main; sys.exit(main({list(argv)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **options)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from treadle.cli import main; main(['--help']); "
        "print(*{'torch', 'transformers', 'pydantic', 'numpy', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_flags_and_their_help_need_no_torch():
    code = (
        "import sys; from treadle.config import load_config, to_toml; to_toml(load_config(None, ['--lr', '1'])); "
        "import treadle.config.docs; print(*{'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_help_is_quick():
    fastest = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        assert treadle_process("--help").returncode == 0
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 0.6


def test_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from treadle.cli import main; sys.exit(main(['config', '--docs', 'flags']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_unforeseen_exception_is_one_line_with_its_traceback_in_a_file(monkeypatch, capsys, tmp_path):
    def broken(words):
        raise KeyError("a\nb")

    monkeypatch.setattr("treadle.cli._plan", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = run("plan", capsys=capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("treadle: internal error: KeyError: ")
    (file,) = tmp_path.iterdir()
    assert str(file) in err
    assert "Traceback" in file.read_text()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    code, out, err = run("plan", capsys=capsys)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.endswith("please report it with its traceback, which TREADLE_TRACEBACK=1 shows\n")
    monkeypatch.setenv("TREADLE_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["plan"])


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (MemoryError(), "more memory than there is"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"), "more memory"),
        (OSError(28, "No space left on device", "/x/y"), "can't use '/x/y': No space left on device"),
    ],
)
def test_a_machine_that_ran_out_of_something_is_one_line_and_exit_2(error, part, monkeypatch, capsys):
    def broken(words):
        raise error

    monkeypatch.setattr("treadle.cli._plan", broken)
    code, _, err = run("plan", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert part in err


def test_words_of_a_file_in_a_message_do_not_act_on_the_terminal(monkeypatch, capsys):
    def refused(words):
        raise ConfigError("2 faults:\n  \x1b[31mred\r\n  a\x07\nb \u202ec")

    monkeypatch.setattr("treadle.cli._plan", refused)
    code, _, err = run("plan", capsys=capsys)
    assert code == 2
    assert err == "treadle: error: 2 faults:\n  ␛[31mred␍\n  a␇⏎b \\u202ec\n"


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        ("config >&-", 0, ""),
        ("--help >&-", 0, ""),
        ("--version <&- >&- 2>&-", 0, ""),
        ("train --help >&-", 0, ""),
        ("nonsense >&- 2>&-", 2, ""),
        ("config >/dev/full", 2, "treadle: error: the output can't be written: No space left on device; free"),
    ],
)
def test_a_closed_or_full_output_is_no_traceback(redirected, code, said):
    program = [sys.executable, "-c", "import sys; from treadle.cli import main; sys.exit(main())"]
    words = " ".join(map(shlex.quote, program))
    done = subprocess.run(
        ["bash", "-c", f"{words} {redirected}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == bool(said)


def test_a_user_who_closed_stdout_is_no_fault():
    code = (
        "import sys, treadle.cli as cli; cli._plan = lambda words: sys.stdout.close() or 0; "
        "code = cli.main(['plan']); sys.stdout = None; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
