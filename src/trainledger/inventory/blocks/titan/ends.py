"""What comes before the blocks and after them, neither of which is compiled; and the loss."""

from __future__ import annotations

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.inventory.blocks.loss import Logits, OutputLayer, cross_entropy, in_chunks
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.blocks.titan.builder import Builder
from trainledger.inventory.blocks.titan.norm import norm
from trainledger.inventory.tape import Tape, Value, walk
from trainledger.plans.sharding import shard_group


def embedding(sizes: Sizes) -> Tape:
    """Rows of a table; over tensor-parallel ranks its gradient is made whole before each takes its part."""
    build, setting = Builder(sizes), sizes.setting
    table = build.weight(setting.model.vocab_size * sizes.hidden_size)
    weights = {"embedding: weight": table // sizes.tp}
    work = table if build.summed else 0
    looked = build.program.op("embedding", (), sizes.hidden, weights=weights, back_work=work)
    return walk(build.program, build.scattered(looked, "embedded tokens"))


def final(sizes: Sizes) -> Tape:
    """The last norm, the output layer and the loss."""
    build = Builder(sizes)
    hidden = build.program.input("hidden states", sizes.residual)
    normed = norm(build, "last norm", hidden, sizes.residual, build.rows, sizes.hidden_size)
    whole = build.gathered(normed, "input of the output layer")
    how, of = sizes.setting.loss_of(cut=build.summed), _logits(sizes)
    weight = build.weight(sizes.setting.model.vocab_size * sizes.hidden_size) // sizes.tp
    if how == "chunked":
        _chunked(build, whole, of, weight)
    else:
        logits = build.matrix("output layer", whole, of.bytes(), weight)
        cross_entropy(build.program, how, logits, of)
    return walk(build.program, None)


def _logits(sizes: Sizes) -> Logits:
    return Logits(rows=sizes.tokens, elements=sizes.tokens * sizes.vocabulary(), dtype=sizes.dtype)


def _chunked(build: Builder, whole: Value, of: Logits, weight: IntArray) -> None:
    """Chunks: under FSDP2 the output layer's gradient is added up whole, in the dtype of reductions. [fsdp2-no-sync]

    One graph reduces that of each chunk, and adds up shards. [torchtitan-graph-trainer]
    """
    sizes, setting = build.sizes, build.sizes.setting
    added = bytes_of(ceil_div(setting.model.vocab_size * sizes.hidden_size, sizes.tp), setting.dtype("reduce"))
    if build.one_graph:
        added = ceil_div(added, shard_group(sizes.plans, expert=False))
    layer = OutputLayer(
        hidden=sizes.hidden,
        hidden_sum=sizes.wide(sizes.hidden_size, "fp32"),
        gradient=weight,
        gradient_sum=added,
    )
    in_chunks(build.program, setting.whole_loss(cut=build.summed), whole, of, layer, setting.loss_chunks)
