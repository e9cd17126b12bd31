"""What a checkpoint has in its files is compared with the ledger's line, and what was observed before it stays so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from command_line import run
from trainledger.lines import CHECKPOINT, line_id
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How, launch

LINE = line_id("held", "outside", CHECKPOINT, "disk")


def test_a_proof_with_a_checkpoint_has_its_line_and_all_others() -> None:
    """On two ranks that divide a model in 8-bit moments, each part of which is decoded and written once."""
    seen: list[Sequence[Observation]] = []

    def kept(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        seen.append(launch(spec, how, progress))
        return seen[-1]

    flags = {"model": "gpt2", "dp": 2, "zero": 1, "optimizer": "adamw-8bit"}
    request = msgspec.convert(flags, prove.Request)
    plain = prove.run(request, runner=kept)
    found = prove.run(msgspec.structs.replace(request, checkpoint=True), runner=kept)
    (line,) = (one for one in found.lines if one.id == LINE)
    assert (line.rank, line.verdict, line.predicted) == (0, "equal", line.measured)
    assert (line.predicted or 0) > 0
    assert found.verdict == plain.verdict == "proven"
    assert [one for one in found.lines if one.id != LINE] == list(plain.lines)
    assert [one.saved for one in seen[0]] == [{}, {}]


@pytest.mark.parametrize("saved", [{}, {LINE: 4}, {LINE: 0, "held/outside/more@disk": 4}])
def test_a_checkpoint_of_other_bytes_turns_the_verdict(saved: dict[str, int]) -> None:
    def spoilt(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
        whole = launch(msgspec.structs.replace(spec, checkpoint=False), how, progress)
        return [msgspec.structs.replace(one, digest=spec.digest, saved=saved) for one in whole]

    found = prove.run(prove.Request(model="gpt2", checkpoint=True), runner=spoilt)
    assert found.verdict == "differs"
    wrong = {one.id: one.verdict for one in found.lines if one.verdict not in ("equal", "within", "reported")}
    assert wrong == (dict.fromkeys(saved, "differs") or {LINE: "missing"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dry",), "leave one of them out"),
        (("--cluster-args", "--nnodes 2 --node-rank 0 --rdzv-endpoint localhost:29400"), "has 2 nodes"),
    ],
)
def test_it_is_refused_where_nobody_can_count_it(flags: tuple[str, ...], message: str) -> None:
    done = run("prove", "gpt2", "--dp", "2", "--zero", "2", "--checkpoint", *flags)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
