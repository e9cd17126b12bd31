"""On a card: the program holds, sends and computes what it does on a CPU, and what counts there agrees with CUDA."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from card_runs import errors
from trainledger.runtime.observe.observation import Observation
from trainledger.runtime.progress import Progress
from trainledger.runtime.run import run
from trainledger.runtime.spec import RunSpec
from trainledger.service import prove
from trainledger.service.prove_launch import How

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def card() -> Iterator[torch.device]:
    """The first CUDA device, with a process group of one rank on NCCL."""
    sys.path.insert(0, str(SCRIPTS))
    device = torch.device("cuda", 0)
    with importlib.import_module("cards.here").alone(device):
        yield device
    sys.path.remove(str(SCRIPTS))


def in_this_process(spec: RunSpec, how: How, progress: Progress | None) -> Sequence[Observation]:
    """Run the one rank of a plan here, on the device of the process group."""
    return [run(spec, progress or _unheard)]


def _unheard(done: int, total: int, text: str) -> None:
    """Nobody listens."""


# in 16 bits, for which the card has kernels of attention with grouped heads as the CPU has
@pytest.mark.parametrize(
    ("model", "precision", "zero"),
    [
        ("llama-3-8b", "bf16", 0),
        ("llama-3-8b", "bf16", 3),
        ("qwen3-8b", "fp16", 2),
        ("mixtral-8x7b", "bf16", 3),
        ("llama-3-8b", "fp8-tensorwise", 3),
    ],
)
def test_every_exact_line_of_one_rank_is_the_same_on_a_card(
    card: torch.device, model: str, precision: str, zero: int
) -> None:
    request = prove.Request(model=model, gpus=1, precision=precision, zero=zero)
    seen = prove.run(request, runner=in_this_process)
    differing = [line.id for line in seen.lines if line.verdict not in {"equal", "reported"}]
    assert not differing
    assert seen.unexplained.bytes == seen.unexplained.calls == 0
    assert len(seen.lines) > 50
    on_cpu = prove.run(request)
    assert seen.losses == pytest.approx(on_cpu.losses, rel=0.02)


def test_storages_of_a_block_are_what_the_allocator_has_given_out(card: torch.device) -> None:
    saved, sizes = (importlib.import_module(f"cards.{name}") for name in ("saved", "sizes"))
    subject = sizes.Subject(model="llama-3.2-1b", set=("num_hidden_layers=2",), seq=1024, mbs=1)
    rows = list(saved.rows_of(saved.Way(subject, "flash", False, "none"), card, sizes.CUDA))
    storages, allocator = (row.amount for row in rows)
    assert storages <= allocator <= 1.01 * storages


def test_products_in_fp8_are_those_of_their_operands_on_a_card(card: torch.device) -> None:
    assert all(0 < error < 0.1 for error in errors(card).values())
