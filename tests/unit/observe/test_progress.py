from __future__ import annotations

import io
import os
import re
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from treadle.metrics import spec_of
from treadle.observe import curve, progress_plain, progress_rich, progress_state, summary
from treadle.observe.progress import Progress
from treadle.observe.progress_plain import WIDTH, PlainView, header, step_line
from treadle.observe.progress_rich import panel
from treadle.observe.progress_state import RunState
from treadle.observe.report import ShownSample
from treadle.observe.safe_stream import SafeStream

STEP = {
    "rollout/reward_mean": 0.25,
    "rollout/response_length_mean": 23.4,
    "train/entropy": 0.8125,
    "train/rollout_logprob_abs_diff": 0.0123,
    "rollout/tokens_per_second": 742.0,
    "train/tokens_per_second": 15310.0,
    "perf/step_seconds": 20.0,
    "perf/memory_gib": 3.25,
}
SAMPLES = [
    ShownSample("6 × 7?\n", "[bold red]42[/] \x1b[31mred", "42", 1.0),
    ShownSample("long", "x" * 500 + "END", None, None),
]


def ran(*seconds: float, num_rollout: int = 10) -> RunState:
    state = RunState(started=0.0)
    state.begin(num_rollout, 0, 0.0)
    for rollout_id, length in enumerate(seconds):
        state.add_step(rollout_id, {**STEP, "perf/step_seconds": length}, sum(seconds[: rollout_id + 1]))
    return state


def test_every_metric_that_is_shown_is_in_the_table() -> None:
    found = set()
    for module in (curve, progress_plain, progress_rich, progress_state, summary):
        source = Path(module.__file__).read_text()
        found |= set(re.findall(r'"((?:rollout|train|perf)/[a-z_]+[a-z])"', source))
    assert len(found) >= 12
    for name in found:
        assert spec_of(name).name == name


def test_time_left_is_the_median_of_recent_steps_less_the_running_one() -> None:
    assert ran().seconds_left(5.0) is None
    state = ran(100.0, 20.0, 10.0, 20.0)  # median 20, 6 steps left, the 5th began at 150
    assert state.seconds_left(150.0) == 120.0
    assert state.seconds_left(157.0) == 113.0
    assert state.seconds_left(1000.0) == 100.0  # a step that takes long counts as one usual step
    many = ran(*[1000.0] * 5, *[2.0] * 10, num_rollout=20)
    assert many.seconds_left(many.step_began or 0.0) == 10.0
    assert ran(1.0, 1.0, num_rollout=2).seconds_left(2.0) == 0.0


def test_steps_are_timed_by_the_clock_where_no_metric_says() -> None:
    state = RunState(started=0.0)
    state.begin(4, 2, 10.0)
    state.add_step(2, {}, 13.5)
    assert state.step_seconds == [3.5]
    assert state.num_done == 3


def test_troubles_count_the_run_and_show_the_last_truncation() -> None:
    state = ran()
    assert state.troubles() == []
    state.add_step(0, {"rollout/failed_count": 2, "rollout/truncated_fraction": 0.5, "train/skipped_steps": 1}, 1.0)
    state.add_step(1, {"rollout/failed_count": 1, "rollout/truncated_fraction": 0.031}, 2.0)
    assert state.troubles() == [("truncated", "3%"), ("failed", "3"), ("skipped", "1")]


def test_plain_lines_line_up_under_the_header_and_fit() -> None:
    state = ran(20.0, 20.0)
    line = step_line(state, 40.0)
    assert header() == "       step  reward  length  entropy  lp gap  roll tok/s  train tok/s  seconds     left"
    assert line == "       2/10   0.250    23.4    0.812  0.0123         742        15.3k     20 s     2:40"
    state.add_step(
        99_998, {"rollout/failed_count": 10**9, "train/skipped_steps": 10**9, "rollout/truncated_fraction": 1}, 41.0
    )
    assert len(step_line(state, 41.0)) <= WIDTH


def plain(stream: TextIO) -> Progress:
    return Progress("plain", stream)


def test_plain_prints_a_line_a_step_and_the_header_every_twenty() -> None:
    stream = io.StringIO()
    with plain(stream) as progress:
        progress.phase("loading the model")
        progress.start(25)
        for rollout_id in range(25):
            for done in range(3):
                progress.phase("rollout", done, 2)
            progress.phase("training")
            progress.step(rollout_id, STEP)
    lines = stream.getvalue().splitlines()
    assert [line.split("] ")[1] for line in lines[:3]] == ["loading the model", "rollout", "training"]
    assert [i for i, line in enumerate(lines) if line == header()] == [3, 24]
    assert sum("/25" in line for line in lines) == 25
    assert len(lines) == 3 + 2 + 25
    assert max(map(len, lines)) <= WIDTH


def test_plain_says_how_far_a_long_phase_is() -> None:
    stream, now = io.StringIO(), [0.0]
    view = PlainView(SafeStream(stream), lambda: now[0])
    state = RunState(started=0.0)
    state.enter("rollout", 0, 256, 0.0)
    assert state.phase is not None
    view.phase_began(state, state.phase, None)
    for second in range(1, 70):
        now[0] = float(second)
        state.enter("rollout", second, 256, now[0])
        view.phase_moved(state, state.phase)
    assert stream.getvalue().splitlines() == [
        "[  0.0 s] rollout",
        "[   30 s] rollout 30/256, 30 s",
        "[   1:00] rollout 60/256, 1:00",
    ]


def test_evaluations_show_where_they_began() -> None:
    stream = io.StringIO()
    with plain(stream) as progress:
        progress.evaluation(0, {"eval/sums/accuracy": 0.19, "eval/sums/num_samples": 64})
        progress.step(4, {**STEP, "eval/sums/accuracy": 0.45})
    text = stream.getvalue()
    assert "eval sums accuracy 0.190\n" in text
    assert "eval sums accuracy 0.450  (first 0.190)\n" in text


def test_a_resumed_run_says_so() -> None:
    stream = io.StringIO()
    with plain(stream) as progress:
        progress.start(20, 12)
    assert "resumed: 12 of 20 steps are done" in stream.getvalue()


def test_samples_are_shortened_and_harmless() -> None:
    stream = io.StringIO()
    with plain(stream) as progress:
        progress.show_samples("before training", SAMPLES)
        progress.show_samples("nothing", [])
    text = stream.getvalue()
    assert "[bold red]42[/] ␛[31mred" in text
    assert "\x1b" not in text
    assert "nothing" not in text
    assert " … " in text
    assert text.count("x") < 340
    assert re.search(r"xEND\n", text)
    assert re.search(r"reward +failed\n", text)


def test_the_summary_shows_what_there_is() -> None:
    stream = io.StringIO()
    with plain(stream) as progress:
        progress.show_summary(
            {
                "eval_before": {"sums": 0.19, "other": 0.5},
                "eval_after": {"sums": 0.45},
                "reward_first": 0.1,
                "reward_last": 0.6,
                "reward_best": 0.7,
                "num_rollout": 20,
                "seconds": 271.0,
                "rollout_tokens_per_second": None,
                "train_tokens_per_second": 1531.0,
                "peak_memory_gib": 4.31,
                "turn_memory_gib": {"train": [4.31, 0.22]},
                "num_failed_samples": 2,
                "num_skipped_steps": 0,
                "curve": Path("runs") / ("long" * 40) / "curve.png",
            }
        )
    rows = [re.split(r"  +", line.strip(), maxsplit=1) for line in stream.getvalue().splitlines()[2:-1]]
    assert rows == [
        ["eval sums", "0.190 → 0.450"],
        ["eval other", "0.500"],
        ["reward", "0.100 → 0.600   best 0.700"],
        ["time", "4:31 for 20 rollouts"],
        ["speed", "training 1531 tokens/s"],
        ["peak memory", "4.3 GiB"],
        ["train memory", "4.3 GiB at most in its turn, 0.2 GiB asleep"],
        ["failed samples", "2"],
        ["curve", str(Path("runs") / ("long" * 40) / "curve.png")],
    ]
    stream.truncate(0)
    plain(stream).show_summary({})


def test_off_shows_nothing_but_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("off") as progress:
        progress.phase("loading")
        progress.start(2)
        progress.step(0, STEP)
        progress.note("a note")
        progress.show_samples("t", SAMPLES)
        progress.show_summary({"seconds": 1.0})
        progress.warn("watch \x1b[31mout")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: watch ␛[31mout\n"


def test_auto_and_rich_are_plain_where_there_is_no_terminal() -> None:
    assert Progress("auto", io.StringIO()).mode == "plain"
    assert Progress("rich", io.StringIO()).mode == "plain"
    assert Progress("off", io.StringIO()).mode == "off"


def test_a_reader_that_went_away_does_not_end_the_run() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w", encoding="utf-8") as stream:
        progress = plain(stream)
        progress.note("first")
        progress.note("second")
        progress.close()
        with open(os.devnull, "w") as sink:
            os.dup2(sink.fileno(), stream.fileno())  # what is still buffered goes here


def test_an_encoding_without_arrows_gets_question_marks() -> None:
    raw = io.BytesIO()
    progress = plain(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    progress.note("0.1 → 0.2")
    assert raw.getvalue() == b"0.1 ? 0.2\n"


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_the_panel_fits_any_terminal_and_shows_its_numbers(width: int) -> None:
    state = ran(20.0, 20.0)
    state.add_step(2, {**STEP, "rollout/reward_mean": 0.5, "rollout/failed_count": 3}, 60.0)
    state.add_evaluation({"eval/[red]sums/accuracy": 0.19})
    state.add_evaluation({"eval/[red]sums/accuracy": 0.45})
    state.enter("rollout", 120, 256, 60.0)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel(state, 65.0, width, "quickstart"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 92)
    assert len(lines) == 9
    if width >= 92:
        text = "\n".join(lines)
        parts = (
            "step 3/10|30%|2:15 left|reward 0.500|▁▁█|best 0.500|length 23.4 tokens|entropy 0.812|logprob gap 0.0123"
        )
        parts += "|rollout 742 tok/s|training 15.3k tok/s|step 20 s|memory 3.2 GiB|failed 3|[red]sums 0.190 → 0.450"
        for part in (parts + "|rollout 120/256|5.0 s|1:05").split("|"):
            assert part in text, part


class Terminal:
    """A pseudo terminal: `stream` is its inside, `text` what was written to it."""

    def __init__(self) -> None:
        self._outside, inside = os.openpty()
        self.stream = os.fdopen(inside, "w", encoding="utf-8")
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._outside, 65536):
                self._parts.append(part)
        except OSError:  # the inside was closed
            return

    def text(self) -> str:
        """Everything that was written; closes the terminal."""
        self.stream.close()
        self._reader.join(10)
        os.close(self._outside)
        return b"".join(self._parts).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_terminal_gets_the_panel_and_is_restored_on_an_exception(terminal: Terminal) -> None:
    def run() -> None:
        with Progress("auto", terminal.stream, title="quickstart") as progress:
            assert progress.mode == "rich"
            progress.phase("loading the model")
            progress.start(4)
            progress.step(0, STEP)
            progress.note("a [bold]note[/bold]")
            progress.warn("a warning")
            progress.show_samples("before training", SAMPLES)
            progress.show_summary({"seconds": 3.0, "num_rollout": 1})
            raise RuntimeError("boom")

    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="boom"):
        run()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()
    text = terminal.text()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rindex("\x1b[?25h") > text.rindex("╯")
    for part in ("quickstart", "loading the model", "step 1/4", "a [bold]note[/bold]", "warning: a warning"):
        assert part in text, part
    assert "[bold red]42[/] ␛[31mred" in text


def test_a_terminal_that_never_saw_a_panel_is_left_alone(terminal: Terminal) -> None:
    with Progress("rich", terminal.stream):
        pass
    assert terminal.text() == ""


def test_many_threads_may_report_at_once_and_it_is_cheap(terminal: Terminal) -> None:
    num_calls, num_threads = 2000, 4
    with Progress("rich", terminal.stream) as progress:
        progress.start(num_threads * num_calls)

        def work(number: int) -> None:
            for i in range(num_calls):
                progress.phase(f"phase {number}", i, num_calls)
                if i % 500 == 0:
                    progress.note(f"note {number} {i}")
                    progress.step(number * num_calls + i, STEP)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        seconds = time.perf_counter() - began
    text = terminal.text()
    assert all(f"note {n} {i}" in text for n in range(num_threads) for i in range(0, num_calls, 500))
    assert seconds / (num_calls * num_threads) < 0.001
