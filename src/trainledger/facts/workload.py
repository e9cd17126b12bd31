"""What the user fixes before any layout is chosen: sequence, batch, and which parameters train."""

from __future__ import annotations

import msgspec

from trainledger.errors import BadInput, UsageError

DEFAULT_SEQ = 4096
LORA_DEFAULT_TARGETS = ("q_proj", "v_proj")


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed half of a run.

    seq           tokens of one sequence
    gbs           sequences per optimizer step over the whole job; None: one micro-batch per data-parallel rank
    lora_rank     0: full fine-tuning or pre-training; else the rank of every adapter
    lora_targets  last parts of the linear layers that get an adapter ("q_proj"), or "all-linear"
    lora_dropout  the share of an adapter's input that is dropped; its mask waits for the backward where it is not 0
    qlora         the frozen linear weights inside blocks are stored in 4 bits
    frozen_copy   further weight-only copies of the model held on the same ranks (a DPO reference model: 1)
    ema           keep an exponential moving average of the trained parameters
    mtp           train the model's multi-token-prediction layers too
    """

    seq: int = DEFAULT_SEQ
    gbs: int | None = None
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = LORA_DEFAULT_TARGETS
    lora_dropout: float = 0.0
    qlora: bool = False
    frozen_copy: int = 0
    ema: bool = False
    mtp: bool = False

    def checked(self) -> Workload:
        """This workload, or the error that names what is wrong with it."""
        for flag, value, least in (
            ("seq", self.seq, 1),
            ("gbs", self.gbs, 1),
            ("lora-rank", self.lora_rank, 0),
            ("frozen-copy", self.frozen_copy, 0),
        ):
            if value is not None and value < least:
                raise BadInput(f"--{flag} is {value}: it must be at least {least}")
        if self.lora_dropout and self.lora_rank == 0:
            raise UsageError("--lora-dropout without --lora-rank drops nothing: add --lora-rank, such as 16")
        if self.qlora and self.lora_rank == 0:
            raise UsageError("--qlora freezes the 4-bit weights, so nothing would train: add --lora-rank, such as 16")
        if not 0 <= self.lora_dropout < 1:
            raise BadInput(f"--lora-dropout is {self.lora_dropout:g}: it must be 0 or more and less than 1")
        if not self.lora_targets:
            raise BadInput("--lora-targets is empty: name linear layers such as q_proj, or all-linear")
        return self
