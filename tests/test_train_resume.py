"""What a run folder cannot go on with is refused before a rank is started, and stays as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint_damage import flip
from checkpoint_runs import program_of, spec_of, stepped
from train_files import SIZES, config
from trainledger.errors import TrainledgerError
from trainledger.runtime.checkpoint.identity import STATES
from trainledger.runtime.checkpoint.manifest import STATE
from trainledger.runtime.checkpoint.parts import states_of
from trainledger.runtime.launch.fork import run_forked
from trainledger.runtime.spec import RunSpec
from trainledger.service import train
from trainledger.service.train_request import Request

WIDER = tuple(f"{key}={value}" for key, value in {**SIZES, "intermediate_size": 96}.items())
MORE_WORDS = tuple(f"{key}={value}" for key, value in {**SIZES, "vocab_size": 512}.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CONFIG whose run of two steps is over."""
    folder = tmp_path_factory.mktemp("resume")
    train.run(Request(model=config(folder, plan={"dp": 1, "zero": 0}, run={"steps": 2, "checkpoint-every": 1})))
    return folder


@pytest.fixture
def left(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What that run left, in a folder of its own, where no rank can be started."""

    def never(*given: object) -> None:
        raise AssertionError(given)

    monkeypatch.setattr(train, "_launch", never)
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path


def refused(folder: Path, **fields: object) -> str:
    """What a request to go on is refused with; nothing of the folder has changed by then."""
    path = config(folder, plan={"dp": 1, "zero": 0}, run={"checkpoint-every": 1})
    run = folder / "run"
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    with pytest.raises(TrainledgerError) as caught:
        train.run(Request(model=path, resume=True, **{"steps": 9, **fields}))  # pyright: ignore[reportArgumentType]
    assert {path: path.read_bytes() for path in before} == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"set": WIDER}, "intermediate_size is 64 there and 96 here"),
        ({"set": MORE_WORDS}, "vocab_size is 256 there and 512 here"),
        ({"held_out": 0.2}, "step-00000002 is of a run with tokens of SHA-256"),
        ({"seed": 1}, "step-00000002 is of a run with --seed 0, and this one has 1"),
        ({"steps": 2}, "step-00000002 has all of its 2 steps behind it; raise --steps to more than 2"),
        ({"optimizer": "sgd"}, "adamw keeps exp_avg, exp_avg_sq, step of a parameter and sgd nothing; resume with"),
    ],
)
def test_what_it_cannot_go_on_with_is_refused_before_a_rank_is_started(
    left: Path, fields: dict[str, object], message: str
) -> None:
    assert message in refused(left, **fields)


def test_a_checkpoint_that_is_damaged_says_nothing_of_its_run(left: Path) -> None:
    """The one before it is what a run goes on from: one step of two is left to take, and ranks would be started."""
    newest = left / "run" / "checkpoints" / "step-00000002"
    flip(newest / "__0_0.distcp")
    with pytest.raises(AssertionError, match="TrainSpec"):
        train.run(Request(model=config(left, plan={"dp": 1, "zero": 0}), resume=True, steps=2))
    assert "step-00000001 has all of its 1 steps behind it" in refused(left, steps=1)


def test_where_all_are_damaged_each_says_what_is_wrong(left: Path) -> None:
    for name in ("step-00000001", "step-00000002"):
        flip(left / "run" / "checkpoints" / name / STATE)
    message = refused(left)
    assert (
        f"step-00000002/{STATE} is not as it was written (its SHA-256 differs); the same holds of step-00000001"
        in message
    )
    assert "start anew in another folder" in message


def states(rank: int, specs: list[RunSpec]) -> list[tuple[str, ...]]:
    """What the optimizer of each keeps after a step."""
    del rank
    found: list[tuple[str, ...]] = []
    for spec in specs:
        program = program_of(spec)
        stepped(program, 0)
        found.append(states_of(program))
    return found


def test_what_each_optimizer_keeps_is_what_it_was_seen_to_keep() -> None:
    (found,) = run_forked(1, states, [spec_of(plan="", optimizer=name) for name in STATES], timeout_s=120)
    assert found == list(STATES.values())
