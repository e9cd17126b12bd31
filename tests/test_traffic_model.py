"""Model-parallel traffic of one optimizer step: counts per layer that were read in the engines, and exact bytes."""

from __future__ import annotations

import pytest

from strategies import Call, calls_of, dense, latent, llama, one_call, plan_of, routed, setting_of
from trainledger.account.shares import shares
from trainledger.account.traffic import all_traffic
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory

MODEL = dense(vocab=256)
LAYERS, HIDDEN, SEQ = 4, 64, 1024
WORK = Workload(seq=SEQ)
X = SEQ * HIDDEN * 2
"""Bytes of one hidden tensor of a micro-batch of one sequence."""


def tensor_parallel(engine: str, *, sp: int, recompute: str = "none", **columns: object) -> list[Call]:
    """What a tensor parallel group of 2 exchanges."""
    setting = setting_of(MODEL, WORK, engine=engine, recompute=recompute)
    calls = calls_of(setting, tp=2, sp=sp, etp=1, **columns)
    return [call for call in calls if call.group == "tp"]


@pytest.mark.parametrize("batches", [1, 3])
def test_megatron_without_sequence_parallelism(batches: int) -> None:
    """Per layer 2 all-reduces forward and 2 backward, one each of the embedding and the output layer, 3 of the loss."""
    calls = tensor_parallel("megatron", sp=0, num_microbatches=batches)
    hidden = one_call(calls, "all_reduce", "tp", "hidden")
    assert hidden.count == batches * (4 * LAYERS + 2)
    assert hidden.in_bytes == hidden.count * X
    loss = one_call(calls, "all_reduce", "tp", "loss statistics")
    assert (loss.count, loss.in_bytes) == (3 * batches, 3 * batches * SEQ * 4)
    assert len(calls) == 2


def test_megatron_with_sequence_parallelism() -> None:
    """Per layer 6 gathers and 4 scatters; the embedding scatters, the output gathers twice; norms are summed once."""
    calls = tensor_parallel("megatron", sp=1)
    gathered, scattered = (one_call(calls, op, "tp") for op in ("all_gather", "reduce_scatter"))
    assert gathered.count == 6 * LAYERS + 1 + 2
    assert scattered.count == 4 * LAYERS + 1 + 1
    assert (gathered.out_bytes, gathered.in_bytes) == (gathered.count * X, gathered.count * X // 2)
    assert (scattered.in_bytes, scattered.out_bytes) == (scattered.count * X, scattered.count * X // 2)
    norms = one_call(calls, "all_reduce", "tp", "gradients of norms")
    assert (norms.count, norms.in_bytes, norms.dtype) == (1, (2 * LAYERS + 1) * HIDDEN * 4, "fp32")


def test_sequence_parallelism_costs_ten_eighths_in_megatron_and_nothing_in_torchtitan() -> None:
    def per_layer(engine: str, sp: int) -> float:
        sent: list[float] = []
        for layers in (4, 8):
            setting = setting_of(dense(layers=layers, vocab=256), WORK, engine=engine, recompute="none")
            sent.append(sum(call.wire for call in calls_of(setting, tp=2, sp=sp) if call.what == "hidden"))
        return (sent[1] - sent[0]) / 4

    assert per_layer("megatron", 1) / per_layer("megatron", 0) == pytest.approx(10 / 8)
    assert per_layer("torchtitan", 1) / per_layer("torchtitan", 0) == pytest.approx(1)


def test_torchtitan_with_sequence_parallelism() -> None:
    """Per layer 2 + 2 forward and 2 + 2 backward: the gathered input is saved, not gathered again."""
    calls = tensor_parallel("torchtitan", sp=1)
    assert one_call(calls, "all_gather", "tp").count == 4 * LAYERS + 1 + 1
    assert one_call(calls, "reduce_scatter", "tp").count == 4 * LAYERS + 1 + 1


@pytest.mark.parametrize(
    ("engine", "gathers", "scatters"),
    [("megatron", 2, 2), ("torchtitan", 2, 2), ("pytorch", 2, 1)],
)
def test_recompute_adds_the_forward_again(engine: str, gathers: int, scatters: int) -> None:
    """Plain torch checkpointing stops before a block's last reduction; torchtitan and Megatron rerun it."""
    plain, again = (tensor_parallel(engine, sp=1, recompute=policy) for policy in ("none", "full"))
    assert one_call(again, "all_gather", "tp").count - one_call(plain, "all_gather", "tp").count == gathers * LAYERS
    extra = one_call(again, "reduce_scatter", "tp").count - one_call(plain, "reduce_scatter", "tp").count
    assert extra == scatters * LAYERS


def test_embedding_and_loss_belong_to_the_ends_of_a_pipeline() -> None:
    setting = setting_of(MODEL, WORK, engine="megatron", recompute="none")
    columns = {"tp": 2, "pp": 4, "num_microbatches": 4}
    first, inner, last = (
        [call for call in calls_of(setting, stage, **columns) if call.group == "tp"] for stage in (0, 1, 3)
    )
    assert one_call(first, "all_reduce", "tp", "hidden").count == 4 * (4 + 1)
    assert one_call(inner, "all_reduce", "tp", "hidden").count == 4 * 4
    assert one_call(last, "all_reduce", "tp", "hidden").count == 4 * (4 + 1)
    assert [call.what for call in (*first, *inner)] == ["hidden", "hidden"]
    assert one_call(last, "all_reduce", "tp", "loss statistics").count == 4 * 3


def test_a_parallel_block_has_one_region() -> None:
    """Falcon reads attention and MLP from the same input and adds them together."""
    model = load_model("falcon-7b", overrides={"num_hidden_layers": "3"})
    assert model.blocks[0].parallel
    calls = calls_of(setting_of(model, WORK, engine="paper", recompute="none"), tp=1)
    assert not calls
    tensor = [
        c for c in calls_of(setting_of(model, WORK, engine="paper", recompute="none"), tp=71) if c.what == "hidden"
    ]
    assert tensor[0].count == 3 * 2 + 2


@pytest.mark.parametrize(("sp", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_1f1b_sends_every_micro_batch_over_every_boundary_once_each_way(sp: int, tp: int) -> None:
    """m outputs forward, m gradients back; with sequence parallelism each rank sends its slice, without it all of X."""
    setting = setting_of(MODEL, WORK, engine="megatron")
    size = X // tp if sp else X
    for stage, forward, backward in ((0, 5, 0), (1, 5, 5), (3, 0, 5)):
        calls = calls_of(setting, stage, tp=tp, sp=sp, pp=4, num_microbatches=5)
        sent = {call.what: call for call in calls if call.op == "send"}
        received = {call.what: call for call in calls if call.op == "recv"}
        expected = {"output": forward, "input gradient": backward}
        assert {what: call.count for what, call in sent.items()} == {k: v for k, v in expected.items() if v}
        assert all(call.in_bytes == call.count * size for call in sent.values())
        mirrored = {"output": backward, "input gradient": forward}
        assert {what: call.count for what, call in received.items()} == {k: v for k, v in mirrored.items() if v}


@pytest.mark.parametrize(("pp", "vpp", "batches"), [(2, 2, 4), (4, 2, 8), (2, 4, 6), (3, 2, 3)])
def test_an_interleaved_schedule_hops_m_times_p_v_minus_1(pp: int, vpp: int, batches: int) -> None:
    """Inner ranks send m v each way; the last wraps m (v - 1) round to the first. [schedules.py]"""
    model = dense(layers=24, vocab=256)
    setting = setting_of(model, WORK, engine="megatron", schedule="interleaved")
    counts = []
    for stage in (0, min(1, pp - 1), pp - 1):
        calls = calls_of(setting, stage, pp=pp, vpp=vpp, num_microbatches=batches)
        counts.append(one_call(calls, "send", "pp", "output").count)
    first, inner, last = counts
    assert first == batches * vpp
    assert last == batches * (vpp - 1)
    total = first + (pp - 2) * inner + last
    assert total == batches * (pp * vpp - 1)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_on_both_ends_is_summed_once_per_step(tied: bool, pp: int) -> None:
    model = dense(tied=tied, vocab=256)
    for stage in (0, pp - 1):
        calls = calls_of(setting_of(model, WORK, engine="megatron"), stage, pp=pp, tp=2, sp=1, num_microbatches=8)
        shared = [call for call in calls if call.group == "embedding"]
        assert [(c.count, c.in_bytes, c.ranks) for c in shared] == ([(1, 256 // 2 * HIDDEN * 4, 2)] if tied else [])


KV = SEQ // 4 * 2 * 4 * 8 * 2
"""Bytes of keys and values of one micro-batch on one of 4 ranks: 4 KV heads of 8."""


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_ring_moves_keys_and_values_three_times(recompute: str) -> None:
    """cp - 1 hops forward and backward, and as many of the gradients a hop behind: cp messages backward."""
    calls = calls_of(setting_of(MODEL, WORK, engine="megatron", recompute=recompute), cp=4, num_microbatches=2)
    forward = 2 if recompute == "full" else 1
    there, back = (one_call(calls, "send", "cp", what) for what in ("k and v", "k, v and gradients"))
    assert (there.count, there.in_bytes) == (forward * 2 * LAYERS * 3, forward * 2 * LAYERS * 3 * KV)
    assert (back.count, back.in_bytes) == (2 * LAYERS * 4, 2 * LAYERS * 3 * 2 * KV)
    assert {c.out_bytes for c in calls if c.op == "recv"} == {there.in_bytes, back.in_bytes}


def test_transformer_engine_gathers_keys_and_values_again_backward_and_torchtitan_does_not() -> None:
    for engine, gathers in (("megatron", 2), ("torchtitan", 1)):
        calls = calls_of(setting_of(MODEL, WORK, engine=engine, recompute="none", cp_comm="all_gather"), cp=4)
        gathered = one_call(calls, "all_gather", "cp")
        assert (gathered.count, gathered.out_bytes) == (gathers * 2 * LAYERS, gathers * LAYERS * 4 * KV)
        scattered = one_call(calls, "reduce_scatter", "cp")
        assert (scattered.count, scattered.in_bytes) == (2 * LAYERS, LAYERS * 4 * KV)


def test_ulysses_exchanges_q_k_v_and_the_output_each_way() -> None:
    """4 exchanges forward and 4 backward; q and output have 8 heads, k and v 4."""
    calls = calls_of(setting_of(MODEL, WORK, engine="deepspeed", recompute="none"), cp=4)
    queries, keys = (one_call(calls, "all_to_all", "cp", what) for what in ("q and output", "k and v"))
    assert queries.count == keys.count == 2 * 2 * LAYERS
    assert (queries.in_bytes, keys.in_bytes) == (2 * 2 * LAYERS * KV, 2 * LAYERS * KV)
    assert queries.wire == queries.in_bytes * 3 / 4


def test_latent_attention_rings_whole_heads() -> None:
    """k has nope and rope of every head, v its own width. 8 heads of 12 and 8."""
    calls = calls_of(setting_of(latent(), WORK, engine="megatron", recompute="none"), cp=2)
    there = one_call(calls, "send", "cp", "k and v")
    assert there.in_bytes == 6 * SEQ // 2 * 8 * (12 + 8) * 2


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("tp", "sp", "etp"), [(1, 0, 1), (2, 1, 1), (2, 1, 2)])
def test_experts_exchange_top_k_copies_of_every_token(recompute: str, tp: int, sp: int, etp: int) -> None:
    """Dispatch and combine, forward, backward and again where recomputed; with etp a gather and a scatter too."""
    calls = calls_of(
        setting_of(routed(), WORK, engine="megatron", recompute=recompute), tp=tp, sp=sp, etp=etp, ep=4, dp_shard=4
    )
    passes = 3 if recompute == "full" else 2
    size = SEQ // tp * 2 * HIDDEN * 2
    exchanged = one_call(calls, "all_to_all", "ep")
    assert (exchanged.count, exchanged.in_bytes) == (2 * passes * LAYERS, 2 * passes * LAYERS * size)
    if etp == 1:
        assert not [call for call in calls if call.group == "etp"]
    else:
        gathered, scattered = (one_call(calls, op, "etp") for op in ("all_gather", "reduce_scatter"))
        assert (gathered.count, gathered.out_bytes) == (passes * LAYERS, passes * LAYERS * etp * size)
        assert (scattered.count, scattered.in_bytes) == (gathered.count, gathered.out_bytes)


def test_shared_experts_and_dense_layers_have_regions_and_routed_ones_do_not() -> None:
    """DeepSeek: attention everywhere, an MLP in the dense layer, shared experts in the others: 2 regions each."""
    scatters: list[int] = []
    for model in (latent(), routed(layers=6)):
        calls = calls_of(setting_of(model, WORK, engine="megatron", recompute="none"), tp=2, sp=1, etp=1, dp_shard=2)
        scatters.append(one_call(calls, "reduce_scatter", "tp").count)
    assert scatters == [2 * 2 * 6 + 2, 2 * 6 + 2]


@pytest.mark.parametrize("model", [load_model("gemma-3-1b"), load_model("nemotron-h-56b"), llama("8b")], ids=str)
def test_no_line_is_named_twice(model: object) -> None:
    """Layers of several kinds share a collective."""
    setting = setting_of(model, engine="paper")  # type: ignore[arg-type]
    inventory = Inventory(setting)
    own = shares(inventory, plan_of(pp=2, cp=2, dp_shard=2, zero_stage=3, num_microbatches=2))
    names = [(call.op, call.what, call.group) for call in all_traffic(inventory, own) if call.count.any()]
    assert len(names) == len(set(names))
