"""Routed experts: the router, the visits sorted by expert, grouped products, and the network beside them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Moe, Tensor
from trainledger.facts.semantics import MoeRule
from trainledger.inventory.blocks.eager.network import activated, network
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet
from trainledger.inventory.blocks.sizes import Sizes

EXPERTS = "experts: "
"""How the names of operations on the experts' own matrices begin: under expert parallelism they are a unit apart."""

TURNED = ", turned"
"""How the names of gradients end that reach their weight through a view which was made before the first product: that
node of the graph is older than the products, and waits until all of them have run backward."""


class Routed:
    """Writes a routed network down.

    visits    [plans]: rows that this rank's tokens are to an expert
    arriving  [plans]: rows that the experts of this rank get: as many, where tokens are routed evenly
    """

    def __init__(self, ops: Ops, moe: Moe, rule: MoeRule, tensors: Mapping[str, Tensor], sizes: Sizes) -> None:
        self.ops = ops
        self.moe = moe
        self.rule = rule
        self.tensors = tensors
        self.sizes = sizes
        self.visits: IntArray = sizes.tokens * moe.top_k
        self.arriving: IntArray = sizes.arriving(self.visits, moe)
        self.travels = bool(np.any(sizes.plans.ep > 1))

    def forward(self, hidden: Sheet) -> Sheet:
        """Hidden [tokens, hidden] to the same."""
        ops, rule = self.ops, self.rule
        weights = self._route(hidden)
        mixed = self._visited(hidden, weights)
        if rule.shared is not None:
            beside = self._shared(hidden)
            if rule.shared_gate is not None:
                gate = ops.linear("shared gate", hidden, 1)
                beside = self._scaled("shared, gated", beside, ops.from_output("shared gate: sigmoid", gate))
            mixed = ops.add("routed and shared", mixed, beside)
        return mixed

    def _new(self, name: str, x: Sheet, width: Count, *, keeps: bool = False) -> Sheet:
        return self.ops.new(name, x, width=width, keeps=(x.value,) if keeps else ())

    def _route(self, rows: Sheet) -> Sheet:
        """The weight of each visit [tokens, top k], in the dtype of the rows. [runtime/model/router.py]"""
        ops, rule, count = self.ops, self.rule, self.moe.top_k
        scores = self._scores(rows)
        index = {"chosen": bytes_of(self.visits, "int64")}
        if rule.router in ("softmax_top", "sigmoid_top"):
            made = Sheet(scores.value, scores.rows, count, scores.dtype)
            value = ops.program.op("router: best", scores.value, made.bytes(), made=index)
            best = msgspec.structs.replace(made, value=value)
            if rule.router == "sigmoid_top":
                best = ops.cast("router: best in fp32", best, "fp32")
            return ops.cast("router: weights", ops.from_output(f"router: {rule.router}", best), rows.dtype)
        wide = ops.cast("router: scores in fp32", scores, "fp32")
        scores = ops.from_output(f"router: {rule.router}", wide)
        made = Sheet(scores.value, scores.rows, count, "fp32")
        value = ops.program.op("router: chosen", scores.value, made.bytes(), keeps=(scores.value,), made=index)
        weights = msgspec.structs.replace(made, value=value)
        if rule.renormalise:
            total = self._new("router: sum", weights, 1)
            both = (weights.value, total.value)
            value = ops.program.op("router: normalised", both, weights.bytes(), keeps=both)
            weights = msgspec.structs.replace(weights, value=value)
        return ops.cast("router: weights", ops.scale("router: scaled", weights), rows.dtype)

    def _scores(self, rows: Sheet) -> Sheet:
        """One score for each expert [tokens, experts]; a router that multiplies in fp32 keeps its matrix so, too."""
        ops, rule, experts = self.ops, self.rule, self.moe.experts
        bias = f"{rule.path}.{rule.gate}.bias" in self.tensors
        if not rule.fp32 or ops.dtype == "fp32":
            return ops.linear("router", rows, experts, bias=bias, module=rule.gate, wide=True)
        given = ops.cast("router: input in fp32", rows, "fp32")
        wide = bytes_of(experts * (rows.width + 0 * rows.rows), "fp32")
        made = Sheet(rows.value, rows.rows, experts, "fp32")
        value = ops.program.op(
            "router",
            given.value,
            made.bytes(),
            keeps=() if ops.rank else (given.value,),
            made={"matrix in fp32": wide},
            weights=ops.trained({"router": bytes_of(experts * (rows.width + 0 * rows.rows), ops.dtype)}),
            back_work=wide,
        )
        return msgspec.structs.replace(made, value=value)

    def _scaled(self, name: str, x: Sheet, by: Sheet) -> Sheet:
        """X times a number for each row: both wait, and the number's gradient is summed from one of the whole shape."""
        both = (x.value, by.value)
        value = self.ops.program.op(name, both, x.bytes(), keeps=both, back_work=x.bytes())
        return msgspec.structs.replace(x, value=value)

    def _gather(self, name: str, x: Sheet, rows: IntArray) -> Sheet:
        """x[index], whose index waits; the gradient is added up into zeros of the shape of x."""
        made = msgspec.structs.replace(x, rows=rows)
        index = {"index": bytes_of(rows, "int64")}
        return msgspec.structs.replace(made, value=self.ops.program.op(name, x.value, made.bytes(), made=index))

    def _visited(self, rows: Sheet, weights: Sheet) -> Sheet:
        """Visits sorted by expert, run, and added up by token. [runtime/model/moe.py]"""
        ops = self.ops
        flat = ops.view("router: weights by visit", weights, self.visits, 1)
        weight = self._gather("weights in order of experts", flat, self.visits)
        given = self._gather("rows in order of experts", rows, self.visits)
        if self.rule.scale_input:
            given = self._run(self._scaled("rows weighted", given, weight))
        else:
            given = self._scaled("results weighted", self._run(given), weight)
        made = msgspec.structs.replace(rows, value=given.value)
        value = ops.program.op("results added by token", given.value, made.bytes(), work=made.bytes())
        return msgspec.structs.replace(made, value=value)

    def _run(self, rows: Sheet) -> Sheet:
        if not self.travels:
            return self._experts(rows)
        ops, program = self.ops, self.ops.program
        program.hold(rows.value)
        received = ops.new("tokens to their experts", rows, rows=self.arriving)
        program.hold(received.value)
        ordered = self._gather("received in order of experts", received, self.arriving)
        made = self._experts(ordered)
        program.hold(made.value)
        back = self._gather("results in order of ranks", made, self.arriving)
        given = ops.new("results back to their tokens", back, rows=self.visits)
        program.drop(rows.value, received.value, made.value)
        return given

    def _grouped(self, name: str, x: Sheet, width: Count) -> Sheet:
        """Rows times the matrix of their expert: keeps the rows."""
        ops, copies = self.ops, ceil_div(self.moe.experts, self.sizes.plans.ep)
        made = msgspec.structs.replace(x, width=width)
        turned = TURNED if self.rule.stacked == "no" else ""
        adapted = ops.adapts(self._module(name))
        each = ops.rank * (x.width + width) * adapted if ops.rank else x.width * width
        value = ops.program.op(
            f"{EXPERTS}{name}",
            x.value,
            made.bytes(),
            keeps=(x.value,) if adapted or not ops.rank else (),
            # where each expert's rows end, which all products of a network share
            made={"ends": bytes_of(copies, "int32")} if name != "down" and not name.startswith("up") else None,
            weights={f"{EXPERTS}{name}{turned}": bytes_of(copies * each, ops.dtype)},
        )
        return msgspec.structs.replace(made, value=value)

    def _module(self, name: str) -> str:
        """The last part of the name of a matrix of each expert; of stacked ones, what it multiplies."""
        gate, up, down = self.rule.names
        return {"gate": gate, "up": up, "down": down}.get(name, "gate_up_proj")

    def _experts(self, rows: Sheet) -> Sheet:
        ops, rule = self.ops, self.rule
        inner = ceil_div(self.moe.intermediate, self.sizes.plans.etp)
        if rule.stacked != "no":
            return self._stacked(rows, inner)
        if not self.moe.gated:
            up = activated(ops, f"{EXPERTS}activation", self._grouped("up", rows, inner), rule.activation)
            return self._grouped("down", up, rows.width)
        gate = activated(ops, f"{EXPERTS}activation", self._grouped("gate", rows, inner), rule.activation)
        up = self._grouped("up", rows, inner)
        return self._grouped("down", ops.mul(f"{EXPERTS}gated", gate, up), rows.width)

    def _stacked(self, rows: Sheet, inner: IntArray) -> Sheet:
        """Gate and up in one matrix, and perhaps biases."""
        ops, rule = self.ops, self.rule
        both = self._biased("gate and up", self._grouped("gate and up", rows, 2 * inner), "gate_up_proj_bias")
        if rule.stacked == "interleaved":
            gate, up = (ops.slice(f"{EXPERTS}{part}", both, inner) for part in ("gate", "up"))
        else:
            gate, up = ops.chunks(f"{EXPERTS}halves", both, {"gate": inner, "up": inner})
        if rule.limit:
            gate, up = (ops.from_input(f"{EXPERTS}{part} clamped", x) for part, x in (("gate", gate), ("up", up)))
            more = ops.scale(f"{EXPERTS}up and one", up)
            slope = ops.from_output(f"{EXPERTS}sigmoid", ops.scale(f"{EXPERTS}slope", gate))
            made = ops.mul(f"{EXPERTS}gated", more, ops.mul(f"{EXPERTS}activation", gate, slope))
        else:
            made = ops.mul(f"{EXPERTS}gated", activated(ops, f"{EXPERTS}activation", gate, rule.activation), up)
        return self._biased("down", self._grouped("down", made, rows.width), "down_proj_bias")

    def _biased(self, name: str, x: Sheet, bias: str) -> Sheet:
        """Rows plus the bias of their expert, which is repeated for each."""
        if f"{self.rule.path}.experts.{bias}" not in self.tensors:
            return x
        copies = ceil_div(self.moe.experts, self.sizes.plans.ep)
        weights = self.ops.trained({f"{EXPERTS}{name} bias": bytes_of(copies * x.width, self.ops.dtype)})
        made = {"expert of each row": bytes_of(x.rows, "int64")}
        value = self.ops.program.op(
            f"{EXPERTS}{name} bias", x.value, x.bytes(), made=made, weights=weights, work=x.bytes(), passes=True
        )
        return msgspec.structs.replace(x, value=value)

    def _shared(self, x: Sheet) -> Sheet:
        rule = self.rule.shared
        assert rule is not None, "there is one"
        path = f"{self.rule.path}.{rule.path}."
        names = (rule.gate, rule.up, rule.down)
        biases = frozenset(name for name in names if f"{path}{name}.bias" in self.tensors)
        inner = ceil_div(self.moe.shared_intermediate, self.sizes.tp)
        return network(self.ops, rule, x, inner, x.width, biases=biases)
