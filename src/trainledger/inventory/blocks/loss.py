"""Cross-entropy as the operations that engines run: what is alive per logit follows from them.

Bytes per logit of this rank at the most, with logits in 16 bits:

  how             forward  backward  whose
  eager                10        12  PyTorch on `logits.float()`
  shifted              12        12  transformers before 4.45, which copies the logits of all tokens but the last
  copied               14        12  transformers 4.45 to 4.49, which casts them in the loss and then copies as before
  compiled              2         4  the first under torch.compile, in two kernels
  parallel             14        16  PyTorch's loss_parallel() over a cut vocabulary
  compiled-parallel    10         6  the same under torch.compile
  vocab-parallel        6         6  Megatron, native, not fused
  native-fused          6        10  Megatron, native, fused
  sharded               8         6  nanotron
  fused                 2         2  TransformerEngine

In k chunks, each of which runs forward and backward before the next, a k-th of these and 2/k for the logits that the
loop still holds. Losses over a cut vocabulary are given the logits of one rank, and count the same per logit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trainledger.arrays import IntArray, ceil_div
from trainledger.dtypes import bytes_of
from trainledger.inventory.tape import Bytes, Program, Value, nested, walk
from trainledger.inventory.tensors import BoolArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """The logits of one micro-batch on one rank.

    rows       [plans]: tokens
    elements   [plans]: rows times the part of the vocabulary that this rank computes
    dtype      of the output layer's result
    several    [plans]: whether there is more than one sequence, so that a slice of tokens of each is copied
    """

    rows: IntArray
    elements: IntArray
    dtype: str
    several: BoolArray | bool = True

    def bytes(self, dtype: str = "") -> IntArray:
        """[plans]: of as many elements, in the logits' own dtype unless another is named."""
        return bytes_of(self.elements, dtype or self.dtype)

    def per_row(self, *dtypes: str) -> IntArray:
        """[plans]: one value a token in each of these dtypes."""
        return sum((bytes_of(self.rows, dtype) for dtype in dtypes), 0 * self.rows)

    def chunk(self, chunks: int) -> Logits:
        """One of `chunks` equal parts along the tokens."""
        rows, elements = ceil_div(self.rows, chunks), ceil_div(self.elements, chunks)
        return dataclasses.replace(self, rows=rows, elements=elements)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputLayer:
    """What a loss in chunks has to know of the layer before it: bytes [plans].

    hidden             the hidden states that it reads
    hidden_sum         their gradient as chunks add to it
    gradient           of its weight, as one chunk's backward gives it
    gradient_sum       of its weight, as chunks add to it; 0: each chunk's is handed on at once
    """

    hidden: Bytes
    hidden_sum: Bytes
    gradient: Bytes = 0
    gradient_sum: Bytes = 0


LETS_GO = frozenset({"sharded", "shifted"})
"""Losses whose caller writes the fp32 copy over its own variable."""


def cross_entropy(program: Program, how: str, logits: Value, of: Logits) -> None:
    """Add the loss of `logits`, which whoever calls it holds until it returns."""
    if how not in LETS_GO:
        program.hold(logits)
    LOSSES[how](program, logits, of)
    if how not in LETS_GO:
        program.drop(logits)


def in_chunks(program: Program, how: str, hidden: Value, of: Logits, layer: OutputLayer, chunks: int) -> None:
    """Add output layer and loss, chunk by chunk: of each the backward follows at once, under the loop's own names.

    `how` is the loss of a chunk. [torchtitan: components/loss.py ChunkedLossWrapper]
    """
    part, inner = of.chunk(chunks), Program()
    piece = inner.input("hidden states of a chunk", ceil_div(layer.hidden, chunks))
    weights = {"gradient of the output layer": layer.gradient}
    logits = inner.op("output layer", piece, part.bytes(), keeps=(piece,), weights=weights)
    LOSSES[how](inner, logits, part)
    # the loop's variable is overwritten by the next chunk's logits, after that chunk's output layer has run
    inner.hold(logits, through_backward=True)
    summed = program.op("hidden gradient, summed", hidden, layer.hidden_sum, differentiable=False)
    head = program.op("output layer's gradient, summed", hidden, layer.gradient_sum, differentiable=False)
    nested(program, walk(inner, None), within=(hidden, summed, head))
    given = program.op("hidden gradient", summed, layer.hidden, differentiable=False)
    program.op("loss in chunks", (hidden, given), 0, keeps=(given,), grad_into=given)


def _in_fp32(program: Program, logits: Value, of: Logits) -> Value:
    """`logits.float()`, which copies unless they are in fp32 already."""
    if of.dtype == "fp32":
        return logits
    return program.op("logits in fp32", logits, of.bytes("fp32"))


def _eager(program: Program, logits: Value, of: Logits) -> None:
    """log_softmax keeps its result for both backwards, each of which makes a gradient. [torch: nn/functional.py]"""
    wide = _in_fp32(program, logits, of)
    program.hold(wide)
    result = program.op("log-softmax", wide, of.bytes("fp32"), keeps_output=True)
    program.op("negative log-likelihood", result, 0, keeps=(result,))
    program.drop(wide)


def _shifted(program: Program, logits: Value, of: Logits) -> None:
    """The fp32 copy is what the model gives; of all tokens but the last a copy is made. [transformers-2024]"""
    wide = _in_fp32(program, logits, of)
    program.hold(wide)
    taken = program.op("logits shifted", wide, of.bytes("fp32") * of.several)
    program.hold(taken)
    result = program.op("log-softmax", taken, of.bytes("fp32"), keeps_output=True)
    program.op("negative log-likelihood", result, 0, keeps=(result,))
    program.drop(taken, wide)


def _copied(program: Program, logits: Value, of: Logits) -> None:
    """The same inside the loss, while the model holds its own logits in 16 bits. [transformers-2025]"""
    _shifted(program, logits, of)


def _compiled(program: Program, logits: Value, of: Logits) -> None:
    """Two kernels: the first reads the logits for their maxima and sums, the second writes their gradient.

    What is cheap to compute again from what is kept anyway is not kept: of the fp32 tensors none is.
    """
    program.op("cross-entropy", logits, 0, keeps=(logits,), made={"maximum and log-sum": of.per_row("fp32", "fp32")})


def _parallel(program: Program, logits: Value, of: Logits) -> None:
    """The operations of a log-softmax one by one, and one backward for both.

    That backward holds the result, a gradient of zeros with the label's entry set, the result's exponentials and the
    sum of the two. [torch: distributed/tensor/parallel/loss.py]
    """
    each = of.bytes("fp32")
    wide = _in_fp32(program, logits, of)
    program.hold(wide)
    shifted = program.op("logits less their maximum", wide, each, passes=True)
    sums = program.op("sum of exponentials", shifted, of.per_row("fp32"), work=each, differentiable=False)
    result = program.op("log-softmax", (shifted, sums), each, keeps_output=True, passes=True)
    program.op("negative log-likelihood", result, 0, keeps=(result,), back_work=(each, each))
    program.drop(wide)


def _compiled_parallel(program: Program, logits: Value, of: Logits) -> None:
    """The sum of zeros with the label's entry set and of exponentials needs no gradient, so the forward makes it.

    Such an entry is set in a tensor of its own, and only the sum waits for the backward, which scales and casts it.
    [torch: as Inductor writes loss_parallel() of PyTorch 2.13]
    """
    each = of.bytes("fp32")
    made = {"gradient but for its factor": each}
    program.op("vocabulary-parallel cross-entropy, compiled", logits, 0, made=made, work=each)


def _vocab_parallel(program: Program, logits: Value, of: Logits) -> None:
    """Maximum and exponential work on the fp32 copy, which becomes the softmax that is kept and then its gradient.

    The gradient is cast to the dtype of the logits. [megatron: core/tensor_parallel/cross_entropy.py]
    """
    wide = _in_fp32(program, logits, of)
    made = {"labels within the part, and where": of.per_row("int64", "uint8")}
    program.op("vocabulary-parallel cross-entropy", wide, 0, keeps=(wide,), made=made, grad_into=wide)


def _native_fused(program: Program, logits: Value, of: Logits) -> None:
    """As Megatron's, each of its four functions compiled: the last one's casts the gradient itself.

    It sets the label's entry in a copy of the softmax, which the autograd function still keeps.
    [megatron: core/fusions/fused_cross_entropy.py calculate_gradients, as Inductor of PyTorch 2.13 writes it]
    """
    made = {"softmax in fp32": of.bytes("fp32"), "labels within the part, and where": of.per_row("int64", "uint8")}
    program.op("vocabulary-parallel cross-entropy, compiled", logits, 0, made=made, back_work=of.bytes("fp32"))


def _sharded(program: Program, logits: Value, of: Logits) -> None:
    """As Megatron's, but the maximum is subtracted into a copy while the caller still holds the fp32 logits.

    The 16-bit logits are let go before. [nanotron: tensor_parallel/functional.py]
    """
    wide = _in_fp32(program, logits, of)
    program.hold(wide)
    shifted = program.op("logits less their maximum", wide, of.bytes("fp32"), passes=True)
    made = {"labels within the part, and where": of.per_row("int64", "uint8")}
    program.op("sharded cross-entropy", shifted, 0, keeps=(shifted,), made=made, grad_into=shifted)
    program.drop(wide)


def _fused(program: Program, logits: Value, of: Logits) -> None:
    """One kernel writes the gradient over the logits. [te: triton/cross_entropy.py]"""
    program.op(
        "fused cross-entropy",
        logits,
        0,
        keeps=(logits,),
        work=of.per_row("fp32", "fp32", "fp32"),
        grad_into=logits,
    )


LOSSES: dict[str, Callable[[Program, Value, Logits], None]] = {
    "eager": _eager,
    "shifted": _shifted,
    "copied": _copied,
    "compiled": _compiled,
    "parallel": _parallel,
    "compiled-parallel": _compiled_parallel,
    "vocab-parallel": _vocab_parallel,
    "native-fused": _native_fused,
    "sharded": _sharded,
    "fused": _fused,
}
"""Losses of whole logits by the word of a profile's `memory.loss` and of --loss."""
