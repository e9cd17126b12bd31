"""What engines make of weights on the way: units, dummy gradients, flat copies, whole ones."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.account.memory.answers.stored import Family, Stored, bytes_in, having, otherwise
from trainledger.account.shares import Shares
from trainledger.dtypes import bits
from trainledger.inventory.blocks.megatron.matrices import matrices
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans

SUB_GROUP = 1_000_000_000
"""Elements that DeepSpeed's ZeRO-3 steps on at a time unless it is told otherwise. [deepspeed: zero/config.py]"""


def units(inventory: Inventory, own: Shares) -> Iterator[Stored]:
    """What is gathered and handed over at once: a layer, the embedding, what follows; its shard; one tensor of it."""
    setting, table = inventory.setting, own.table
    gathers = int(own.plans.zero_stage[0]) == 3 or setting.profile.memory.passing == "fsdp2"
    dtypes = dict.fromkeys((setting.dtype("gathered"), setting.dtype("reduce"), "fp32"))
    ranks = int(own.dense[0])
    for unit, stages, size in _groups(own):
        phase, share = f"gathered for, or handed over after, {unit}", -(-size // ranks)
        for dtype in dtypes:
            shapes = {f"weights or gradients of {unit}, whole": size, f"one of {ranks} shards of {unit}": share}
            for name, count in shapes.items():
                if count < size or name.endswith("whole"):
                    yield _of(f"{name}, in {dtype}", "gathered", count, dtype, stages, phase, in_plan=gathers)
    for index, name in enumerate(table.names):
        size, stages = int(own.shapes.numel[0, index]), having(own, (int(table.slots[index]),))
        for dtype in dtypes:
            phase = "backward, as its gradient; or when it is gathered or cast"
            planned = stages != () and dtype == setting.dtype("gathered")
            yield _of(f"{name}, whole, in {dtype}", "gradients", size, dtype, stages, phase, in_plan=planned)


def _groups(own: Shares) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name, pp_stages, parameters) of each unit, and of both ends where an engine joins them."""
    table = own.table
    names = {table.at.embedding: "the embedding", table.at.final: "what follows the last layer"}
    whole = table.by_slot(own.shapes.numel[0] * own.shapes.copies[0]).tolist()
    sizes = dict(zip(table.filled.tolist(), whole, strict=True))
    for slot, size in sizes.items():
        yield names.get(slot, "a layer"), having(own, (slot,)), size
    if set(names) <= set(sizes) and int(own.plans.pp[0]) == 1:
        yield "both ends, which some releases join", having(own, names), sum(sizes[slot] for slot in names)


def _of(
    name: str, family: Family, count: int, dtype: str, stages: tuple[int, ...], phase: str, *, in_plan: bool
) -> Stored:
    """A storage of so many parameters."""
    return Stored(
        name=name,
        family=family,
        amount=bytes_in(count, dtype),
        pp_stages=stages,
        phase=phase,
        formula=f"{count} parameters x {bits(dtype) / 8:g} B",
        in_plan=in_plan,
    )


def dummies(inventory: Inventory, plans: Plans, own: Shares) -> Iterator[Stored]:
    """The tensors that stand for gradients which Megatron's products add to its own buffer. [te-dummy]"""
    if inventory.setting.profile.memory.passing != "dummy gradients" or inventory.setting.model.states_alone:
        return
    dtype = inventory.setting.recipe.weight
    for matrix in matrices(inventory, plans):
        rows, columns = int(matrix.rows[0]), int(matrix.columns[0])
        stages = having(own, matrix.slots)
        name, phase = f"dummy gradient of {rows} x {columns}", "first backward, and kept for the run"
        yield _of(name, "gradients", rows * columns, dtype, stages, phase, in_plan=True)


def copies(inventory: Inventory, own: Shares) -> Iterator[Stored]:
    """Flat copies: of all that a rank owns, of its share, and of the whole model."""
    setting, table = inventory.setting, own.table
    owned = own.shapes.numel[0] * own.shapes.copies[0]
    trained = table.by_slot(owned * table.trainable)[None]
    model = setting.model.total_params
    everywhere = tuple(sorted({int(stage) for stage in own.pp_stage[0]}))
    for dtype in dict.fromkeys((setting.dtype("weight"), setting.dtype("gathered"), "fp32")):
        width = bits(dtype) / 8
        yield otherwise(
            f"the whole model in {dtype}",
            "copies",
            bytes_in(model, dtype),
            everywhere,
            "before the engine divides it: when it is loaded, or gathered for a checkpoint",
            f"{model} parameters x {width:g} B",
        )
        for row, stage in enumerate(own.pp_stage[0].tolist()):
            total = int((trained[0] * own.filled[0, row]).sum())
            for name, size, phase in _flat(inventory, own, total):
                formula = f"{size} elements x {width:g} B"
                amount = bytes_in(size, dtype)
                yield otherwise(f"{name} in {dtype}", "copies", amount, (stage,), phase, formula)


def _flat(inventory: Inventory, own: Shares, total: int) -> Iterator[tuple[str, int, str]]:
    """(name, elements, phase) of the flat copies of `total` trained parameters."""
    ranks = int(own.dense[0])
    share = -(-total // ranks)
    yield "all trained parameters of the rank", total, "when gradients or weights are flattened or cast at once"
    if ranks > 1:
        yield f"one of {ranks} shards", share, "when the optimizer is built or steps, or a reduction gives its share"
    deepspeed = inventory.setting.profile.framework == "DeepSpeed"
    if deepspeed and int(own.plans.zero_stage[0]) == 3 and share > SUB_GROUP:
        yield "a sub-group of ZeRO-3", SUB_GROUP, "when the optimizer is built or steps"
        yield "the last sub-group of ZeRO-3", share % SUB_GROUP, "when the optimizer is built or steps"
