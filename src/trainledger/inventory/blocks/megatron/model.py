"""Layers and both ends of a model as Megatron-Core runs them."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray, round_up
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Block
from trainledger.inventory.blocks.loss import Logits, cross_entropy
from trainledger.inventory.blocks.megatron.attention import attention
from trainledger.inventory.blocks.megatron.feedforward import dense, routed
from trainledger.inventory.blocks.megatron.mixer import mixer
from trainledger.inventory.blocks.megatron.modules import Modules
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.tape import Program, Tape, Value, walk

Kit = type[Modules]
"""Whose modules a model is built of."""


def embedding(sizes: Sizes, kit: Kit) -> Tape:
    """The ranks' parts are summed and scattered; backward the gradient of the whole table is made, and then added.

    A norm after it keeps what it reads. Dropout keeps its mask.
    """
    program, model = Program(), sizes.setting.model
    modules = kit(program, sizes)
    whole = modules.where_sp(sizes.hidden)
    made = {"token ids, and where": sizes.wide(1, "int64") + sizes.wide(1, "uint8")}
    table = bytes_of(vocab_of_rank(sizes) * sizes.hidden_size, sizes.dtype)
    out = program.op("embedding", (), sizes.residual, made=made, work=whole, back_work=(whole, table))
    if any(tensor.role == "norm" for tensor in model.embedding):
        out = modules.norm("norm after the embedding", out, sizes.hidden_size)
    if any(_drops(block, sizes) for block in model.blocks):
        out = modules.dropped("the embedding", out)
    return walk(program, out)


def layer(block: Block, sizes: Sizes, kit: Kit, again: tuple[str, ...], *, predicts: bool, region: int = 1) -> Tape:
    """One layer; `again` names what is recomputed: parts of it, or `full`, of so many layers as one region.

    predicts   a multi-token-prediction depth: two norms and a matrix come before the layer
    """
    program = Program(puts_off=kit.native)
    modules = kit(program, sizes, again)
    x = program.input("input of the layer", sizes.residual)
    if "full" not in again:
        return walk(program, _layer(modules, block, x, predicts=predicts))
    out = x
    with program.recomputed(early_stop=False):
        for _ in range(region):
            out = _layer(modules, block, out, predicts=predicts)
    return walk(program, out)


def _layer(modules: Modules, block: Block, x: Value, *, predicts: bool) -> Value:
    stream = _joined(modules, x) if predicts else x
    dropout = _drops(block, modules.sizes)
    branches = [part for part in (block.attention, block.ssm, block.mlp, block.moe) if part is not None]
    for name, part in zip(("attention", "the network", "the rest"), branches, strict=False):
        branch = _branch(modules, block, part, stream)
        for _ in range(_norms_after(block, len(branches))):
            branch = modules.norm(f"norm after {name}", branch, modules.sizes.hidden_size)
        stream = modules.added(f"residual after {name}", stream, branch, dropout=dropout)
    return stream


def _drops(block: Block, sizes: Sizes) -> bool:
    """Whether a block is trained with dropout: as the plan says, or else as GPT's is, whose networks have no gate."""
    said = sizes.setting.scenario.dropout
    if said:
        return said == "on"
    return block.attention is not None and block.mlp is not None and not block.mlp.gated


def _branch(modules: Modules, block: Block, part: object, stream: Value) -> Value:
    if part is block.attention and block.attention is not None:
        return attention(modules, block.attention, stream, drops=_drops(block, modules.sizes))
    if part is block.ssm and block.ssm is not None:
        return mixer(modules, block.ssm, stream)
    if part is block.mlp and block.mlp is not None:
        return dense(modules, block.mlp, stream)
    if block.moe is None:
        raise AssertionError(f"a block has a part that is none of its parts: {part}")
    return routed(modules, block.moe, stream)


def _norms_after(block: Block, branches: int) -> int:
    """Norms between a branch and the addition: what is left once each branch has one before."""
    return max(block.norms - branches, 0) // max(branches, 1)


def _joined(modules: Modules, x: Value) -> Value:
    """Hidden states and the next tokens' embeddings, each normed, side by side, and one matrix over both."""
    program, width = modules.program, modules.sizes.hidden_size
    tokens = program.op("embedding of the next tokens", (), modules.sharded(width))
    both = (modules.norm("norm of the embedding", tokens, width), modules.norm("norm of the hidden states", x, width))
    side_by_side = program.op("side by side", both, modules.sharded(2 * width))
    return modules.column("projection of both", side_by_side, 2 * width, modules.sharded(width))


def output(sizes: Sizes, kit: Kit, how: str) -> Tape:
    """Final norm, output layer and loss.

    The layer gathers its input into a buffer that stays (gathered_input), and holds the gradient of all tokens.
    [megatron: core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication]
    """
    program = Program()
    modules = kit(program, sizes)
    x = program.input("output of the last layer", sizes.residual)
    normed = modules.norm("final norm", x, sizes.hidden_size)
    of = Logits(rows=sizes.tokens, elements=sizes.tokens * vocab_of_rank(sizes), dtype=sizes.dtype)
    whole = modules.where_sp(sizes.hidden)
    logits = program.op("output layer", normed, of.bytes(), keeps=(normed,), back_work=whole, product=kit.native)
    cross_entropy(program, how, logits, of)
    return walk(program, None)


def gathered_input(sizes: Sizes) -> IntArray:
    """[plans]: what the output layer gathers its input into, once allocated and kept. [megatron: core/utils.py]"""
    return Modules(Program(), sizes).where_sp(sizes.hidden)


def vocab_of_rank(sizes: Sizes) -> IntArray:
    """[plans]: entries of the vocabulary on one rank, padded."""
    setting = sizes.setting
    multiple = np.maximum(setting.profile.vocab_multiple * sizes.tp, 1)
    return round_up(setting.model.vocab_size, multiple) // sizes.tp
