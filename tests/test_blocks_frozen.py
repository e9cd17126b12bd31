"""Frozen matrices and the adapters beside them: what they keep, beside what PyTorch keeps of the same operations."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies import dense, plan_of, setting_of
from trainledger.account.memory.stage import stage_memory
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks.eager.ops import Ops
from trainledger.inventory.blocks.frozen import Frozen
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, walk
from trainledger.plans.setting import Setting

TOKENS, WIDTH, OUT, RANK = 96, 64, 160, 4
SEQ = 512
MODEL = dense(layers=6)
PURE = {"precision": "bf16-pure", "recompute": "none"}


def walked(frozen: Frozen) -> Tape:
    """One matrix with its adapter."""
    ops = Ops(Program(), "bf16", frozen)
    x = ops.input("x", np.array([TOKENS]), WIDTH)
    return walk(ops.program, ops.linear("q", x, OUT, module="q_proj").value)


def kept_by_torch(adapters: torch.dtype, share: float) -> int:
    """Bytes of what waits for a backward and is no weight. [peft: tuners/lora/layer.py Linear.forward]"""
    base = nn.Linear(WIDTH, OUT, bias=False, dtype=torch.bfloat16).requires_grad_(requires_grad=False)
    low, high = nn.Linear(WIDTH, RANK, bias=False, dtype=adapters), nn.Linear(RANK, OUT, bias=False, dtype=adapters)
    weights = {layer.weight.untyped_storage().data_ptr() for layer in (base, low, high)}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(TOKENS, WIDTH).to(torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given = x.to(adapters)
        dropped = torch.native_dropout(given, share, True)[0] if share else given
        out = base(x) + high(low(dropped)) * 2.0
    assert out.dtype == torch.bfloat16
    return sum(seen.values())


@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize(("adapters", "dtype"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_an_adapter_keeps_what_pytorch_keeps(adapters: torch.dtype, dtype: str, share: float) -> None:
    frozen = Frozen(rank=RANK, targets=("q_proj",), drops=share > 0, adapter=dtype)
    assert int(walked(frozen).saved[0]) == kept_by_torch(adapters, share)


def test_a_4_bit_product_unpacks_its_matrix_both_ways_and_once_kept_its_input() -> None:
    """MatMul4Bit: the matrix in 16 bits and its scales in fp32. [bitsandbytes]"""
    plain = Frozen(rank=RANK, targets=("v_proj",), adapter="bf16")
    packed, older, held = (
        Frozen(rank=RANK, targets=("v_proj",), quantised=True, keeps=keeps) for keeps in ("", "step", "steps")
    )
    unpacked = 2 * WIDTH * OUT + 4 * WIDTH * OUT // 64
    for phase in ("forward", "backward"):
        less, more = (int(walked(frozen).peak(phase)[0][0]) for frozen in (plain, packed))
        assert more - less == unpacked
    given = 2 * TOKENS * WIDTH
    assert [int(walked(frozen).saved[0]) for frozen in (plain, packed, older, held)] == [0, 0, given, 2 * given]


class Keeps(torch.autograd.Function):
    """A function that keeps its input as bitsandbytes' MatMul4Bit did: in an attribute, unknown to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - autograd's context has no type
        """Doubled."""
        ctx.kept = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # noqa: ANN401
        """Of what it gave."""
        return grad * 2


def test_what_a_function_keeps_in_an_attribute_stays_as_long_as_the_loss() -> None:
    weight = torch.ones(4, requires_grad=True)
    given = weight * 3
    alive = weakref.ref(given)
    loss = Keeps.apply(given).sum()
    del given
    loss.backward()
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None


def test_a_4_bit_product_gives_what_it_gives_in_the_dtype_that_it_was_given() -> None:
    """Linear4bit.forward casts its result back, so that what stays in fp32 stays so. [bitsandbytes: nn/modules.py]"""
    ops = Ops(Program(), "bf16", Frozen(rank=RANK, targets=("v_proj",), quantised=True))
    wide = ops.input("x", np.array([TOKENS]), WIDTH, "fp32")
    narrow = ops.input("y", np.array([TOKENS]), WIDTH)
    assert [ops.linear("up", x, OUT, module="up_proj").dtype for x in (wide, narrow)] == ["fp32", "bf16"]
    assert ops.linear("output layer", wide, OUT).dtype == "bf16"


def test_an_input_that_several_4_bit_products_share_is_kept_once_of_each_step() -> None:
    gated = {
        version: saved(setting_of(MODEL, workload(qlora=True), engine="pytorch", framework_version=version, **PURE))
        for version in ("2.13", "2.4")
    }
    rows = 2 * SEQ
    heads = next(t.shape[0] for t in MODEL.blocks[0].tensors if t.name.endswith("q_proj.weight"))
    inner = MODEL.blocks[0].mlp.intermediate if MODEL.blocks[0].mlp else 0
    # q, k and v keep one anyway, for their adapters, and attention what it gives: of both a copy is from before
    more = rows * (MODEL.hidden_size + heads + 2 * MODEL.hidden_size + 2 * inner)
    assert (gated["2.4"] - gated["2.13"]) / MODEL.num_layers == more


def saved(setting: Setting) -> int:
    memory = stage_memory(Inventory(setting), plan_of(zero_stage=0))
    return int(memory.saved[0, 0])


def workload(**more: object) -> Workload:
    return Workload(seq=SEQ, lora_rank=8, lora_targets=("q_proj", "k_proj", "v_proj"), **more)  # type: ignore[arg-type]


def test_under_autocast_each_adapter_has_its_input_to_itself() -> None:
    hidden = SEQ * MODEL.hidden_size
    adapted = [t for t in MODEL.blocks[0].tensors if t.name.split(".")[-2] in workload().lora_targets]
    ranks = sum(8 * (MODEL.hidden_size + t.shape[0]) for t in adapted)
    one, three = (
        saved(setting_of(MODEL, workload(), engine="pytorch", precision=precision, recompute="none"))
        for precision in ("bf16-pure", "bf16")
    )
    # three copies of 2 bytes in place of one tensor that all share, and the adapters' own
    assert (three - one) / MODEL.num_layers == pytest.approx(2 * 2 * hidden + 2 * ranks, rel=0.01)


def test_dropout_keeps_a_mask_and_what_it_gave() -> None:
    hidden = SEQ * MODEL.hidden_size
    for precision, more in (("bf16", 3 * hidden), ("bf16-pure", 3 * 3 * hidden - 2 * hidden)):
        plain, drops = (
            saved(setting_of(MODEL, work, engine="pytorch", precision=precision, recompute="none"))
            for work in (workload(), workload(lora_dropout=0.05))
        )
        assert (drops - plain) / MODEL.num_layers == pytest.approx(more, rel=0.01)


def test_prepared_for_4_bits_hidden_states_are_in_fp32_where_nothing_casts_them_back() -> None:
    """An embedding in fp32 gives them so. [peft: prepare_model_for_kbit_training]"""
    hidden = SEQ * MODEL.hidden_size

    def inputs(engine: str, **scenario: object) -> float:
        made = [
            saved(setting_of(dense(layers=n), workload(qlora=True), engine=engine, recompute="full", **scenario))
            for n in (2, 6)
        ]
        return (made[1] - made[0]) / 4 / hidden

    assert inputs("pytorch") == 4
    assert inputs("pytorch", frozen_dtype="bf16") == 2
    assert inputs("pytorch", precision="bf16-pure") == 2
    # DeepSpeed casts the whole module, and a flat parameter has one dtype
    assert inputs("deepspeed") == inputs("fsdp1") == 2


def test_what_stays_unquantised_is_in_16_bits_where_an_engine_casts_it() -> None:
    for engine, dtype in (("pytorch", "fp32"), ("paper", "fp32"), ("deepspeed", "bf16"), ("fsdp1", "bf16")):
        inventory = Inventory(setting_of(MODEL, workload(qlora=True), engine=engine))
        frozen = next(buffer for buffer in inventory.buffers if buffer.what.startswith("frozen "))
        assert frozen.dtype == dtype
