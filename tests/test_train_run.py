"""Training with real processes: to the end, ended by a signal and gone on with, and ended by its own numbers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from train_files import config
from trainledger.errors import TrainledgerError
from trainledger.report.machine import answer as as_answer
from trainledger.report.plain import render
from trainledger.report.train import document
from trainledger.runtime.train.metrics import Line, lines_of
from trainledger.service import train
from trainledger.service.train_request import Request

Ran = tuple[train.Response, list[Line]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run to its end, and its metrics."""
    folder = tmp_path_factory.mktemp("whole")
    return _run(Request(model=config(folder)), folder)


def _run(request: Request, folder: Path) -> Ran:
    response = train.run(request)
    return response, list(lines_of(folder / "run" / "metrics.jsonl"))


def losses(lines: list[Line]) -> list[tuple[int, float | None, float | None]]:
    return [(line.step, line.loss, line.held_out) for line in lines]


def test_a_run_learns_says_so_and_was_predicted(whole: Ran) -> None:
    response, lines = whole
    assert (response.ended, response.steps, response.exit_code) == ("finished", 6, 0)
    assert [line.step for line in lines] == [1, 2, 3, 4, 5, 6]
    assert response.loss == lines[-1].loss
    assert response.first_loss == lines[0].loss
    assert response.loss is not None
    assert response.first_loss is not None
    assert response.loss < response.first_loss - 0.2, "six steps on repetitive text teach something"
    assert [line.step for line in lines if line.held_out is not None] == [3, 6]
    assert response.held_out_loss == lines[-1].held_out
    assert response.tokens == 6 * 4 * 32 == lines[-1].tokens
    assert [one.step for one in response.checkpoints] == [2, 4, 6]
    wrong = [line for line in response.lines if line.verdict in ("differs", "beyond", "missing")]
    assert not wrong, "what training holds, sends and computes is what the ledger says"
    assert {line.rank for line in response.lines} == {0, 1}
    assert (response.unexplained.bytes, response.unexplained.calls) == (0, 0)
    assert response.observed_step == 3
    text = render(document(as_answer(response)))
    assert "finished: all 6 steps are taken" in text
    page = Path(response.report).read_text()
    assert "<script src" not in page
    assert "http" not in page.replace("https://github.com/leeoniya/uPlot", "")


def test_a_run_that_is_asked_to_end_saves_and_goes_on_as_if_it_had_not_been(tmp_path: Path, whole: Ran) -> None:
    def ask(done: int, total: int, text: str) -> None:
        del total, text
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    path = config(tmp_path, run={"checkpoint-every": 0})
    stopped = train.run(Request(model=path), progress=ask)
    assert stopped.ended == "stopped"
    assert 3 <= stopped.steps < 6
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert [one.step for one in stopped.checkpoints] == [stopped.steps]
    said = render(document(as_answer(stopped)))
    assert f"stopped after step {stopped.steps} of 6, and saved; go on with the same command with --resume" in said
    assert not (tmp_path / "run" / "stop").exists()

    with pytest.raises(TrainledgerError, match=r"has 1 checkpoints of a run, the newest step-.*--resume.*--out"):
        train.run(Request(model=path))

    # as a run that died after it had taken further steps, and half a line
    metrics = tmp_path / "run" / "metrics.jsonl"
    last = list(lines_of(metrics))[-1]
    further = msgspec.json.encode(msgspec.structs.replace(last, step=last.step + 1, loss=99.0))
    with metrics.open("ab") as file:
        file.write(further + b"\n" + further[:20])
    resumed, lines = _run(Request(model=path, resume=True), tmp_path)
    assert (resumed.ended, resumed.first) == ("finished", stopped.steps)
    assert resumed.resumed_from.endswith(f"step-{stopped.steps:08d}")
    assert losses(lines) == losses(whole[1]), "bit for bit"


def test_a_run_whose_numbers_are_of_no_use_ends_and_keeps_what_was_good(tmp_path: Path) -> None:
    path = config(tmp_path, plan={"dp": 1}, run={"learning-rate": 1e6, "weight-decay": 1e6, "checkpoint-every": 1})
    with pytest.raises(TrainledgerError) as caught:
        train.run(Request(model=path))
    message = str(caught.value)
    assert "the loss is nan" in message or "norm of the gradients is" in message
    assert "--resume and a lower --learning-rate" in message
    run = tmp_path / "run"
    lines = list(lines_of(run / "metrics.jsonl"))
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert saved == [f"step-{line.step:08d}" for line in lines[:-1]], "each step before the last, and none after"
    assert f"checkpoints/{saved[-1]}" in message
    assert lines[-1].said[-1] in message
    assert message.partition("; ")[0].partition(": ")[2] in (run / "report.html").read_text()


def test_layers_whose_casts_lose_too_much_fall_back_and_that_is_said(tmp_path: Path) -> None:
    run = {"fp8-flushed": 0.0, "fp8-action": "bf16", "fp8-every": 1, "steps": 3}
    path = config(tmp_path, plan={"dp": 1, "zero": 0, "precision": "fp8-forward"}, run=run)
    response, lines = _run(Request(model=path), tmp_path)
    assert response.gemms.ran
    assert response.gemms.fallen, "some element of some operand is flushed in three steps"
    assert all(any(layer in text for text in response.said) for layer in response.gemms.fallen)
    assert any("computes in bf16 from now on" in text for line in lines for text in line.said)
    before = 2 * 7  # forward products of seven matrices in two layers, in each of four micro-batches of one sequence
    assert response.gemms.fp8_gemms == 4 * (before - len(response.gemms.fallen))
    assert all(line.fp8 is not None for line in lines if line.step != response.observed_step)

    again, _ = _run(Request(model=path, resume=True, steps=4, fp8_every=3), tmp_path)
    assert again.gemms.fallen == response.gemms.fallen, "a checkpoint remembers them"
    assert (again.gemms.fp8_gemms, again.gemms.ran) == (response.gemms.fp8_gemms, response.gemms.fp8_gemms)


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_torchrun_trains_the_same_run_saves_when_asked_and_another_layout_goes_on_with_it(
    tmp_path: Path, whole: Ran
) -> None:
    def ask(done: int, total: int, text: str) -> None:
        del total, text
        if done == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    path = config(tmp_path)
    stopped = train.run(Request(model=path, cluster_args=""), progress=ask)
    assert (stopped.ended, stopped.world_size) == ("stopped", 2)
    plain = losses(whole[1])
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert losses(list(lines_of(metrics))) == plain[: stopped.steps]

    pipeline = Request(model=path, resume=True, dp=1, pp=2, zero=0)
    resumed, lines = _run(pipeline, tmp_path)
    assert (resumed.first, resumed.plan.pp, resumed.plan.dp) == (stopped.steps, 2, 1)
    assert [line.step for line in lines] == [step for step, _, _ in plain]
    for at in (1, 2):
        found, wanted = ([one[at] or 0.0 for one in each] for each in (losses(lines), plain))
        assert found == pytest.approx(wanted, rel=1e-4), "the same tokens in another layout"
