"""Dense networks and experts as Megatron builds them of TransformerEngine's modules."""

from __future__ import annotations

import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Mlp, Moe
from trainledger.inventory.blocks.megatron.modules import Modules
from trainledger.inventory.tape import Value


def dense(modules: Modules, of: Mlp, x: Value) -> Value:
    """The branch of a dense network, its norm included."""
    sizes = modules.sizes
    inner = sizes.cut(of.intermediate, sizes.tp)
    wide = inner * (2 if of.gated else 1)
    with modules.recomputed("mlp"):
        up = modules.normed_column("norm, first matrix of the network", x, sizes.hidden_size, wide)
        act = modules.program.op("activation", up, inner, keeps=(up,))
        return modules.row("second matrix of the network", act, sizes.hidden_size)


def routed(modules: Modules, of: Moe, x: Value) -> Value:
    """The branch of routed experts, its norm included. [megatron: core/transformer/moe/moe_layer.py]"""
    with modules.discarded("layernorm"):
        normed = modules.norm("norm before the experts", x, modules.sizes.hidden_size)
    with modules.recomputed("moe"):
        chosen = _router(modules, of, normed)
        return _experts(modules, of, normed, chosen, _shared(modules, of, normed))


def _router(modules: Modules, of: Moe, normed: Value) -> Value:
    """Two softmax results in fp32, of the choice and of the balance loss, where tokens go, and with which factor."""
    scores = 2 * modules.sharded(of.experts, "fp32") + modules.sharded(of.experts, "uint8")
    made = {"scores": scores}
    return modules.program.op("router", normed, modules.sharded(of.experts), keeps=(normed,), made=made)


def _shared(modules: Modules, of: Moe, normed: Value) -> Value | None:
    if not of.shared_intermediate:
        return None
    sizes = modules.sizes
    inner = sizes.cut(of.shared_intermediate, sizes.tp)
    wide = inner * (2 if of.gated else 1)
    with modules.recomputed("shared_experts"):
        up = modules.column("first matrix of the shared expert", normed, sizes.hidden_size, wide)
        act = modules.program.op("activation of the shared expert", up, inner, keeps=(up,))
        return modules.row("second matrix of the shared expert", act, sizes.hidden_size)


def _experts(modules: Modules, of: Moe, normed: Value, chosen: Value, shared: Value | None) -> Value:
    """Rows are sorted, exchanged, gathered over expert-tensor ranks, sorted again, and go back the same way.

    Python's names for the rows before and after the exchange, and for the experts' result, live until the layer
    returns. [megatron: core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher]
    """
    program, sizes = modules.program, modules.sizes
    rows, etp = _rows(modules, of), sizes.plans.etp
    sent = bytes_of(rows * sizes.hidden_size, sizes.dtype)
    made = {"where rows go": modules.sharded(2 * of.experts + 1, "int32")}
    sorted_ = program.op("tokens by expert", (normed, chosen), sent, made=made)
    program.hold(sorted_)
    several = ceil_div(of.experts, sizes.plans.ep) > 1
    arriving = sizes.arriving(rows, of)
    got = bytes_of(arriving * sizes.hidden_size, sizes.dtype)
    received = program.op("tokens exchanged", sorted_, np.where(several | (etp > 1), got, 0))
    program.hold(received)
    given = _matrices(modules, of, received, arriving)
    program.hold(given)
    by_rank = program.op("results by rank", given, got, work=np.where(etp > 1, got * etp, 0))
    program.drop(given)
    program.hold(by_rank)
    back = program.op("results exchanged", by_rank, sent)
    out = program.op("results summed", back, modules.sharded(sizes.hidden_size), made=made)
    if shared is not None:
        out = program.op("shared and routed", (out, shared), out.nbytes, passes=True)
    program.drop(sorted_, received, by_rank)
    return out


def _matrices(modules: Modules, of: Moe, received: Value, rows: IntArray) -> Value:
    """The experts' own work; a row's factor is applied with the activation."""
    program, sizes = modules.program, modules.sizes
    rows = rows * sizes.plans.etp
    hidden = bytes_of(rows * sizes.hidden_size, sizes.dtype)
    gathered = np.where(sizes.plans.etp > 1, hidden, 0)
    placed = program.op("tokens by expert of this rank", received, hidden, work=gathered)
    halves, width = 2 if of.gated else 1, ceil_div(of.intermediate, sizes.plans.etp)
    elements = ceil_div(of.experts, sizes.plans.ep) * sizes.hidden_size * width
    inner = bytes_of(rows * width, sizes.dtype)
    up = modules.grouped("first matrices of the experts", placed, inner * halves, elements * halves)
    factors = {"factors": bytes_of(rows, "fp32")}
    with modules.discarded("moe_act"):
        act = program.op("activation of the experts", up, inner, keeps=(up,), made=factors)
    return modules.grouped("second matrices of the experts", act, hidden, elements)


def _rows(modules: Modules, of: Moe) -> IntArray:
    """[plans]: tokens that one rank sends to experts, and gets: capacity 1 with padding, or balanced routing."""
    sizes = modules.sizes
    return ceil_div(sizes.tokens, sizes.plans.sp_ranks) * of.top_k
