"""The buffers a run keeps: the profile's rows, spelled out for one model, workload and optimizer.

A profile row says "weights"; a run with LoRA keeps trained and frozen weights in different dtypes, an optimizer
keeps several moments, a DPO run keeps a second copy. Each becomes one Buffer with a mask over the TensorTable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import numpy as np

from trainledger.arrays import IntArray, ints
from trainledger.dtypes import NF4_BLOCK, NF4_NESTED_BLOCK, block_scaled_bytes, bytes_of, kept_bytes
from trainledger.inventory.tensors import BoolArray, TensorTable
from trainledger.plans.setting import Setting
from trainledger.profiles.profile import StateRow

CODEBOOK = 256
"""Values that 8 bits can name: torchao keeps them in fp32 with every quantised tensor. [torchao: subclass_8bit.py]"""

NEVER = 4
"""The zero_stage from which what is never divided is divided."""
BUCKET = -1
"""The cap of a row that holds no more than a bucket of this setting."""

Layout = Literal["full", "block", "factored"]


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of storage: `row` gives its rules, the rest what it holds."""

    row: StateRow
    what: str
    dtype: str
    mask: BoolArray
    layout: Layout = "full"
    block: int = 0
    least: int = 0
    plain: str = ""
    whole_blocks: bool = False
    copies: int = 1
    elements: int = 0

    def quantised_bytes(self, elements: IntArray) -> IntArray:
        """Bytes of block-quantised optimizer state; tensors below `least` elements stay in the dtype `plain`.

        With `whole_blocks` so do those that end in a part of a block, and 8-bit codes come with a table of their own.
        """
        small = elements < self.least
        large = block_scaled_bytes(elements, self.dtype, self.block, "fp32")
        if self.whole_blocks:
            small |= elements % self.block != 0
            large = large + bytes_of(ints(CODEBOOK), "fp32") * (self.dtype == "uint8")
        return np.where(small, bytes_of(elements, self.plain), large)

    @property
    def per_tensor(self) -> bool:
        """Each tensor is a storage of its own, so each gets a line."""
        row = self.row
        pooled = row.cap or row.select == "bucket" or row.select.startswith("largest")
        return row.cut in ("none", "dim0", "tensor") and not pooled


def buffers(setting: Setting, table: TensorTable) -> tuple[Buffer, ...]:
    """Every buffer of this setting, in the profile's order."""
    return buffers_of(setting.profile.state, setting, table)


def buffers_of(rows: Iterable[StateRow], setting: Setting, table: TensorTable) -> tuple[Buffer, ...]:
    """What rows stand for in this setting, in their order; those that do not apply stand for nothing."""
    applying = (_as_set(row, setting) for row in rows if _applies(row, setting))
    return tuple(buffer for row in applying for buffer in _expand(row, setting, table))


def _as_set(row: StateRow, setting: Setting) -> StateRow:
    """A row with its bucket's size; and where weights are cast every model is wrapped by unit, whatever the plan."""
    if row.cap == BUCKET:
        row = msgspec.structs.replace(row, cap=setting.bucket_elements)
    return msgspec.structs.replace(row, wrapped="") if row.wrapped and setting.casts else row


def _applies(row: StateRow, setting: Setting) -> bool:
    """Whether the categorical conditions of a row hold (those on plan columns are masks, applied later)."""
    scenario = setting.scenario
    offload = scenario.offload
    conditions = (
        not row.precision or scenario.precision in row.precision,
        not row.grad or setting.dtype("grad") in row.grad,
        row.same_grad is None or row.same_grad == (setting.dtype("grad") == setting.recipe.weight),
        scenario.optimizer not in row.not_optimizer,
        not row.offload or row.offload in offload,
        not row.not_offload or row.not_offload not in offload,
        not row.overlap or scenario.overlap_comm == "on",
        row.non_tn is None or row.non_tn == _non_tn(setting),
        row.wrapped in ("", "unit") or not setting.casts,
        # a parameter count says nothing of its largest unit or tensor, so buffers of that size are not counted
        not (_count_alone(setting) and row.select in ("largest_unit", "largest_tensor")),
    )
    return all(conditions)


def _count_alone(setting: Setting) -> bool:
    return setting.model.params_only and not setting.model.blocks


def _non_tn(setting: Setting) -> bool:
    """Whether the card multiplies FP8 matrices in every layout, so that no transposed copy is kept. [te: utils.py]

    Without a card, or on one without a compute capability, a Hopper is assumed: the copy is kept.
    """
    capability = setting.accelerator.capability if setting.accelerator is not None else ()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def _expand(row: StateRow, setting: Setting, table: TensorTable) -> Iterator[Buffer]:
    dtype = setting.dtype(row.dtype)
    if row.dtype == "moments":
        yield from _moments(row, setting, table)
        return
    if not dtype:
        return
    trained = table.trainable
    if row.select in ("bucket", "largest_module"):
        elements = setting.bucket_elements if row.select == "bucket" else largest_module(setting, table)
        yield Buffer(row=row, what=row.what, dtype=dtype, mask=trained, elements=elements)
        return
    selected = _selected(row, setting, table)
    if row.dtype == "gathered" and not setting.profile.shards_quantised:
        selected = selected & ~table.quantised
    stored = row.category == "weights" and row.select in ("trainable", "persistent")
    if stored:
        yield from _stored_weights(row, setting, dtype, selected, table)
    elif row.dtype == "gathered" and row.select == "all":
        for mask, kind in gathered_parts(table, dtype):
            what = row.what if kind == dtype else f"{row.what}, {kind}"
            yield Buffer(row=row, what=what, dtype=kind, mask=selected & mask)
    else:
        yield Buffer(row=row, what=row.what, dtype=dtype, mask=selected)


def gathered_parts(table: TensorTable, dtype: str) -> list[tuple[BoolArray, str]]:
    """(mask, dtype) of what a weight gather carries.

    An FP8 gather carries weight matrices in FP8 and the rest in bf16, stacked experts too, which are no layers
    [torchao-fp8-gather]; frozen 4-bit weights travel as they are stored [deepspeed-4bit].
    """
    matrices = table.linear & ~table.expert if dtype == "fp8" else np.ones_like(table.linear)
    parts = [(matrices & ~table.quantised, dtype)]
    if dtype == "fp8":
        parts.append((~matrices & ~table.quantised, "bf16"))
    if table.quantised.any():
        parts.append((table.quantised, "nf4"))
    return parts


def gathered_bytes(table: TensorTable, elements: IntArray, dtype: str) -> IntArray:
    """[plans, T]: bytes of each tensor as a gather carries it."""
    held = np.zeros_like(elements)
    for mask, kind in gathered_parts(table, dtype):
        held = held + mask * kept_bytes(elements, kind)
    return held


def largest_module(setting: Setting, table: TensorTable) -> int:
    """Parameters of the largest single layer, as DeepSpeed's estimator asks. [deepspeed: model_to_params]

    0 where a parameter count says nothing of it: rule largest-layer-known refuses the plans that need it.
    """
    if setting.largest_module_params or setting.model.params_only:
        return setting.largest_module_params
    layers: dict[str, int] = {}
    for name, rows, rest in zip(table.names, table.rows, table.rest, strict=True):
        layer = name.rsplit(".", 1)[0]
        layers[layer] = layers.get(layer, 0) + int(rows * rest)
    return max(layers.values())


def _selected(row: StateRow, setting: Setting, table: TensorTable) -> BoolArray:
    everything = np.ones(len(table.names), dtype=bool)
    match row.select:
        case "trainable":
            return everything if row.category == "weights" else table.trainable
        case "linear":
            return table.linear
        case "persistent":
            return table.rows * table.rest <= setting.profile.persistent_elements
        case _:
            return everything


def _stored_weights(
    row: StateRow, setting: Setting, dtype: str, selected: BoolArray, table: TensorTable
) -> Iterator[Buffer]:
    """Weights by what happens to them: trained, frozen, frozen in 4 bits, and whole frozen copies."""
    frozen = setting.dtype("frozen")
    quantised = selected & table.quantised
    kept = selected & ~table.trainable & ~table.quantised
    yield Buffer(row=row, what=row.what, dtype=dtype, mask=selected & table.trainable)
    if kept.any():
        dtype_kept = "fp32" if setting.prepared else frozen
        yield Buffer(row=_apart(row), what=f"frozen {row.what}", dtype=dtype_kept, mask=kept)
    if quantised.any() and row.cut == "flat_unit":
        yield from _packed(row, quantised)
    elif quantised.any():
        cut = row if setting.profile.shards_quantised else msgspec.structs.replace(row, sharded_from=4, cut="none")
        yield Buffer(row=cut, what=f"4-bit frozen {row.what}", dtype="nf4", mask=quantised)
    if setting.workload.frozen_copy:
        base = selected & ~table.trainable if setting.workload.lora_rank else selected
        copies = setting.workload.frozen_copy
        yield Buffer(row=_apart(row), what=f"reference {row.what}", dtype=frozen, mask=base, copies=copies)


def _packed(row: StateRow, quantised: BoolArray) -> Iterator[Buffer]:
    """4-bit weights as bitsandbytes packs them into a parameter; their scales are none, so each rank has them whole.

    [bitsandbytes: nn/modules.py Params4bit, functional.py QuantState]
    """
    yield Buffer(row=row, what=f"4-bit frozen {row.what}", dtype="fp4", mask=quantised)
    for what, dtype, per in (
        ("scales of 4-bit", "uint8", NF4_BLOCK),
        ("scales of scales of 4-bit", "fp32", NF4_BLOCK * NF4_NESTED_BLOCK),
    ):
        whole = msgspec.structs.replace(row, sharded_from=NEVER, cut="none", per=per)
        yield Buffer(row=whole, what=f"{what} frozen {row.what}", dtype=dtype, mask=quantised)


def _apart(row: StateRow) -> StateRow:
    """The row of weights that do not train: engines flatten trained ones only, the others stay tensors of their own."""
    return msgspec.structs.replace(row, cut="none") if row.sharded_from == 4 and row.cut != "none" else row


def _moments(row: StateRow, setting: Setting, table: TensorTable) -> Iterator[Buffer]:
    matrix = table.linear & (table.rest > 1)
    masks = {"all": table.trainable, "matrix": table.trainable & matrix, "rest": table.trainable & ~matrix}
    for moment in setting.optimizer.moments:
        dtype = setting.dtype("stepped") if moment.dtype == "master" else moment.dtype
        yield Buffer(
            row=row,
            what=moment.what,
            dtype=dtype,
            mask=masks[moment.select],
            layout=moment.layout,
            block=moment.block,
            least=moment.least,
            plain=setting.dtype("stepped"),
            whole_blocks=setting.profile.whole_blocks and not _count_alone(setting),
        )
    if setting.workload.ema:
        yield Buffer(row=row, what="ema", dtype="fp32", mask=table.trainable)
