"""Tensor, expert and pipeline parallelism: what all ranks own together is the model, plus what is held twice."""

from __future__ import annotations

import pytest

from strategies import dense, elements, held, latent, llama, owned, routed, setting_of, up
from trainledger.arrays import ints
from trainledger.facts.by_hand import model_from_count
from trainledger.facts.model import Model
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory

MODELS = {
    "dense": dense(),
    "tied": dense(tied=True),
    "one-kv-head": dense(kv_heads=1),
    "routed": routed(),
    "latent": latent(),
    "8b": llama("8b"),
}


def whole(model: Model, tp: int, vocab_multiple: int, kv_copies: int) -> tuple[int, int]:
    """(dense elements that the ranks of one tensor parallel group own together, expert elements), from shapes alone."""
    dense_total = expert_total = 0
    pieces = [(t, 1) for t in (*model.embedding, *model.final)]
    pieces += [(t, len(block.layers)) for block in model.blocks for t in block.tensors]
    for tensor, times in pieces:
        numel = tensor.numel
        if tensor.role == "expert":
            expert_total += numel * tensor.copies * times
            continue
        if tensor.role in ("embedding", "head"):
            numel = numel // tensor.shape[0] * up(tensor.shape[0], vocab_multiple * tp)
        if tensor.tp_dim is None:
            numel *= tp
        elif tensor.name.split(".")[-2] in ("k_proj", "v_proj"):
            numel *= kv_copies
        dense_total += numel * times
    return dense_total, expert_total


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("engine", "vocab_multiple"), [("paper", 1), ("megatron", 128)])
@pytest.mark.parametrize(
    ("tp", "etp", "ep"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (2, 1, 4), (4, 2, 2), (4, 2, 4), (8, 1, 8)]
)
def test_all_ranks_together_own_the_model_and_its_copies(
    name: str, engine: str, vocab_multiple: int, tp: int, etp: int, ep: int
) -> None:
    """On etp x ep ranks every expert lives once, and dense tensors once per tensor parallel group."""
    model = MODELS[name]
    routed_model = any(block.moe for block in model.blocks)
    etp, ep = (etp, ep) if routed_model else (tp, 1)

    ranks = max(etp * ep, tp)
    kv_heads = model.blocks[0].attention.kv_heads if model.blocks[0].attention else tp
    dense_total, expert_total = whole(model, tp, vocab_multiple, max(tp // kv_heads, 1))
    weights = held(setting_of(model, engine=engine), tp=tp, etp=etp, ep=ep, dp_shard=ranks // tp, zero_stage=0)
    everywhere = weights.of("weights") // 2 * ranks
    assert everywhere == ranks // tp * dense_total + ranks // (etp * ep) * expert_total


@pytest.mark.parametrize("layout", [(4,), (1, 3), (3, 1), (0, 4), (2, 1, 1), (1, 0, 3), (0, 1, 3), (1, 1, 2, 0)])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_layout_add_up(layout: tuple[int, ...], tied: bool) -> None:
    model = dense(tied=tied)
    inventory = Inventory(setting_of(model, engine="megatron", pp_layout=layout))
    table = inventory.stages(len(layout), 1)
    start = 0
    total = 0
    for stage, layers in enumerate(layout):
        ends = (stage == 0, stage == len(layout) - 1)
        expected = elements(owned(model, layers=range(start, start + layers), ends=ends, vocab_multiple=128))
        copy = up(model.vocab_size, 128) * model.hidden_size if tied and ends[1] and len(layout) > 1 else 0
        start += layers
        total += expected + copy
        if stage in table.pp_stage:
            found = held(inventory.setting, stage, pp=len(layout), zero_stage=0)
            assert found.of("weights") == 2 * (expected + copy)
    padding = (up(model.vocab_size, 128) - model.vocab_size) * model.hidden_size
    copies = (up(model.vocab_size, 128) * model.hidden_size) if tied and len(layout) > 1 else 0
    assert total == model.total_params + padding * (1 if tied else 2) + copies


def test_virtual_stages_fall_on_every_pp_th_chunk() -> None:
    """Of 6 layers in 6 chunks on 2 stages the first holds layers 0, 2, 4: the one dense layer among them."""
    setting = setting_of(latent(), engine="paper", schedule="interleaved")
    layers = {0: (0, 2, 4), 1: (1, 3, 5)}
    for stage, members in layers.items():
        expected = sum(elements(owned(latent(), layers=range(i, i + 1), ends=(False, False))) for i in members)
        ends = owned(latent(), layers=range(0), ends=(stage == 0, stage == 1))
        found = held(setting, stage, pp=2, vpp=3, zero_stage=0)
        assert found.of("weights") == 2 * (expected + elements(ends))


def test_a_stage_of_an_uneven_layout_sums_its_chunks() -> None:
    """Chunks of 0, 3, 1, 0 layers on 2 stages: the first holds chunks 0 and 2, the second 1 and 3."""
    setting = setting_of(dense(), engine="megatron", schedule="interleaved", pp_layout=(0, 3, 1, 0))
    table = Inventory(setting).stages(2, 2)
    assert table.counts[:, 1].tolist() == [1, 3]


@pytest.mark.parametrize(("engine", "split"), [("paper", [2, 2, 1, 1]), ("torchtitan", [1, 2, 2, 1])])
def test_layers_that_do_not_divide_fall_by_the_engines_rule(engine: str, split: list[int]) -> None:
    table = Inventory(setting_of(dense(layers=6), engine=engine)).stages(4, 1)
    found = dict(zip(table.pp_stage.tolist(), table.counts[:, 1].tolist(), strict=True))
    assert all(split[stage] == layers for stage, layers in found.items())
    assert set(found) >= {0, 3}


def test_multi_token_prediction_adds_a_layer_and_a_copy_of_the_embedding_to_the_last_stage() -> None:
    model = latent()
    assert model.mtp is not None
    word = model.vocab_size * model.hidden_size
    for pp in (1, 2):
        plain, more = (
            held(setting_of(model, Workload(mtp=mtp), engine="paper"), pp - 1, pp=pp, zero_stage=0)
            for mtp in (False, True)
        )
        extra = model.mtp.numel + (word if pp > 1 else 0)
        assert more.of("weights") - plain.of("weights") == 2 * extra
        assert more.of("optimizer") - plain.of("optimizer") == 12 * extra


def test_a_parameter_count_alone_has_states() -> None:
    found = held(
        setting_of(model_from_count(1001), engine="pytorch", optimizer="adamw-fused"), dp_shard=8, zero_stage=3
    )
    assert found.at("step") == 16 * 126


def test_experts_of_deepseek_v3_on_64_ranks() -> None:
    """671 billion parameters: 256 experts in 58 layers over ep 64, the rest over all 64 ranks."""
    model = load_model("deepseek-v3")
    experts = 58 * 256 * 3 * 7168 * 2048
    assert model.total_params == 671_026_404_352
    found = held(setting_of(model, engine="paper"), ep=64, etp=1, dp_shard=64, zero_stage=3)
    share = -(-(model.total_params - experts) // 64)
    assert found.of("weights") == 2 * (share + experts // 64)


def test_torchtitan_cuts_experts_by_tensor_parallelism_only_without_expert_parallelism() -> None:
    profile = setting_of(routed(), engine="torchtitan").profile
    assert profile.default_etp(ints([4, 4]), ints([1, 2])).tolist() == [4, 1]
    found = held(setting_of(routed(), engine="torchtitan"), tp=4, etp=4, dp_shard=2, zero_stage=0)
    assert found.of("weights") == 4 * elements(owned(routed(), tp=4, etp=4))
