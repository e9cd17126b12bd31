"""Predicted against observed: equal only if every line is, and every planted fault is named."""

from __future__ import annotations

import msgspec
import pytest

from strategies import dense, plan_of, routed, setting_of
from trainledger.account.rank import Amount, Prediction, rank_lines
from trainledger.account.rank_memory import PEAK_TOLERANCE, SAVED_TOLERANCE
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line
from trainledger.plans.ranks import world_size
from trainledger.reconcile.proof import Pair, proof
from trainledger.reconcile.reconcile import reconcile
from trainledger.reconcile.verdict import Proof, Verdict
from trainledger.runtime.observe.observation import Call, Held, Observation, Unclaimed

SAVED = Unclaimed(bytes=512, dtype="fp32", shape=(128,), op="aten::mul", phase="forward")


def predicted(model: Model, **columns: object) -> list[Prediction]:
    setting = setting_of(model, Workload(seq=16), engine="pytorch", precision="fp32")
    plans = plan_of(**columns)
    return [rank_lines(Inventory(setting), plans, rank) for rank in range(world_size(plans.row(0)))]


def faithful(prediction: Prediction) -> Observation:
    """What a run that does exactly what is predicted of it would show."""
    return Observation(
        rank=prediction.rank,
        digest="",
        held=tuple(
            Held(
                instant=instant,
                claimed={identity: amount.amount for identity, amount in lines.items()},
                unclaimed=(SAVED,) if instant == "loss" else (),
                total_bytes=sum(amount.amount for amount in lines.values()),
            )
            for instant, lines in prediction.held.items()
        ),
        calls=tuple(
            Call(
                op=sent.op,
                group=sent.group,
                dtype=sent.dtype,
                ranks=len(sent.peers),
                count=sent.count,
                in_bytes=sent.in_bytes,
                out_bytes=sent.out_bytes,
            )
            for sent in prediction.calls
        ),
        flop={identity.removeprefix("done/"): amount.amount for identity, amount in prediction.flop.items()},
        phases_s={},
        losses=(),
        gathered=dict(prediction.gathered),
        reported=(Line(id="held/activations/saved for backward", amount=512, unit="B", basis="exact"),),
    )


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    ranks = predicted(dense(layers=2), dp_shard=2, zero_stage=3)
    return [(prediction, faithful(prediction)) for prediction in ranks]


def altered(pairs: list[Pair], **changes: object) -> Proof:
    """The proof of the same run, but for what rank 1 was seen to do."""
    prediction, observation = pairs[1]
    return proof([pairs[0], (prediction, msgspec.structs.replace(observation, **changes))])


def red(found: Proof) -> set[str]:
    """Ids of the lines that do not hold, all of which must be rank 1's."""
    wrong = [line for line in found.lines if line.verdict in ("differs", "missing")]
    assert {line.rank for line in wrong} <= {1}
    return {line.id for line in wrong}


def test_a_faithful_run_is_proven(pairs: list[Pair]) -> None:
    found = proof(pairs)
    assert found.verdict == "proven"
    assert (found.unexplained.bytes, found.unexplained.calls, found.unexplained.items) == (0, 0, ())
    assert {line.verdict for line in found.lines} == {"equal", "reported"}


def test_every_parameter_gradient_moment_and_collective_has_a_line(pairs: list[Pair]) -> None:
    verdicts = reconcile(*pairs[0])
    ids = {line.id for line in verdicts if line.verdict == "equal"}
    for tensor in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        assert {f"held/weights/{tensor}", f"held/gradients/{tensor}"} <= ids
        assert {f"held/optimizer/{tensor}:{what}" for what in ("exp_avg", "exp_avg_sq", "step")} <= ids
    for op, dtype, group in (("all_gather", "fp32", "dp_shard"), ("all_reduce", "fp32", "world")):
        assert {f"moved/{op}/{dtype}:{what}@{group}" for what in ("calls", "in", "out")} <= ids
    assert {"done/matmul", "done/attention_backward", "held/gathered/model.embed_tokens.weight"} <= ids


def test_the_json_has_the_agreed_fields(pairs: list[Pair]) -> None:
    found = msgspec.to_builtins(proof(pairs))
    assert list(found) == ["lines", "unexplained", "verdict"]
    assert list(found["unexplained"]) == ["bytes", "calls", "items"]
    held = next(line for line in found["lines"] if line["id"].startswith("held/weights"))
    assert list(held) == ["id", "rank", "predicted", "measured", "unit", "basis", "verdict", "instant"]
    moved = next(line for line in found["lines"] if line["id"].startswith("moved/"))
    assert list(moved) == ["id", "rank", "predicted", "measured", "unit", "basis", "verdict"]


def test_an_extra_buffer_is_unexplained_and_named(pairs: list[Pair]) -> None:
    extra = Unclaimed(bytes=4096, dtype="fp32", shape=(1024,), op="aten::zeros", phase="outside")
    held = tuple(msgspec.structs.replace(at, unclaimed=(*at.unclaimed, extra, extra)) for at in pairs[1][1].held)
    found = altered(pairs, held=held)
    assert (found.verdict, red(found), found.unexplained.bytes) == ("differs", set(), 8192)
    (item,) = found.unexplained.items
    assert (item.rank, item.op, item.shape, item.phase, item.times) == (1, "aten::zeros", (1024,), "outside", 2)
    assert item.instants == ("rest", "backward")


def test_a_line_that_nothing_predicts_is_unexplained(pairs: list[Pair]) -> None:
    name = "held/weights/lm_head.weight:gathered weights"
    held = tuple(
        msgspec.structs.replace(at, claimed={**at.claimed, name: 64} if at.instant == "backward" else at.claimed)
        for at in pairs[1][1].held
    )
    found = altered(pairs, held=held)
    assert (found.verdict, found.unexplained.bytes) == ("differs", 64)
    assert [(item.what, item.op) for item in found.unexplained.items] == [("line", name)]


def test_a_doubled_all_gather_differs_in_calls_and_bytes(pairs: list[Pair]) -> None:
    calls = tuple(
        msgspec.structs.replace(call, count=call.count + 1, in_bytes=call.in_bytes + 64, out_bytes=call.out_bytes + 128)
        if call.op == "all_gather"
        else call
        for call in pairs[1][1].calls
    )
    found = altered(pairs, calls=calls)
    assert found.verdict == "differs"
    assert red(found) == {f"moved/all_gather/fp32:{what}@dp_shard" for what in ("calls", "in", "out")}


def test_a_bf16_moment_differs(pairs: list[Pair]) -> None:
    name = "held/optimizer/model.layers.0.self_attn.q_proj.weight:exp_avg"
    held = tuple(
        msgspec.structs.replace(at, claimed={**at.claimed, name: at.claimed[name] // 2}) for at in pairs[1][1].held
    )
    found = altered(pairs, held=held)
    assert (found.verdict, red(found)) == ("differs", {name})
    wrong = next(line for line in found.lines if line.verdict == "differs")
    assert wrong.predicted == 2 * (wrong.measured or 0)


def test_a_dropped_collective_is_missing(pairs: list[Pair]) -> None:
    found = altered(pairs, calls=tuple(call for call in pairs[1][1].calls if call.group != "world"))
    assert (found.verdict, red(found)) == (
        "differs",
        {f"moved/all_reduce/fp32:{what}@world" for what in ("calls", "in", "out")},
    )
    assert {line.verdict for line in found.lines if line.id.endswith("@world") and line.rank == 1} == {"missing"}


def test_a_collective_of_another_dtype_or_group_is_missing_and_unexplained(pairs: list[Pair]) -> None:
    calls = tuple(
        msgspec.structs.replace(call, dtype="bf16") if call.op == "reduce_scatter" else call
        for call in pairs[1][1].calls
    )
    found = altered(pairs, calls=calls)
    assert red(found) == {f"moved/reduce_scatter/fp32:{what}@dp_shard" for what in ("calls", "in", "out")}
    assert [(item.what, item.op) for item in found.unexplained.items] == [("calls", "reduce_scatter/bf16@dp_shard")]
    assert found.unexplained.calls == 4


def test_a_group_of_one_rank_sends_nothing(pairs: list[Pair]) -> None:
    alone = Call(op="all_reduce", group="dp_replicate", dtype="fp32", ranks=1, count=3, in_bytes=12, out_bytes=12)
    assert altered(pairs, calls=(*pairs[1][1].calls, alone)).verdict == "proven"


@pytest.mark.parametrize("flop", [{"matmul": 1}, {"convolution": 8}])
def test_other_arithmetic_differs(pairs: list[Pair], flop: dict[str, int]) -> None:
    found = altered(pairs, flop={**pairs[1][1].flop, **flop})
    assert (found.verdict, red(found)) == ("differs", {f"done/{name}" for name in flop})


def test_an_instant_that_was_not_observed_is_missing(pairs: list[Pair]) -> None:
    found = altered(pairs, held=tuple(at for at in pairs[1][1].held if at.instant != "rest"))
    assert found.verdict == "differs"
    assert all(line.measured is None for line in found.lines if line.rank == 1 and line.instant == "rest")


def test_a_unit_gathered_in_another_dtype_differs(pairs: list[Pair]) -> None:
    (name, size), *_ = pairs[1][1].gathered.items()
    found = altered(pairs, gathered={**pairs[1][1].gathered, name: size // 2})
    assert red(found) == {name}


def test_what_the_router_decides_is_reported_and_conserved_over_its_group() -> None:
    ranks = predicted(routed(layers=1), dp_shard=2, ep=2, etp=1, zero_stage=3)
    seen = [faithful(prediction) for prediction in ranks]

    def shifted(observation: Observation, more_in: int, more_out: int) -> Observation:
        """Uneven routing: what goes to the other rank's experts changes, the number of calls does not."""
        calls = tuple(
            msgspec.structs.replace(call, in_bytes=call.in_bytes + more_in, out_bytes=call.out_bytes + more_out)
            if (call.op, call.dtype) == ("all_to_all", "fp32")
            else call
            for call in observation.calls
        )
        return msgspec.structs.replace(observation, calls=calls)

    sides = {sent.routed for prediction in ranks for sent in prediction.calls if sent.op == "all_to_all"}
    assert {"in", "out"} <= sides
    uneven = [shifted(seen[0], 128, -64), shifted(seen[1], -128, 64)]
    found = proof(list(zip(ranks, uneven, strict=True)))
    assert found.verdict == "proven"
    assert by_id(found, "moved/all_to_all/fp32:in@ep").verdict == "reported"
    assert by_id(found, "moved/all_to_all/fp32:conserved@ep").verdict == "equal"
    alone = proof([(ranks[0], seen[0])])
    assert not [line for line in alone.lines if "conserved" in line.id]
    lost = proof(list(zip(ranks, [shifted(seen[0], 128, 0), seen[1]], strict=True)))
    assert lost.verdict == "differs"
    assert by_id(lost, "moved/all_to_all/fp32:conserved@ep").verdict == "differs"


def by_id(found: Proof, identity: str) -> Verdict:
    return next(line for line in found.lines if line.id == identity)


def with_memory(prediction: Prediction, *, saved: int, peak: int, routed: bool = False) -> Prediction:
    """Both predicted figures, with their tolerances unless a router decides."""
    one, two = (None, None) if routed else (SAVED_TOLERANCE, PEAK_TOLERANCE)
    alive = {
        "held/activations/saved for backward": Amount(amount=saved, basis="modelled", tolerance=one),
        "held/peak/allocated": Amount(amount=peak, basis="modelled", tolerance=two),
    }
    return msgspec.structs.replace(prediction, alive=alive)


def seen_with(prediction: Prediction, saved: int, peak: int) -> Observation:
    reported = (
        Line(id="held/activations/saved for backward", amount=saved, unit="B", basis="exact"),
        Line(id="held/peak/allocated", amount=peak, unit="B", basis="exact"),
    )
    return msgspec.structs.replace(faithful(prediction), reported=reported)


@pytest.mark.parametrize(
    ("saved", "peak", "words"),
    [
        (1000, 5000, ("within", "within")),
        (1010, 4900, ("within", "within")),
        (1011, 5000, ("beyond", "within")),
        (1000, 4899, ("within", "beyond")),
    ],
)
def test_saved_activations_and_the_peak_may_be_off_by_their_tolerance(
    pairs: list[Pair], saved: int, peak: int, words: tuple[str, str]
) -> None:
    prediction = with_memory(pairs[0][0], saved=1000, peak=5000)
    found = proof([(prediction, seen_with(prediction, saved, peak))])
    lines = [by_id(found, identity) for identity in prediction.alive]
    assert tuple(line.verdict for line in lines) == words
    assert {line.basis for line in lines} == {"modelled"}
    assert found.verdict == ("differs" if "beyond" in words else "proven")


def test_a_peak_that_was_not_seen_is_missing(pairs: list[Pair]) -> None:
    prediction = with_memory(pairs[0][0], saved=512, peak=5000)
    found = proof([(prediction, faithful(prediction))])
    assert (found.verdict, by_id(found, "held/peak/allocated").verdict) == ("differs", "missing")


def test_ranks_whose_router_decides_save_together_what_is_predicted() -> None:
    ranks = [
        with_memory(one, saved=1000, peak=5000, routed=True)
        for one in predicted(routed(layers=1), dp_shard=2, ep=2, etp=1, zero_stage=3)
    ]
    together = "held/activations/saved for backward:conserved@ep"
    for shares, word in (((800, 1200), "within"), ((800, 1100), "beyond")):
        found = proof([(one, seen_with(one, saved, 6000)) for one, saved in zip(ranks, shares, strict=True)])
        assert by_id(found, "held/activations/saved for backward").verdict == "reported"
        assert by_id(found, "held/peak/allocated").verdict == "reported"
        assert (by_id(found, together).verdict, by_id(found, together).predicted) == (word, 2000)


def test_an_observation_of_another_rank_is_a_bug(pairs: list[Pair]) -> None:
    with pytest.raises(AssertionError, match="rank 0 is predicted and rank 1 observed"):
        reconcile(pairs[0][0], pairs[1][1])
