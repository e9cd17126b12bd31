"""`states` beyond its figures: what fits from how many GPUs, on which single card, and against which baseline."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.errors import Refused
from trainledger.facts.cluster import find_accelerator
from trainledger.service import ledger, states
from trainledger.service.requests import PlanRequest


def rows(**request: object) -> dict[int, states.Row]:
    found = states.run(states.Request(**request))  # pyright: ignore[reportArgumentType]
    return {row.zero_stage: row for row in found.rows}


@pytest.mark.parametrize(
    ("engine", "tp", "gbs"), [("paper", 1, None), ("pytorch", 1, None), ("megatron", 4, None), ("deepspeed", 1, 96)]
)
def test_fewest_gpus_is_the_smallest_that_fits(engine: str, tp: int, gbs: int | None) -> None:
    """Against one ledger per number of GPUs: all around the answer, and some on the way there."""
    request = states.Request(model="llama-3-8b", gpu="a100-40gb", engine=engine, tp=tp, gbs=gbs, gpus=tp)
    fewest = states.run(request).fewest_gpus
    assert fewest is not None
    for zero, answer in fewest.items():
        every = range(tp, (answer or 20 * tp) + 2 * tp + 1, tp)
        for gpus in sorted({*every[:: max(1, len(every) // 4)], *every[-4:]}):
            plan = PlanRequest(
                model="llama-3-8b", gpu="a100-40gb", engine=engine, tp=tp, gbs=gbs, gpus=gpus, zero=int(zero)
            )
            try:
                fits = ledger.account(plan).memory.fits
            except Refused:
                fits = False
            if answer is None or gpus < answer:
                assert not fits, (zero, gpus)
            if gpus == answer:
                assert fits, (zero, gpus)


def test_the_fewest_gpus_have_host_memory_enough() -> None:
    """Offloaded whole, 405B parameters fit one card of a node with 1.9 TB for all eight only from some nodes on."""
    given: dict[str, object] = {
        "model": "llama-3.1-405b",
        "cluster": "dgx-a100-80gb",
        "engine": "deepspeed",
        "offload": ("optimizer", "parameters"),
    }
    found = states.run(states.Request(**given, gpus=16)).fewest_gpus  # pyright: ignore[reportArgumentType]
    assert found is not None
    fewest = found["3"]
    assert fewest is not None
    for gpus, fits in ((fewest - 1, False), (fewest, True)):
        assert rows(**given, gpus=gpus)[3].fits is fits


def test_a_replicated_group_counts_whole() -> None:
    """HSDP with two replicas needs twice the GPUs of one."""
    one = states.run(states.Request(model="llama-3-70b", gpu="h100", gpus=8)).fewest_gpus
    two = states.run(states.Request(model="llama-3-70b", gpu="h100", gpus=8, dp_replicate=2)).fewest_gpus
    assert one is not None
    assert two is not None
    assert one["3"] is not None
    assert two["3"] == 2 * one["3"]


def test_replicas_are_compared_with_plain_data_parallelism() -> None:
    plain, hybrid = rows(model="llama-3-8b", gpus=16), rows(model="llama-3-8b", gpus=16, dp_replicate=2)
    assert hybrid[0].refused is not None
    assert hybrid[0].total_bytes is None
    assert plain[3].share_of_full is not None
    assert hybrid[3].share_of_full == pytest.approx(2 * plain[3].share_of_full)
    assert plain[0].wire_bytes is not None
    assert hybrid[3].wire_bytes is not None
    assert hybrid[3].traffic_vs_ddp == pytest.approx(hybrid[3].wire_bytes / plain[0].wire_bytes)


def test_an_engine_without_stage_0_is_compared_with_one_rank_and_the_paper() -> None:
    """DeepSpeed's estimator knows stages 2 and 3 alone, and a ring's (N-1)/N like everybody."""
    found = rows(model="llama-3-8b", gpus=8, engine="deepspeed-estimator")
    paper = rows(model="llama-3-8b", gpus=8)
    assert list(found) == [2, 3]
    alone = rows(model="llama-3-8b", gpus=1, engine="deepspeed-estimator")
    for zero in found:
        held = [getattr(row, f"{state}_bytes") for row in (found[zero], alone[zero]) for state in states.STATES]
        assert found[zero].share_of_full == pytest.approx(sum(held[:3]) / sum(held[3:]))
        sent, ddp = found[zero].wire_bytes, paper[0].wire_bytes
        assert sent is not None
        assert ddp is not None
        assert found[zero].traffic_vs_ddp == pytest.approx(sent / ddp)


def test_what_is_offloaded_is_still_part_of_the_full_copy() -> None:
    """ZeRO paper, section 3.1: of 2 + 2 + 12 bytes a parameter, the optimizer's 12 are on the host from stage 1 on."""
    found = rows(model="llama-3-8b", gpus=8, offload=("optimizer",))
    assert [found[zero].share_of_full for zero in (1, 2, 3)] == [4 / 16, (2 + 2 / 8) / 16, 4 / 8 / 16]


@pytest.mark.parametrize(
    ("engine", "held"),
    [
        # bytes a parameter that stay on the card at each stage; the host holds the rest
        ("deepspeed", {1: 4, 2: 2, 3: 2 / 8}),
        ("deepspeed-estimator", {2: 2, 3: 2 / 8}),
        ("megatron", {1: 6}),
    ],
)
def test_every_engine_divides_by_a_copy_on_the_card(engine: str, held: dict[int, float]) -> None:
    before = rows(model="llama-3-8b", gpus=8, engine=engine)
    after = rows(model="llama-3-8b", gpus=8, engine=engine, offload=("optimizer",))
    for zero, bytes_per_param in held.items():
        whole, part = before[zero], after[zero]
        assert whole.share_of_full is not None
        assert part.share_of_full is not None
        on_card = [sum(getattr(row, f"{state}_bytes") or 0 for state in states.STATES) for row in (whole, part)]
        assert part.share_of_full / whole.share_of_full == pytest.approx(on_card[1] / on_card[0])
        assert on_card[1] == pytest.approx(bytes_per_param * 8_030_261_248, rel=1e-3)


def test_deepspeeds_zero_1_sends_half_as_much_again() -> None:
    """ENGINE against paper: DeepSpeed all-reduces each bucket before it keeps a slice, then gathers."""
    assert rows(model="llama-3-8b", gpus=8)[1].traffic_vs_ddp == 1
    assert rows(model="llama-3-8b", gpus=8, engine="deepspeed")[1].traffic_vs_ddp == pytest.approx(1.5, rel=0.01)


def test_single_cards_hold_it_and_the_others_do_not() -> None:
    found = states.run(states.Request(model="llama-3.2-1b"))
    assert found.single_cards is not None
    total = next(row.total_bytes for row in found.rows if row.zero_stage == 0)
    assert total is not None
    names = [card.name for card in found.single_cards]
    assert "H100-SXM5-80GB" in names
    for card in found.single_cards:
        assert card.usable_bytes == find_accelerator(card.name).usable_bytes
        assert card.free_bytes == card.usable_bytes - total >= 0
    # its 16 bytes a parameter do not leave room on 16 GB, and a V100 has no bf16 arithmetic
    assert not {"V100-SXM2-16GB", "V100-SXM2-32GB"} & set(names)


def test_nobody_reads_the_catalogue_unasked() -> None:
    assert states.run(states.Request(model="gpt2", gpus=2)).single_cards is None
    assert states.run(states.Request(model="gpt2", gpu="h100")).single_cards is None
    assert states.run(states.Request(model="gpt2", single_card=False)).single_cards is None
    assert states.run(states.Request(model="gpt2", gpus=64, single_card=True)).single_cards


def test_one_rule_against_every_stage_is_an_error_and_against_some_a_row() -> None:
    with pytest.raises(Refused, match="heads-divisible-by-tp"):
        rows(model="llama-3-8b", gpus=12, tp=12)
    found = rows(model="llama-3-8b", gpus=8, pp=4, engine="deepspeed")
    assert [row.refused is None for row in found.values()] == [True, True, False, False]
    assert "ds-zero-ge2-with-pp" in str(found[2].refused)


def test_sequence_parallelism_is_on_only_where_the_engine_has_it() -> None:
    for engine, expected in (("megatron", True), ("torchtitan", True), ("deepspeed", False)):
        found = states.run(states.Request(model="llama-3-8b", gpus=8, tp=8, engine=engine))
        assert found.plan.sp is expected
    assert states.run(states.Request(model="llama-3-8b", gpus=8, tp=8, engine="megatron", sp=False)).plan.sp is False


ENGINES = st.sampled_from(["paper", "pytorch", "torchtitan", "deepspeed", "megatron"])


@settings(max_examples=20, deadline=None)
@given(ENGINES, st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 16]), st.booleans())
def test_a_row_is_the_ledger_of_its_stage(engine: str, tp: int, pp: int, dp: int, eager: bool) -> None:
    """Two verbs, one account; and what is held by basis adds up to the peak."""
    request = {"model": "llama-3-8b", "engine": engine, "tp": tp, "pp": pp, "gpus": tp * pp * dp}
    attention = "eager" if eager else "flash"
    try:
        found = rows(**request, attention=attention)
    except Refused:
        return
    for zero, row in found.items():
        if row.refused is not None:
            continue
        account = ledger.account(PlanRequest(**request, attention=attention, zero=zero))  # pyright: ignore[reportArgumentType]
        memory = account.memory
        assert memory.meters["allocated"].estimate == row.total_bytes == sum(memory.by_basis.values())
        meter = memory.meters["allocated"]
        assert memory.by_basis.get("exact", 0) <= meter.estimate
        assert meter.lower <= meter.estimate <= meter.upper
        assert (memory.pp_stage, memory.instant, memory.host_bytes) == (row.pp_stage, row.instant, row.host_bytes)
        assert memory.by_category["optimizer"] == row.optimizer_bytes
        held = [line for line in account.lines if line.id.startswith("held/") and "@host" not in line.id]
        assert sum(line.amount for line in held) >= (row.total_bytes or 0)
        assert account.wire_bytes == sum(move.wire_bytes for move in account.traffic)
