"""What is run on each kind of device: on a card sizes that models have, on a CPU as little as shows that it runs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from trainledger.service.prove_request import Request

Kernel = Literal["flash", "math"]


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model, perhaps with keys of its config changed, and one micro-batch for it."""

    model: str
    set: tuple[str, ...]
    seq: int
    mbs: int

    def request(self, **words: Any) -> Request:  # noqa: ANN401  # flags of a plan
        """The plan of one rank that trains it, at these sizes."""
        given: dict[str, Any] = {"engine": "pytorch", "precision": "bf16", "recompute": "none", "zero": 0, **words}
        return Request(
            model=self.model,
            set=self.set or None,
            seq=self.seq,
            mbs=self.mbs,
            gbs=self.mbs,
            gpus=1,
            full_size=True,
            **given,
        )


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """All that is measured on a device.

    blocks       models of which one block's saved tensors are counted
    trained      the model of peaks and steps
    gemm_model   whose matrices are multiplied, by `gemm_rows` tokens
    backend      what compiles a block
    pairs        steps of each recipe that are timed in turns, and times that every product is
    least_s      of one timed stretch of products: what it takes to begin and end is then small beside it
    """

    blocks: tuple[Subject, ...]
    trained: Subject
    gemm_model: str
    gemm_set: tuple[str, ...]
    gemm_rows: int
    backend: str
    pairs: int
    least_s: float


CUDA = Sizes(
    blocks=(
        Subject(model="llama-3.2-1b", set=(), seq=4096, mbs=1),
        Subject(model="qwen3-1.7b", set=(), seq=4096, mbs=1),
        Subject(
            model="mixtral-8x7b",
            set=("hidden_size=1024", "intermediate_size=3584", "num_attention_heads=8", "num_key_value_heads=2"),
            seq=4096,
            mbs=1,
        ),
    ),
    # the widths of an 8B model, as many layers and tokens of the vocabulary as two copies leave room for on 80 GB
    trained=Subject(model="llama-3-8b", set=("num_hidden_layers=4", "vocab_size=32768"), seq=4096, mbs=1),
    gemm_model="llama-3-8b",
    gemm_set=(),
    gemm_rows=8192,
    backend="inductor",
    pairs=11,
    least_s=0.005,
)

_SMALL = ("num_hidden_layers=2", "hidden_size=64", "num_attention_heads=4", "num_key_value_heads=2", "vocab_size=128")
CPU = Sizes(
    blocks=(
        Subject(model="llama-3.2-1b", set=(*_SMALL, "intermediate_size=96", "head_dim=16"), seq=64, mbs=2),
        Subject(model="qwen3-1.7b", set=(*_SMALL, "intermediate_size=96", "head_dim=16"), seq=64, mbs=2),
        Subject(model="mixtral-8x7b", set=(*_SMALL, "intermediate_size=96"), seq=64, mbs=2),
    ),
    trained=Subject(model="llama-3-8b", set=(*_SMALL, "intermediate_size=96"), seq=64, mbs=2),
    gemm_model="llama-3-8b",
    gemm_set=(*_SMALL, "intermediate_size=96"),
    gemm_rows=32,
    # inductor's partition of what is kept and what is computed again, without a compiler of C++
    backend="aot_eager_decomp_partition",
    pairs=3,
    least_s=0.0005,
)

SIZES: dict[str, Sizes] = {"cuda": CUDA, "cpu": CPU}
"""By the type of a device."""
