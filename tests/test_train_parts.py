"""The parts of training that need no ranks: metrics, spikes, the signal's file, the learning rate, the page."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from trainledger.report.curves import MOST_ROWS, page
from trainledger.runtime.train.metrics import Line, Lost, Metrics, cut_after, lines_of, set_aside
from trainledger.runtime.train.schedule import learning_rate
from trainledger.runtime.train.stop import Spikes, StopRequest, asking


def line(step: int, loss: float | None = 2.0, **fields: object) -> Line:
    given = {"learning_rate": 1e-3, "tokens": 128 * step, "step_s": 0.5, "tokens_per_s": 256.0, "memory_bytes": 1 << 28}
    return Line(step=step, loss=loss, **{**given, **fields})  # pyright: ignore[reportArgumentType]


def written(path: Path, *lines: Line) -> Path:
    metrics = Metrics(path)
    for one in lines:
        metrics.write(one)
    metrics.close()
    return path


def test_metrics_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", line(1), line(2, held_out=1.5), line(3))
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        steps = [one.step for one in lines_of(path)]
        assert steps == [1, 2, 3][: len(steps)]
        assert len(steps) >= whole[:end].count(b"\n")


def test_a_run_that_goes_on_drops_the_lines_that_it_will_write_again(tmp_path: Path) -> None:
    path = written(tmp_path / "metrics.jsonl", line(1), line(2), line(3))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo')
    cut_after(path, 2)
    assert list(lines_of(path)) == [line(1), line(2)]
    assert path.read_bytes().endswith(b"}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_of_a_run_that_left_no_checkpoint_are_kept_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path) is None
    for number in (1, 2):
        written(path, line(number))
        assert set_aside(path) == tmp_path / f"metrics-{number}.jsonl"
    assert [one.step for one in lines_of(tmp_path / "metrics-1.jsonl")] == [1]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_told_from_the_first_step_on(loss: float) -> None:
    assert Spikes(3.0, 50).judge(loss) == f"the loss is {loss}"


def test_a_spike_is_one_against_a_full_window_alone() -> None:
    spikes = Spikes(2.0, 3, [1.0, 1.0])
    assert spikes.judge(50.0) == ""
    spikes.losses.append(9.0)
    assert spikes.judge(2.0) == ""
    assert "more than 2 times 1, the median of the 3 steps before" in spikes.judge(2.1)
    spikes.losses.extend([9.0, 9.0])
    assert spikes.judge(2.1) == "", "the window moves"
    assert Spikes(0.0, 1, [1.0]).judge(1e9) == "", "0 turns it off"


def test_sigterm_asks_once_and_the_handlers_are_put_back(tmp_path: Path) -> None:
    file = tmp_path / "run" / "stop"
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    request = StopRequest(file, looks=True)
    signal.signal(signal.SIGTERM, before[0])
    with asking(file) as asked:
        assert not request.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.asked()
        assert asked.signal == signal.SIGTERM
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before, "a second one ends it"
    assert not file.exists()


def test_a_file_of_an_earlier_run_does_not_end_the_next(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    file.touch()
    with asking(file):
        assert not file.exists()


def test_the_rate_rises_falls_and_never_leaves_its_bounds() -> None:
    rates = [learning_rate(index, 100, 1.0, warmup=10, least=0.1) for index in range(100)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11
    assert min(rates) > 0


def numbers_in(text: str) -> dict[str, list[Any]]:
    """What the script of a page draws."""
    (numbers,) = re.findall(r'<script id="numbers" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(numbers)


def test_a_page_has_all_of_its_numbers_in_it_and_asks_for_nothing() -> None:
    lost = Lost(saturated=0.25, flushed=0.125, worst="a:weight", worst_saturated=0.25, worst_flushed=0.125)
    hostile = "</script><b>x"
    steps = [line(1), line(2, None, said=(hostile,)), line(3, held_out=1.5, fp8=lost)]
    text = page(hostile, {"model": hostile}, steps, None, f"step 2: {hostile}")
    assert "<b>" not in text
    assert not re.findall(r"<[^>]*\b(?:src|href)=", text)
    told = numbers_in(text)
    series = {one["label"]: one["values"] for chart in told["charts"] for one in chart["series"]}
    assert told["steps"] == [1, 2, 3]
    assert series["training"] == [2.0, None, 2.0]
    assert series["held-out"] == [None, None, 1.5]
    assert series["saturated"] == [None, None, 0.25]
    assert "scale" not in series, "a chart of nothing is left out"
    assert {chart["id"] for chart in told["charts"]} <= set(re.findall(r'<div id="(\w+)"', text))
    assert text.count("<tr>") == 4


def test_a_page_of_a_long_run_has_all_points_and_some_rows() -> None:
    steps = [line(step, said=("look",) if step == 1234 else ()) for step in range(1, 5001)]
    text = page("run", {}, steps, None, "")
    assert len(numbers_in(text)["steps"]) == 5000
    assert text.count("<tr>") <= MOST_ROWS + 3
    assert "<td>1234</td>" in text, "a step of which there is something to say is never left out"
