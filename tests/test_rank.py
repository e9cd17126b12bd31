"""What each rank should hold, move and compute: against the account of all plans, and against decoders."""

from __future__ import annotations

import pytest

from model_cases import CASES, decoder_of, facts
from strategies import dense, held, latent, plan_of, routed, setting_of, tiny
from trainledger.account.rank import INSTANTS, Prediction, rank_lines
from trainledger.errors import BadInput
from trainledger.facts.model import Model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Instant
from trainledger.plans.ranks import peers_of, world_size

CATEGORIES = ("weights", "gradients", "optimizer")


def every_rank(model: Model, precision: str = "bf16", /, **columns: object) -> list[Prediction]:
    setting = setting_of(model, Workload(seq=16), engine="pytorch", precision=precision)
    inventory, plans = Inventory(setting), plan_of(**columns)
    return [rank_lines(inventory, plans, rank) for rank in range(world_size(plans.row(0)))]


def lines(found: Prediction, category: str, instant: Instant, *, steps: bool = False) -> dict[str, int]:
    """Bytes of a category's lines, the step counts of an optimizer left out."""
    return {
        identity: amount.amount
        for identity, amount in found.held.get(instant, {}).items()
        if identity.startswith(f"held/{category}/") and (steps or not identity.endswith(":step"))
    }


PLANS: list[dict[str, object]] = [
    {"dp_shard": 4, "zero_stage": 3, "num_microbatches": 2},
    {"dp_shard": 2, "cp": 2, "zero_stage": 2, "num_microbatches": 2},
    {"dp_shard": 4, "dp_replicate": 2, "zero_stage": 1, "num_microbatches": 3},
    {"dp_shard": 2, "tp": 2, "zero_stage": 3},
    {"dp_shard": 4, "zero_stage": 0},
    {"tp": 4, "zero_stage": 3},
]


@pytest.mark.parametrize("columns", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_that_share_evenly_hold_what_the_account_of_plans_says(
    precision: str, columns: dict[str, object]
) -> None:
    """One implementation for a search and another for a proof would drift apart."""
    model = dense(vocab=256)
    account = held(setting_of(model, engine="pytorch", precision=precision), **columns)
    for found in every_rank(model, precision, **columns):
        for category in CATEGORIES:
            for instant in INSTANTS:
                assert sum(lines(found, category, instant).values()) == account.bytes[category, instant]
        assert "held/padding/weights" not in found.held["rest"]


@pytest.mark.parametrize("model", [tiny(), routed(5), routed(2), dense(hidden=24, heads=3, kv_heads=1, ffn=17)])
@pytest.mark.parametrize("shards", [3, 5, 8])
def test_uneven_shares_add_up_and_storages_are_equal(model: Model, shards: int) -> None:
    ranks = every_rank(model, dp_shard=shards, zero_stage=3, etp=1)
    for category, width in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        shares = [lines(found, category, "backward") for found in ranks]
        assert sum(sum(share.values()) for share in shares) == width * model.total_params
        beyond = [lines(found, "padding", "backward").get(f"held/padding/{category}", 0) for found in ranks]
        stored = {sum(share.values()) + more for share, more in zip(shares, beyond, strict=True)}
        assert category == "optimizer" or len(stored) == 1


def test_what_was_measured_on_3_ranks() -> None:
    """Adam held 2,336,792 B on ranks 0 and 1 and 2,282,448 on rank 2, besides 4 B of steps for each tensor."""
    ranks = every_rank(tiny(), "fp32", dp_shard=3, zero_stage=3)
    assert [sum(lines(found, "optimizer", "rest").values()) for found in ranks] == [2_336_792, 2_336_792, 2_282_448]
    with_steps = lines(ranks[0], "optimizer", "rest", steps=True)
    assert sum(with_steps.values()) == 2_336_792 + 4 * 39


@pytest.mark.parametrize("case", sorted(CASES))
def test_lines_bear_the_names_and_sizes_of_the_modules(case: str) -> None:
    """Each pipeline stage has its own layers; names are those that the runtime's decoders have."""
    ranks = every_rank(facts(case), "fp32", pp=2, num_microbatches=2)
    half = -(-facts(case).num_layers // 2)
    stages = [(range(half), True, False), (range(half, facts(case).num_layers), False, True)]
    for found, (layers, first, last) in zip(ranks, stages, strict=True):
        decoder = decoder_of(case, layers=layers, first=first, last=last)
        sizes = {f"held/weights/{name}": 4 * tensor.numel() for name, tensor in decoder.named_parameters()}
        assert lines(found, "weights", "rest") == sizes


def test_virtual_stages_interleave_and_an_interior_stage_has_no_ends() -> None:
    ranks = every_rank(dense(layers=7), pp=3, vpp=2, num_microbatches=3)
    own = [
        sorted({int(name.split(".")[2]) for name in lines(found, "weights", "rest") if ".layers." in name})
        for found in ranks
    ]
    assert own == [[0, 1, 4], [2, 5], [3, 6]]
    ends = [{name for name in lines(found, "weights", "rest") if ".layers." not in name} for found in ranks]
    assert ends[0] == {"held/weights/model.embed_tokens.weight"}
    assert ends[1] == set()
    assert ends[2] == {"held/weights/model.norm.weight", "held/weights/lm_head.weight"}
    assert all("loss" not in found.held for found in ranks)


def received(found: Prediction, instant: Instant = "rest") -> dict[str, int]:
    return {name: size for name, size in lines(found, "buffers", instant).items() if " of chunk " in name}


def test_every_micro_batch_of_a_pipeline_has_its_own_receiving_tensors() -> None:
    """[mbs, tokens, hidden] of the activations' dtype, with sequence parallelism a part of the tokens."""
    first, middle, last = every_rank(dense(layers=3), pp=3, num_microbatches=2, mbs=2)
    size = 2 * 2 * 16 * 64
    assert received(first) == {
        f"held/buffers/received output gradient of chunk 0, micro-batch {batch}": size for batch in range(2)
    }
    assert len(received(middle)) == 4
    assert set(received(last, "backward").values()) == {size}
    cut = every_rank(dense(layers=2), pp=2, tp=2, sp=1, num_microbatches=2)[0]
    assert set(received(cut).values()) == {16 // 2 * 64 * 2}


def test_gathered_units_are_named_by_their_first_tensor_and_padded() -> None:
    tied = every_rank(dense(tied=True, layers=2), dp_shard=4, zero_stage=3)[0]
    assert list(tied.gathered) == [
        "held/gathered/model.embed_tokens.weight",
        "held/gathered/model.layers.0.self_attn.q_proj.weight",
        "held/gathered/model.layers.1.self_attn.q_proj.weight",
    ]
    assert tied.gathered["held/gathered/model.embed_tokens.weight"] == 2 * (212 * 64 + 64)
    experts = every_rank(routed(layers=1), dp_shard=4, ep=2, etp=1, zero_stage=3)[0]
    assert "held/gathered/model.layers.0.block_sparse_moe.experts.*.w1.weight" in experts.gathered
    assert not every_rank(dense(), "fp32", dp_shard=4, zero_stage=0)[0].gathered


def test_at_stage_1_weights_stay_gathered_and_gradients_whole_until_the_last_micro_batch_is_reduced() -> None:
    model = dense(vocab=256)
    found = every_rank(model, dp_shard=4, zero_stage=1, num_microbatches=2)[0]
    by_suffix = {
        (instant, suffix): sum(size for name, size in lines(found, category, instant).items() if name.endswith(suffix))
        for instant in INSTANTS
        for category, suffix in (("weights", ":gathered weights"), ("gradients", ":unsharded gradients"))
    }
    total = model.total_params
    assert by_suffix == {
        ("rest", ":gathered weights"): 0,
        ("rest", ":unsharded gradients"): 0,
        ("loss", ":gathered weights"): 2 * total,
        ("loss", ":unsharded gradients"): 4 * total,
        ("backward", ":gathered weights"): 2 * total,
        ("backward", ":unsharded gradients"): 0,
    }


def test_experts_of_a_rank_are_its_own_and_their_peers_are_named() -> None:
    ranks = every_rank(routed(3), dp_shard=2, ep=2, etp=1, zero_stage=3)
    one = "held/weights/model.layers.0.block_sparse_moe.experts.*.w1.weight"
    assert [lines(found, "weights", "rest")[one] for found in ranks] == [4 * 2 * 64 * 96, 4 * 64 * 96]
    (sent,) = {(call.group, call.peers) for call in ranks[1].calls if call.group == "ep"}
    assert sent == ("ep", (0, 1))
    assert {found.flop["done/grouped_matmul"].basis for found in ranks} == {"modelled"}


def test_groups_part_the_ranks() -> None:
    plan = plan_of(pp=3, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2, etp=1).row(0)
    sizes = {"world": 48, "tp": 2, "cp": 2, "pp": 3, "ep": 2, "dp": 8, "dp_shard": 4, "dp_replicate": 2}
    sizes |= {"expert_dp": 4, "expert_dp_shard": 2}
    for group in (*sizes, "embedding"):
        found = {peers_of(plan, group, rank) for rank in range(48)}
        assert sorted(rank for peers in found for rank in peers) == list(range(48))
        assert group == "embedding" or {len(peers) for peers in found} == {sizes[group]}
    assert peers_of(plan, "embedding", 0) == (0, 32)
    assert peers_of(plan, "embedding", 16) == (16,)


def test_other_engines_and_adapters_are_refused() -> None:
    with pytest.raises(BadInput, match="--engine pytorch"):
        rank_lines(Inventory(setting_of(dense(), engine="paper")), plan_of(), 0)
    adapted = setting_of(dense(), Workload(lora_rank=4, lora_targets=("all-linear",)), engine="pytorch")
    with pytest.raises(BadInput, match="adapters"):
        rank_lines(Inventory(adapted), plan_of(), 0)


def test_clipping_is_left_out_where_nothing_is_clipped() -> None:
    inventory = Inventory(setting_of(latent(), engine="pytorch"))
    plans = plan_of(dp_shard=2, zero_stage=3)
    with_norm, without = (rank_lines(inventory, plans, 0, clips=clips).calls for clips in (True, False))
    assert [call.what for call in with_norm if call not in without] == ["gradient norm"]


def test_what_tp_leaves_whole_is_summed_as_each_rank_holds_it() -> None:
    """Two norms of 24 over 5 ranks: four hold 5 elements of each, the last 4."""
    model = dense(hidden=24, heads=4, kv_heads=2, layers=1, ffn=16, vocab=32)
    sums = [
        [call.in_bytes for call in found.calls if call.what == "gradients of whole tensors"]
        for found in every_rank(model, "fp32", tp=2, sp=1, dp_shard=5, zero_stage=3)
    ]
    assert sums == [[3 * 5 * 4]] * 8 + [[3 * 4 * 4]] * 2
