"""nanotron's Llama: autograd's own linear layers, flash-attn's rotary embedding and attention.

Collectives of tensor parallelism are functions of their own, so a matrix keeps its gathered input, unless the release
gathers it again, into a buffer that stays. Sums over ranks and gathers are new tensors under sequence parallelism and
happen in place without. Gradients of weights are in 16 bits, and their own.
[nanotron: src/nanotron/models/llama.py, src/nanotron/parallel/tensor_parallel]
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trainledger.arrays import IntArray, ceil_div, round_up
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Attention, Block, Mlp
from trainledger.inventory.blocks.loss import Logits, cross_entropy
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Bytes, Program, Tape, Value, walk
from trainledger.plans.plan import Plans


def unlike(plans: Plans) -> NDArray[np.bool_]:
    """[plans, 2]: whether tokens are cut, and whether a batch has to be put in another order before the projection."""
    return np.stack([plans.sp_ranks > 1, plans.mbs > 1], axis=1)


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts of a model under a Setting."""
    setting = inventory.setting
    again = setting.scenario.recompute == "full"
    return Parts(
        embedding=_Layer(sizes).embedding(),
        blocks=tuple(_Layer(sizes).block(block, recomputed=again) for _, block in inventory.layers),
        final=_Layer(sizes).output(setting.loss),
        standing=np.where(sizes.plans.sp_ranks > 1, sizes.hidden, 0) if setting.profile.memory.regathers else 0,
    )


class _Layer:
    """Adds operations to a program of its own; sizes are those of one micro-batch on one rank, arrays [plans]."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.program = Program()
        self.cut = bool((sizes.plans.sp_ranks > 1).any())

    def embedding(self) -> Tape:
        """Every rank looks up its part of the table; the sum is scattered. Backward gives the table's gradient."""
        whole = self.sizes.hidden
        made = {"token ids, and where": self.sizes.wide(1, "int64") + self.sizes.wide(1, "uint8")}
        weights = {"table": self._matrix(self._vocab, self.sizes.hidden_size)}
        out = self.program.op("embedding", (), whole, made=made, weights=weights)
        return walk(self.program, self._scattered("embedding scattered", out))

    def block(self, block: Block, *, recomputed: bool) -> Tape:
        """One layer."""
        x = self.program.input("input of the layer", self.sizes.residual)
        if not recomputed:
            return walk(self.program, self._layer(block, x))
        with self.program.recomputed(early_stop=False):
            out = self._layer(block, x)
        return walk(self.program, out)

    def output(self, how: str) -> Tape:
        """Final norm, output layer, logits in fp32 and the loss."""
        x = self.program.input("output of the last layer", self.sizes.residual)
        of = Logits(rows=self.sizes.tokens, elements=self.sizes.tokens * self._vocab, dtype=self.sizes.dtype)
        normed = self._norm("final norm", x)
        logits = self._column("output layer", normed, self._vocab, self.sizes.hidden_size, of.bytes())
        cross_entropy(self.program, how, logits, of)
        return walk(self.program, None)

    def _layer(self, block: Block, x: Value) -> Value:
        if block.attention is None or block.mlp is None:
            raise AssertionError("rule engine-model refuses a block without attention or a dense network")
        attention = self._attention(block.attention, self._norm("norm before attention", x))
        x = self.program.op("residual after attention", (x, attention), x.nbytes, passes=True)
        network = self._network(block.mlp, self._norm("norm before the network", x))
        return self.program.op("residual after the network", (x, network), x.nbytes, passes=True)

    def _attention(self, of: Attention, normed: Value) -> Value:
        """Keys and values are put side by side and copied once more; rotation is in place. [nanotron-attention]"""
        program, sizes = self.program, self.sizes
        query, key = self._heads(sizes.heads(of), of.qk_head_dim), self._heads(sizes.kv_heads(of), of.qk_head_dim)
        value = self._heads(sizes.kv_heads(of), of.v_head_dim)
        rows = sizes.heads(of) * of.qk_head_dim + sizes.kv_heads(of) * (of.qk_head_dim + of.v_head_dim)
        whole = query + key + value
        mixed = self._column("query, key and value projection", normed, rows, sizes.hidden_size, whole)
        widths = {"queries": query, "keys": key, "values": value}
        q, k, v = self._by_head(mixed, widths, grouped=of.heads != of.kv_heads)
        pair = program.op("keys and values side by side", (k, v), key + value)
        pair = program.op("keys and values by token", pair, key + value, passes=True)
        q = program.op("queries rotated", q, query, in_place=True, passes=True)
        pair = program.op("keys rotated", pair, key + value, in_place=True, passes=True)
        k, v = program.split("keys and values", pair, {"keys rotated": key, "values beside": value})
        made = {"log-sum-exp": bytes_of(sizes.tokens * sizes.heads(of), "fp32")}
        sums = bytes_of(sizes.tokens * sizes.heads(of) * of.qk_head_dim, "fp32")
        out = self._heads(sizes.heads(of), of.v_head_dim)
        given = program.op("attention", (q, k, v), out, keeps=(q, k, v), keeps_output=True, made=made, back_work=sums)
        if bool((sizes.plans.mbs > 1).any()):
            given = program.op("attention's result by position", given, out)
        return self._row("attention output projection", given, sizes.heads(of) * of.v_head_dim)

    def _by_head(self, mixed: Value, widths: Mapping[str, Bytes], *, grouped: bool) -> tuple[Value, Value, Value]:
        """With as many keys as queries one tensor is put in order and looked into; else each is copied by itself."""
        program = self.program
        if not grouped:
            mixed = program.op("queries, keys and values by head", mixed, mixed.nbytes, passes=True)
            q, k, v = program.split("queries, keys and values", mixed, widths)
            return q, k, v
        q, k, v = program.split("queries, keys and values", mixed, widths)
        q, k, v = (program.op(f"{x.name} by head", x, x.nbytes) for x in (q, k, v))
        return q, k, v

    def _network(self, of: Mlp, normed: Value) -> Value:
        """The activation's result and the product are tensors of their own, each kept."""
        program, sizes = self.program, self.sizes
        inner = ceil_div(of.intermediate, sizes.tp)
        each = bytes_of(sizes.tokens * inner, sizes.dtype)
        if not of.gated:
            up = self._column("first matrix of the network", normed, inner, sizes.hidden_size, each)
            return self._row("second matrix of the network", program.op("activation", up, each, keeps=(up,)), inner)
        both = self._column("gate and up projection", normed, 2 * inner, sizes.hidden_size, 2 * each)
        gate, up = program.split("gate and up", both, {"gate": each, "up": each})
        act = program.op("activation", gate, each, keeps=(gate,))
        return self._row("down projection", program.op("product", (act, up), each, keeps=(act, up)), inner)

    def _norm(self, name: str, x: Value) -> Value:
        made = {"statistics": self.sizes.cut(1, self.sizes.plans.sp_ranks, "fp32")}
        return self.program.op(name, x, x.nbytes, keeps=(x,), made=made)

    def _column(self, name: str, normed: Value, rows: IntArray, columns: int, nbytes: IntArray) -> Value:
        """A matrix cut along its outputs, on all tokens."""
        weights = {"weight": self._matrix(rows, columns)}
        whole = self.sizes.hidden
        if not self.cut:
            return self.program.op(name, normed, nbytes, keeps=(normed,), weights=weights)
        if self.sizes.setting.profile.memory.regathers:
            return self.program.op(name, normed, nbytes, keeps=(normed,), weights=weights, back_work=whole)
        gathered = self.program.op(f"{name}: input of all tokens", normed, whole)
        return self.program.op(name, gathered, nbytes, keeps=(gathered,), weights=weights)

    def _row(self, name: str, x: Value, columns: IntArray) -> Value:
        """A matrix cut along its inputs; the sum over ranks is scattered."""
        weights = {"weight": self._matrix(self.sizes.hidden_size, columns)}
        out = self.program.op(name, x, self.sizes.hidden, keeps=(x,), weights=weights)
        return self._scattered(f"{name} scattered", out)

    def _scattered(self, name: str, whole: Value) -> Value:
        return self.program.op(name, whole, self.sizes.residual) if self.cut else whole

    def _heads(self, heads: IntArray, width: int) -> IntArray:
        """Bytes of `width` elements for each token and each of this rank's heads."""
        return bytes_of(self.sizes.tokens * heads * width, self.sizes.dtype)

    def _matrix(self, rows: IntArray | int, columns: IntArray | int) -> IntArray:
        """Bytes of a weight's gradient."""
        return bytes_of(rows * columns * np.ones_like(self.sizes.tp), self.sizes.setting.recipe.weight)

    @property
    def _vocab(self) -> IntArray:
        """[plans]: entries of the vocabulary on one rank, padded."""
        setting, tp = self.sizes.setting, self.sizes.tp
        return round_up(setting.model.vocab_size, np.maximum(setting.profile.vocab_multiple * tp, 1)) // tp
