"""Peaks of Megatron-Core: nine measured ones, and what must hold of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from trainledger.account.memory import StageMemory, stage_memory
from trainledger.facts.model import Block, Model
from trainledger.facts.presets import load_preset
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Scenario, make_plans
from trainledger.plans.setting import make_setting

GIB = 2**30


class Measured(NamedTuple):
    """A row of the b200 table: [simumax-b200]. `dense`: layers before the first with experts, of the latter models."""

    row: str
    model: str
    layers: int
    dense: int
    seq: int
    columns: dict[str, int]
    peak_gib: float
    within: float


ROWS = (
    Measured("SMX-002", "llama-3-70b", 12, 12, 4096, {"tp": 2, "sp": 1, "dp_shard": 4}, 60.68, 0.001),
    Measured("SMX-003", "llama-3-70b", 12, 12, 4096, {"tp": 4, "sp": 1, "dp_shard": 2}, 39.07, 0.001),
    Measured("SMX-004", "llama-3-70b", 12, 12, 4096, {"tp": 8, "sp": 1}, 28.29, 0.001),
    Measured("SMX-005", "deepseek-v2", 4, 1, 4096, {"ep": 8, "dp_shard": 8, "etp": 1}, 45.63, 0.001),
    Measured("SMX-007", "deepseek-v3", 4, 1, 4096, {"ep": 8, "dp_shard": 8, "etp": 1}, 104.3, 0.001),
    Measured("SMX-027", "llama-3.1-405b", 4, 4, 4096, {"tp": 4, "sp": 1, "dp_shard": 2}, 52.89, 0.001),
    Measured("SMX-038", "llama-3-70b", 12, 12, 32768, {"cp": 8}, 104.51, 0.001),
    Measured("SMX-040", "llama-3.1-405b", 4, 4, 32768, {"cp": 8}, 139.22, 0.001),
    Measured("SMX-042", "llama-3-70b", 12, 12, 131072, {"cp": 8}, 147.99, 0.001),
)


def shortened(model: Model, layers: int, dense: int) -> Model:
    """The model with fewer layers, `dense` ones first."""
    kinds = model.blocks if len(model.blocks) > 1 else (*model.blocks, None)
    spans = (range(dense), range(dense, layers))
    blocks = [msgspec.structs.replace(b, layers=tuple(s)) for b, s in zip(kinds, spans, strict=True) if b is not None]
    return msgspec.structs.replace(model, blocks=tuple(blocks), num_layers=layers, mtp=None)


def with_groups(model: Model, groups: int) -> Model:
    """The model with another number of KV heads: the table's 405B has 16, not the published 8."""

    def changed(block: Block) -> Block:
        if block.attention is None:
            return block
        ratio = groups // block.attention.kv_heads
        tensors = tuple(
            msgspec.structs.replace(t, shape=(t.shape[0] * ratio, t.shape[1]), tp_units=groups)
            if t.name.endswith(("k_proj.weight", "v_proj.weight"))
            else t
            for t in block.tensors
        )
        attention = msgspec.structs.replace(block.attention, kv_heads=groups)
        return msgspec.structs.replace(block, attention=attention, tensors=tensors)

    return msgspec.structs.replace(model, blocks=tuple(changed(b) for b in model.blocks))


def peak(model: Model, columns: Mapping[str, object], *, seq: int = 4096, **words: object) -> StageMemory:
    scenario = msgspec.structs.replace(Scenario(engine="megatron", recompute="none"), **words)
    setting = make_setting(model, Workload(seq=seq), scenario)
    return stage_memory(Inventory(setting), make_plans({"zero_stage": 1, "num_microbatches": 4, **columns}))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.row)
def test_measured_peaks(row: Measured) -> None:
    model = shortened(load_preset(row.model), row.layers, row.dense)
    if row.model == "llama-3.1-405b":
        model = with_groups(model, 16)
    found = peak(model, row.columns, seq=row.seq, loss="fused", cp_comm="all_to_all")
    assert abs(found.allocated[0] / GIB / row.peak_gib - 1) < row.within


def test_what_binds_is_the_output_layer_or_the_names_that_experts_hold() -> None:
    dense = peak(shortened(load_preset("llama-3-70b"), 12, 12), {"tp": 4, "sp": 1}, loss="fused")
    assert dense.places[dense.where()[0]].label == "backward of the output layer and loss"
    mixed = peak(shortened(load_preset("deepseek-v2"), 4, 1), {"ep": 8, "dp_shard": 8, "etp": 1}, loss="fused")
    assert mixed.places[mixed.where()[0]].label.startswith("forward of the last layer")


def saved(model: Model, columns: Mapping[str, object], *, seq: int = 4096, **words: object) -> int:
    return int(peak(model, columns, seq=seq, **words).saved[0, 0])


def test_saved_of_a_layer_is_the_sum_of_its_tensors() -> None:
    model = shortened(load_preset("llama-3-8b"), 2, 2)
    one = shortened(load_preset("llama-3-8b"), 1, 1)
    h, kv, f, a = 4096, 1024, 14336, 32
    per_token = 2 * (h + h + (h + 2 * kv) + h + h + h) + 6 * f + 4 * a + 8
    assert saved(model, {}) - saved(one, {}) == 4096 * per_token
    cut = {"tp": 4, "sp": 1}
    assert saved(model, cut) - saved(one, cut) == 4096 * per_token // 4


def test_without_sequence_parallelism_the_stream_is_whole() -> None:
    model = shortened(load_preset("llama-3-8b"), 1, 1)
    with_sp, without = saved(model, {"tp": 4, "sp": 1}), saved(model, {"tp": 4})
    # four tensors of the layer, two of the final norm, three statistics; the output layer's gathered input stays
    assert without - with_sp == 4096 * ((6 * 2 * 4096 + 3 * 4) * 3 // 4 - 2 * 4096)


@pytest.mark.parametrize(("name", "dense"), [("llama-3-8b", 4), ("mixtral-8x7b", 4), ("deepseek-v2", 1)])
def test_recomputing_keeps_less_and_never_more(name: str, dense: int) -> None:
    model = shortened(load_preset(name), 4, dense)
    columns = {"mbs": 2, "num_microbatches": 8, "pp": 2}
    none = saved(model, columns)
    parts = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")
    each = [saved(model, columns, recompute="selective", recompute_parts=(part,)) for part in parts]
    together = saved(model, columns, recompute="selective", recompute_parts=parts)
    full = saved(model, columns, recompute="full")
    assert all(full < kept <= none for kept in each)
    assert full < together < min(each)


def test_each_part_drops_its_own_tensors() -> None:
    model = shortened(load_preset("deepseek-v2"), 2, 1)
    columns = {"ep": 8, "dp_shard": 8, "etp": 1}
    rows, inner, tokens = 6 * 4096, 1536, 4096

    def dropped(part: str) -> int:
        return saved(model, columns) - saved(model, columns, recompute="selective", recompute_parts=(part,))

    # the activation's result and its factors; norms before attention, twice, and before the experts, once
    assert dropped("moe_act") == rows * (2 * inner + 4)
    assert dropped("layernorm") == 3 * tokens * (2 * 5120 + 4)
    # both matrices' results of the shared expert, whose input the router keeps too
    assert dropped("shared_experts") == tokens * 6 * 3072
    # 4 bytes a head and query of two layers
    assert dropped("core_attn") == 2 * tokens * 4 * 128


def test_peaks_scale_with_micro_batch_and_in_flight() -> None:
    model = shortened(load_preset("llama-3-8b"), 8, 8)
    one, two = (saved(model, {"mbs": mbs}) for mbs in (1, 2))
    assert two == 2 * one
    waiting = [int(peak(model, {"pp": 4, "num_microbatches": n}).saved[0, 0]) for n in (1, 2, 4, 8)]
    assert waiting[1] == 2 * waiting[0]
    assert waiting[2] == waiting[3] == 4 * waiting[0]


def test_a_ring_holds_every_hop_and_an_exchange_both_results() -> None:
    model = shortened(load_preset("llama-3-8b"), 1, 1)
    ring, exchanged = (peak(model, {"cp": 4}, seq=16384, cp_comm=how) for how in ("ring", "all_to_all"))
    assert int(exchanged.saved[0, 0] - ring.saved[0, 0]) == 4096 * 2 * 4096
    whole = saved(model, {}, seq=4096)
    assert int(ring.saved[0, 0]) == whole


@pytest.mark.parametrize(
    ("precision", "per_element"),
    [("fp8-delayed", 1.0), ("fp8-blockwise", 1 + 4 / 128), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)],
)
def test_an_fp8_recipe_keeps_the_inputs_of_matrices_in_its_own_form(precision: str, per_element: float) -> None:
    two, one = (shortened(load_preset("llama-3-8b"), n, n) for n in (2, 1))
    h, kv, f, a = 4096, 1024, 14336, 32
    layer = saved(two, {}, precision=precision) - saved(one, {}, precision=precision)
    # both norms' outputs and the activation's are kept in fewer bits; attention's result serves its projection as it is
    others = 2 * (h + (h + 2 * kv) + h + h) + 4 * f + 4 * a + 8
    assert layer == 4096 * (others + per_element * (2 * h + f))


def test_dummy_gradients_are_one_for_each_shape() -> None:
    model = shortened(load_preset("llama-3-8b"), 2, 2)
    found = peak(model, {"tp": [1, 2]})
    h, kv, f, v = 4096, 1024, 14336, 128256
    shapes = {(h + 2 * kv, h), (h, h), (2 * f, h), (h, f), (v, h)}
    whole = 2 * sum(rows * columns for rows, columns in shapes)
    assert [int(x[0]) for x in found.passing[0]] == [whole, whole // 2]


def test_before_dummies_were_kept_each_was_made_anew() -> None:
    """Megatron-Core 0.11 had TransformerEngine 2.2 or older."""
    model, columns = shortened(load_preset("llama-3-70b"), 4, 4), {"tp": 2, "sp": 1}
    now, before = (peak(model, columns, framework_version=version) for version in ("0.12.0", "0.11.0"))
    shapes = {5120: 8192, 8192: 4096, 28672: 8192, 14336: 8192, 64128: 8192}
    dummies = 2 * sum(rows * columns for rows, columns in shapes.items())
    index = [place.label for place in now.places].index("between steps")
    assert int(now.total(index)[0, 0] - before.total(index)[0, 0]) == dummies
    labels = [place.label for place in now.places]
    last = labels.index("backward of the first layer")
    walked = [int(memory.places[last].walked[0, 0]) for memory in (now, before)]
    assert 0 < walked[1] - walked[0] <= 2 * 28672 * 8192
    mixed = peak(shortened(load_preset("deepseek-v2"), 4, 1), {"ep": 8, "dp_shard": 8}, framework_version="0.11.0")
    assert int(mixed.passing[0][0, 0]) == 128 * 2**20


def test_equal_shapes_share_a_dummy_where_both_are_on_the_stage() -> None:
    model = shortened(load_preset("llama-3-8b"), 2, 2)
    square = msgspec.structs.replace(model, vocab_size=4096)
    head = peak(square, {}).passing[0][0, 0]
    assert int(peak(model, {}).passing[0][0, 0] - head) == 2 * 128256 * 4096
    # the last stage alone has the output layer
    split = peak(model, {"pp": 2}).passing[0][0]
    assert int(split[1] - split[0]) == 2 * 128256 * 4096


def test_the_gathered_input_of_the_output_layer_stays_where_that_layer_is() -> None:
    model = shortened(load_preset("llama-3-8b"), 2, 2)
    found = peak(model, {"tp": 2, "sp": 1, "pp": 2})
    rest = next(place for place in found.places if place.label == "between steps")
    assert rest.kept[0].tolist() == [0, 4096 * 4096 * 2]


def test_plans_are_columns() -> None:
    model = shortened(load_preset("deepseek-v2"), 4, 1)
    columns = {"tp": [1, 2, 1], "sp": [0, 1, 0], "cp": [1, 1, 2], "ep": [8, 4, 8], "dp_shard": 8, "etp": [1, 2, 1]}
    together = peak(model, columns, cp_comm="all_to_all").allocated
    alone = [{name: np.broadcast_to(value, 3)[i] for name, value in columns.items()} for i in range(3)]
    apart = [int(peak(model, one, cp_comm="all_to_all").allocated[0]) for one in alone]
    assert np.array_equal(together, apart)
