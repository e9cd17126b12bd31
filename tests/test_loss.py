"""Cross-entropy as operations: the bytes per logit that each way of running it needs follow from them."""

import dataclasses

import numpy as np
import pytest

from strategies import dense, plan_of, setting_of
from trainledger.facts.workload import Workload
from trainledger.inventory.blocks import parts_of
from trainledger.inventory.blocks.loss import LOSSES, Logits, OutputLayer, cross_entropy, in_chunks
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Program, Tape, walk

ROWS, VOCABULARY = 64, 4096
LOGITS = ROWS * VOCABULARY
MODEL = dense(layers=1, vocab=65536)


def logits(rows: int = ROWS, dtype: str = "bf16") -> Logits:
    return Logits(rows=np.array([rows]), elements=np.array([rows * VOCABULARY]), dtype=dtype)


def whole(how: str, dtype: str = "bf16") -> Tape:
    """The output layer's other tensors take no room here."""
    program, of = Program(), logits(dtype=dtype)
    hidden = program.input("hidden", 0)
    cross_entropy(program, how, program.op("output layer", hidden, of.bytes()), of)
    return walk(program, None)


def per_logit(tape: Tape) -> tuple[float, float]:
    forward, backward = (float(tape.peak(phase)[0][0]) / LOGITS for phase in ("forward", "backward"))
    return forward, backward


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        ("eager", 10, 12),
        ("shifted", 12, 12),
        ("copied", 14, 12),
        ("compiled", 2, 4),
        ("parallel", 14, 16),
        ("compiled-parallel", 10, 6),
        ("vocab-parallel", 6, 6),
        ("native-fused", 6, 10),
        ("sharded", 8, 6),
        ("fused", 2, 2),
    ],
)
def test_bytes_per_logit(how: str, forward: float, backward: float) -> None:
    # what is kept per token is 9 or 12 bytes over 4096 entries of a vocabulary
    assert per_logit(whole(how)) == pytest.approx((forward, backward), abs=0.01)


def test_every_way_is_in_that_table() -> None:
    cut = {"parallel", "compiled-parallel", "vocab-parallel", "native-fused", "sharded"}
    assert set(LOSSES) == {"eager", "shifted", "copied", "compiled", "fused"} | cut


@pytest.mark.parametrize(("how", "kept"), [("eager", 4), ("compiled", 2), ("parallel", 4), ("fused", 2)])
def test_what_waits_for_the_backward(how: str, kept: float) -> None:
    assert float(whole(how).saved[0]) / LOGITS == pytest.approx(kept, abs=0.01)


def test_of_one_sequence_all_tokens_but_the_last_are_a_view() -> None:
    program, of = Program(), dataclasses.replace(logits(), several=np.array([False]))
    cross_entropy(program, "shifted", program.op("output layer", program.input("hidden", 0), of.bytes()), of)
    assert per_logit(walk(program, None))[0] == pytest.approx(8, abs=0.01)


def test_logits_in_fp32_are_not_copied() -> None:
    assert per_logit(whole("eager", "fp32")) == pytest.approx((8, 12), abs=0.01)
    assert per_logit(whole("vocab-parallel", "fp32")) == pytest.approx((4, 4), abs=0.01)


def test_the_caller_holds_16_bit_logits_until_the_loss_is_there() -> None:
    tape = whole("eager")
    at = tape.instants.index(("forward", "negative log-likelihood"))
    assert [(name, nbytes // LOGITS) for name, _, nbytes in tape.at(at)] == [
        ("logits in fp32", 4),
        ("log-softmax", 4),
        ("output layer", 2),
    ]
    assert "output layer" not in [name for name, _, _ in tape.at(at + 1)]


def chunked(how: str, chunks: int, layer: OutputLayer) -> Tape:
    program = Program()
    in_chunks(program, how, program.input("hidden", layer.hidden), logits(), layer, chunks)
    return walk(program, None)


@pytest.mark.parametrize("chunks", [2, 8])
@pytest.mark.parametrize(("how", "most"), [("eager", 12), ("compiled", 4), ("parallel", 16)])
def test_a_chunk_needs_its_part_and_the_loop_holds_its_logits(how: str, most: int, chunks: int) -> None:
    nothing = OutputLayer(hidden=0, hidden_sum=0)
    # compiled logits wait for the backward anyway; the others would have been let go before it
    held = 0 if how == "compiled" else 2
    forward, _ = per_logit(chunked(how, chunks, nothing))
    assert forward == pytest.approx((most + held) / chunks, abs=0.01)


def test_gradients_that_chunks_add_to_lie_beside_every_chunk() -> None:
    nothing = OutputLayer(hidden=0, hidden_sum=0)
    layer = OutputLayer(hidden=1000, hidden_sum=2000, gradient=500, gradient_sum=700)
    without, with_sums = chunked("compiled", 8, nothing), chunked("compiled", 8, layer)
    more = with_sums.peak("forward")[0] - without.peak("forward")[0]
    # hidden states, both sums, the chunk's own weight gradient and the gradient of its eighth of the hidden states, but
    # at the output layer's backward, where two statistics of the chunk's eight tokens are gone
    assert more.tolist() == [1000 + 2000 + 700 + 500 + 125 - 8 * 8]
    assert with_sums.handed.tolist() == [1000]
    assert with_sums.saved.tolist() == [1000]


def test_sizes_are_arrays_over_plans() -> None:
    program = Program()
    of = Logits(rows=np.array([1, 2]), elements=np.array([100, 400]), dtype="bf16")
    cross_entropy(program, "eager", program.op("output layer", program.input("hidden", 0), of.bytes()), of)
    assert walk(program, None).peak("backward")[0].tolist() == [1200, 4800]


@pytest.mark.parametrize(
    ("how", "forward"), [("", 10), ("eager", 10), ("shifted", 12), ("copied", 14), ("compiled", 2)]
)
def test_a_model_in_our_program_may_have_the_loss_of_another_release(how: str, forward: float) -> None:
    setting = setting_of(MODEL, Workload(seq=ROWS), engine="pytorch", precision="bf16-pure", loss=how)
    tape = parts_of(Inventory(setting), plan_of(zero_stage=0, mbs=2)).final
    elements = 2 * ROWS * MODEL.vocab_size
    most, _ = tape.peak("forward")
    assert float(most[0]) / elements == pytest.approx(forward, rel=0.01)
