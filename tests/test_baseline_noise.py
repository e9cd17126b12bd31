"""Real steps on this machine, whatever else it does: a fifth slower is rejected, the same layout is accepted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fake_baselines import ANY, rung, spec_of, wrapped
from trainledger.service import baseline_compare
from trainledger.service.baseline_book import Exported

TIMES = 10


@pytest.mark.proof
@pytest.mark.parametrize("repeat", range(TIMES))
@pytest.mark.parametrize(("faults", "word"), [((), "accepted"), (("slow-step",), "rejected")])
def test_a_slow_step_is_told_from_noise(tmp_path: Path, repeat: int, faults: tuple[str, ...], word: str) -> None:
    """Two forked ranks a side, in turns; the second side is the same layout, with a step that sleeps or without."""
    plain = spec_of(zero=3)
    planted = msgspec.structs.replace(plain, faults=faults)
    made = (wrapped("plain", rung(ANY, spec=plain)), wrapped("other", rung(ANY, spec=planted)))
    book = tmp_path / "book.json"
    book.write_bytes(msgspec.json.encode(Exported(baselines=made)))
    found = baseline_compare.run(baseline_compare.Request(a="plain", b="other", book=str(book), again=True))
    assert found.verdict == word, f"repeat {repeat}: {found.times}"
