"""What comes before the first layer and after the last, and the loss."""

from __future__ import annotations

import msgspec

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.facts.model import Model, Tensor
from trainledger.facts.semantics import Semantics
from trainledger.inventory.blocks.eager.exchange import Exchange
from trainledger.inventory.blocks.eager.norm import norm
from trainledger.inventory.blocks.eager.ops import Count, Ops, Sheet
from trainledger.inventory.blocks.loss import Logits, cross_entropy
from trainledger.inventory.blocks.sizes import Sizes


class Ends:
    """Writes the ends of a model down."""

    def __init__(self, ops: Ops, model: Model, rules: Semantics, sizes: Sizes) -> None:
        self.ops = ops
        self.model = model
        self.rules = rules
        self.sizes = sizes
        self.exchange = Exchange(ops, sizes)
        self.names = {tensor.name for tensor in (*model.embedding, *model.final)}

    def _has(self, module: str, what: str) -> bool:
        return f"{module}.{what}" in self.names

    @property
    def vocab(self) -> IntArray:
        """[plans]: entries of the vocabulary on this rank."""
        return ceil_div(self.model.vocab_size, self.sizes.tp)

    def entry(self) -> Sheet:
        """Token ids to hidden states; nothing waits for the gradient of the ids."""
        ops, rule = self.ops, self.rules.entry
        width = self._table.shape[1]
        dtype = self.sizes.setting.stream
        rows = bytes_of(self.sizes.tokens * width, dtype)
        weights = {"embedding": bytes_of(self.vocab * width, ops.dtype)}
        value = ops.program.op("embedding", (), rows, weights=ops.trained(weights))
        hidden = Sheet(value, self.sizes.tokens, width, dtype)
        hidden = self.exchange.leave("embedding", self.exchange.own_rows("embedding: own rows", hidden))
        if rule.multiplier != 1.0:
            hidden = ops.scale("embedding: factor", hidden)
        if rule.project:
            hidden = ops.linear("embedding projection", hidden, self.model.hidden_size)
        if rule.positions:
            hidden = self._positioned(hidden)
        return self._norm("embedding norm", rule.norm, hidden)

    @property
    def _table(self) -> Tensor:
        """The embedding of tokens."""
        return next(tensor for tensor in self.model.embedding if tensor.name == f"{self.rules.entry.tokens}.weight")

    def _positioned(self, hidden: Sheet) -> Sheet:
        """The learned position of each token of a sequence is added, whose gradient is summed over sequences."""
        ops, rule = self.ops, self.rules.entry
        length = self.sizes.setting.workload.seq // self.sizes.plans.cp // self.sizes.sp_ranks
        table = next(tensor for tensor in self.model.embedding if tensor.name == f"{rule.positions}.weight")
        value = ops.program.op(
            "position embedding",
            (),
            bytes_of(length * hidden.width, ops.dtype),
            made={"positions": bytes_of(length, "int64")},
            weights=ops.trained({"position embedding": bytes_of(table.numel + 0 * length, ops.dtype)}),
        )
        both = (hidden.value, value)
        return msgspec.structs.replace(
            hidden, value=ops.program.op("positions added", both, hidden.bytes(), first_over=True)
        )

    def _norm(self, name: str, module: str, x: Sheet) -> Sheet:
        if not module:
            return x
        weight, bias = self._has(module, "weight"), self._has(module, "bias")
        return norm(self.ops, name, self.rules.norm, x, weight=weight, bias=bias)

    def exit(self, hidden: Sheet) -> Sheet:
        """Hidden states to logits."""
        ops, rule = self.ops, self.rules.exit
        hidden = self._norm("final norm", rule.norm, hidden)
        if rule.project:
            hidden = ops.linear("output projection", hidden, self._table.shape[1])
        inside = self.exchange.enter("output layer", hidden)
        logits = ops.linear("output layer", inside, self.vocab, bias=self._has(rule.head, "bias"))
        if self.gathers:
            logits = self.exchange.whole_logits(logits, self.model.vocab_size)
        if rule.multiplier != 1.0:
            logits = ops.scale("logits: factor", logits)
        if rule.softcap is None:
            return logits
        ops.program.hold(logits.value)
        capped = ops.scale("logits: cap", ops.from_output("logits: tanh", ops.scale("logits over the cap", logits)))
        ops.program.drop(logits.value)
        return capped

    @property
    def gathers(self) -> bool:
        """The loss is computed on whole logits."""
        return self.exchange.cut and self.sizes.setting.profile.traffic.gathers_logits

    @property
    def logits(self) -> tuple[IntArray, Count]:
        """Rows and width of what the loss is given."""
        return self.sizes.tokens, self.model.vocab_size if self.gathers else self.vocab

    def loss(self, logits: Sheet) -> None:
        """Mean cross-entropy in fp32 over rows of logits; one with a name is of a model that gives its loss itself."""
        ops, setting = self.ops, self.sizes.setting
        if how := setting.scenario.loss:
            several = self.sizes.plans.mbs > 1
            elements = logits.rows * (logits.width + 0 * logits.rows)
            of = Logits(rows=logits.rows, elements=elements, dtype=logits.dtype, several=several)
            cross_entropy(ops.program, how, logits.value, of)
            return
        ops.program.hold(logits.value)
        if self.exchange.cut and not self.gathers:
            self._cut_loss(logits)
        else:
            wide = ops.cast("logits in fp32", logits, "fp32")
            result = ops.from_output("log-softmax", wide)
            ops.program.op("negative log-likelihood", result.value, 0, keeps=(result.value,))
        ops.program.drop(logits.value)

    def _cut_loss(self, logits: Sheet) -> None:
        """A copy in fp32 becomes the probabilities that are kept, and then their gradient.

        [runtime/parallelize/loss.py]
        """
        program, wide = self.ops.program, logits.bytes("fp32")
        made = {"index": bytes_of(logits.rows, "int64"), "own": bytes_of(logits.rows, "uint8")}
        scores = program.op("logits in fp32", logits.value, wide, passes=logits.dtype == "fp32")
        rows = bytes_of(logits.rows, "fp32")
        program.op("cross-entropy", scores, 0, keeps=(scores,), made=made, grad_into=scores, work=(rows, rows, rows))
