"""Accepting and rejecting: what is slower, what is noise, what nobody can tell, and what is not comparable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from command_line import check_golden, run
from fake_baselines import ANY, LINES, FakeClock, baseline, drawn, rung, spec_of, wrapped
from trainledger.errors import BadInput, UsageError
from trainledger.records.compare import change, moved, peak
from trainledger.records.record import Baseline, Rung
from trainledger.service import baseline_compare
from trainledger.service.baseline_book import Exported

LEAST, CERTAIN = 0.1, 0.99


def only(made: Baseline) -> Rung:
    (found,) = made.rungs
    return found


def book_of(tmp_path: Path, *made: Baseline) -> str:
    """An export with these records, numbered from 1."""
    path = tmp_path / "book.json"
    numbered = tuple(msgspec.structs.replace(one, number=index) for index, one in enumerate(made, start=1))
    path.write_bytes(msgspec.json.encode(Exported(baselines=numbered)))
    return str(path)


@pytest.mark.parametrize(("slower", "word"), [(1.0, "accepted"), (1.2, "rejected"), (0.8, "accepted")])
def test_a_fifth_is_found_and_noise_is_not_in_40_of_40(slower: float, word: str) -> None:
    """Each machine is slower for whole rounds, as others come and go, and steps have the tails of Student's t."""
    words = Counter(
        change(
            only(baseline(seed=seed, steps=30)),
            only(baseline(seed=1000 + seed, steps=30, slower=slower)),
            pairs=pairs,
            least=LEAST,
            certain=CERTAIN,
        ).verdict
        for seed in range(20)
        for pairs in (False, True)
    )
    assert words == {word: 40}


def test_what_is_too_noisy_is_undecided_and_never_accepted() -> None:
    found = change(
        only(baseline(seed=1, steps=1, rounds=8)),
        only(baseline(seed=2, steps=1, rounds=8)),
        pairs=True,
        least=0.001,
        certain=CERTAIN,
    )
    assert (found.verdict, "more rounds" in found.reason) == ("undecided", True)
    few = change(only(baseline(rounds=4)), only(baseline(rounds=4)), pairs=False, least=LEAST, certain=CERTAIN)
    assert (few.verdict, few.low, "--rounds" in few.reason) == ("undecided", None, True)


def test_what_is_slower_by_less_than_is_of_interest_is_looked_at_longer_and_not_rejected() -> None:
    """A layout against itself may come out a few percent slower for ten rounds, of which nobody asked to hear."""
    a, b = only(baseline(seed=1, steps=5)), only(baseline(seed=2, steps=5, slower=1.06))
    found = change(a, b, pairs=False, least=0.08, certain=0.9)
    assert found.low is not None
    assert found.high is not None
    assert 1 < found.low < found.estimate < 1.08 < found.high
    assert found.verdict == "undecided"
    assert change(a, b, pairs=False, least=0.01, certain=0.9).verdict == "rejected"


def test_times_of_two_records_need_the_machine_to_have_been_the_same() -> None:
    busy = only(baseline(seed=3, steps=30, machine=4.0))
    found = change(only(baseline(steps=30)), busy, pairs=False, least=LEAST, certain=CERTAIN)
    assert (found.verdict, "--again" in found.reason) == ("undecided", True)
    assert found.machine == pytest.approx(4.0, rel=0.5)


def test_a_step_with_more_tokens_may_take_longer() -> None:
    draw = np.random.default_rng(0)
    double = rung([one for number in range(10) for one in drawn(draw, number, 30, slower=2.0)], tokens=256)
    found = change(only(baseline(steps=30)), double, pairs=False, least=LEAST, certain=CERTAIN)
    assert found.verdict == "accepted"


def test_lines_that_moved_are_named_with_both_sides() -> None:
    more = tuple(
        msgspec.structs.replace(line, measured=2 * (line.measured or 0)) if line.unit != "calls" else line
        for line in LINES
    )
    a, b = rung(ANY), msgspec.structs.replace(rung(ANY), lines=more)
    found = {line.id: (line.a, line.b) for line in moved(wrapped("a", a), wrapped("b", b))}
    assert found == {"held/peak": (4096, 8192), "held/weights": (64, 128)}
    assert (peak(a, b).verdict, peak(b, a).verdict, peak(a, a).verdict) == ("rejected", "accepted", "accepted")


def test_the_verdict_is_of_what_is_judged(tmp_path: Path) -> None:
    fat = msgspec.structs.replace(
        only(baseline(seed=5, steps=30)),
        lines=(msgspec.structs.replace(LINES[0], measured=5000), *LINES[1:]),
    )
    slow = baseline("slow", seed=6, steps=30, slower=1.2)
    book = book_of(tmp_path, baseline("plain", steps=30), wrapped("fat", fat), slow)

    def verdict(b: str, *judge: baseline_compare.Judged) -> tuple[str, int]:
        asked = baseline_compare.Request(a="plain", b=b, book=book, judge=judge or None)
        found = baseline_compare.run(asked)
        return found.verdict, found.exit_code

    assert verdict("plain") == ("accepted", 0)
    assert verdict("fat") == ("rejected", 4)
    assert verdict("fat", "throughput") == ("accepted", 0)
    assert verdict("slow") == ("rejected", 4)
    assert verdict("slow", "memory") == ("accepted", 0)


def test_what_is_not_as_its_ledger_says_is_never_accepted(tmp_path: Path) -> None:
    calls = msgspec.structs.replace(LINES[2], measured=4, verdict="differs")
    odd = msgspec.structs.replace(only(baseline(seed=5, steps=30)), lines=(*LINES[:2], calls))
    book = book_of(tmp_path, baseline("plain", steps=30), wrapped("odd", odd))
    found = baseline_compare.run(baseline_compare.Request(a="plain", b="odd", book=book))
    assert (found.verdict, found.unproven) == ("rejected", (2,))
    assert [(line.id, line.a, line.b) for line in found.moved] == [("moved/all_reduce/fp32:calls@dp", 3, 4)]


@pytest.mark.parametrize(("faults", "word"), [((), "accepted"), (("slow-step",), "rejected")])
def test_again_takes_turns_and_stops_when_it_is_decided(tmp_path: Path, faults: tuple[str, ...], word: str) -> None:
    plain, other = spec_of(), msgspec.structs.replace(spec_of(zero=1), faults=faults)
    book = book_of(tmp_path, wrapped("a", rung(ANY, spec=plain)), wrapped("b", rung(ANY, spec=other)))
    clock = FakeClock()
    found = baseline_compare.run(
        baseline_compare.Request(a="a", b="b", book=book, again=True, rounds=10, steps=30), clock=clock
    )
    assert found.verdict == word
    stages = [timed.run.plan["zero_stage"] for timed, _ in clock.told]
    assert stages[:4] == [0, 1, 1, 0]
    assert len(stages) in (20, 40, 80, 160)
    assert found.times[0].rounds == (len(stages) // 2, len(stages) // 2)
    assert {timed.steps for timed, _ in clock.told} == {30}


def test_again_ends_undecided_after_eight_times_the_rounds(tmp_path: Path) -> None:
    made = wrapped("a", rung(ANY, spec=spec_of()))
    clock = FakeClock()
    request = baseline_compare.Request(
        a="a", b="a", book=book_of(tmp_path, made), again=True, rounds=2, steps=1, least_change=0.001
    )
    found = baseline_compare.run(request, clock=clock)
    assert (found.verdict, found.exit_code, len(clock.told)) == ("undecided", 4, 32)


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    plain = baseline("plain")
    other = msgspec.structs.replace(only(plain), spec={"model": {"name": "two"}})
    apart = msgspec.structs.replace(only(plain), ranks=4)
    machine = msgspec.structs.replace(plain.machine, device="NVIDIA H200")
    book = book_of(
        tmp_path,
        plain,
        wrapped("other", other),
        wrapped("apart", apart),
        msgspec.structs.replace(plain, name="moved", machine=machine),
    )

    def refused(b: str, **given: object) -> str:
        with pytest.raises((BadInput, UsageError)) as error:
            baseline_compare.run(
                msgspec.convert({"a": "plain", "b": b, "book": book, **given}, baseline_compare.Request)
            )
        return str(error.value)

    assert "other sizes" in refused("other")
    assert "2 ranks and apart (3) on 4: no number is the same" in refused("apart")
    assert "another device (cpu, NVIDIA H200)" in refused("moved")
    assert "nearest: plain" in refused("plane")
    assert "nothing is run without --again" in refused("plain", rounds=3)
    assert "--least-change is 0" in refused("plain", **{"least-change": 0.0})
    assert "--judge none" in refused("plain", judge=[])


def test_the_screen_says_what_moved_and_ends_with_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fewer = msgspec.structs.replace(LINES[2], predicted=2, measured=2)
    lines = (msgspec.structs.replace(LINES[0], predicted=6144, measured=6144), LINES[1], fewer)
    other = msgspec.structs.replace(only(baseline(seed=5, steps=30, slower=1.2)), lines=lines)
    book_of(tmp_path, baseline("plain", steps=30), wrapped("other", other))
    done = run("baseline", "compare", "plain", "other", "--book", "book.json")
    assert (done.code, done.err) == (4, "")
    check_golden("baseline_compare.txt", done.out)
    assert run("baseline", "compare", "other", "plain", "--book", "book.json", "--json").json()["verdict"] == "accepted"
    check_golden("baseline_history.txt", run("baseline", "history", "--book", "book.json").out)
