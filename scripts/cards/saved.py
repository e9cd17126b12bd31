"""What one block keeps between forward and backward: counted, beside what the ledger says of it.

Blocks that run operation by operation are watched by the observer of a proof, which sees every storage. What a compiled
block keeps no dispatch mode can see; there the storages of all tensors that autograd saves are added up. On a card
PyTorch's allocator is asked as well, whose figure has its rounding, and the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from cards.here import forget, synchronize
from cards.record import Row
from cards.sizes import Kernel, Sizes, Subject
from trainledger.inventory.blocks import parts_of
from trainledger.lines import line_id
from trainledger.runtime.model import build_decoder, init_weights
from trainledger.runtime.observe.observer import Observer
from trainledger.runtime.parallelize.recompute import recomputed
from trainledger.runtime.tensors import Named
from trainledger.service.common import prepared
from trainledger.service.prove_plan import planned

SAVED = line_id("held", "activations", "saved for backward")
ROUNDED_BYTES = 512
"""The least that PyTorch's allocator gives out. [torch: c10/cuda/CUDACachingAllocator.cpp kMinBlockSize]"""
KERNELS: dict[Kernel, SDPBackend] = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


class Way(NamedTuple):
    """How a block is run."""

    subject: Subject
    kernel: Kernel
    compiled: bool
    recompute: Literal["none", "full"]

    @property
    def id(self) -> str:
        """As its rows begin."""
        run = "compiled" if self.compiled else "eager"
        return f"saved/{self.subject.model}/{self.kernel}/{run}/recompute {self.recompute}"


def ways(sizes: Sizes) -> Iterator[Way]:
    """All of them, those that are compiled last, since that takes longest; math compiled of the first model alone."""
    for compiled in (False, True):
        for subject in sizes.blocks:
            for kernel in KERNELS if not compiled or subject is sizes.blocks[0] else ("flash",):
                yield Way(subject, kernel, compiled, "none")
                yield Way(subject, kernel, compiled, "full")


class Block:
    """One layer of a model in bf16, and what a forward of it needs; `run` is the layer as it is run."""

    def __init__(self, way: Way, device: torch.device, backend: str) -> None:
        spec = planned(way.subject.request(recompute=way.recompute)).spec
        with device:
            decoder = build_decoder(spec.model, spec.config, layers=(0,), first=False, last=False)
        init_weights(decoder, spec.seed)
        decoder.bfloat16()
        (block,) = decoder.blocks.values()
        module = recomputed(block, spec)
        self.run = torch.compile(module, backend=backend) if way.compiled else module
        self.context = decoder.context(torch.arange(spec.seq, device=device), torch.bfloat16)
        shape = (way.subject.mbs, spec.seq, spec.model.hidden_size)
        generator = torch.Generator(device).manual_seed(spec.seed)
        drawn = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        self.leaf = drawn.requires_grad_()
        self.block: nn.Module = block

    def forward(self) -> Tensor:
        """A number to run backward from; neither input nor output of the block outlives it but for the backward."""
        # a tensor that needs gradients and was made here: a leaf would be held by its own accumulation
        hidden = self.leaf.clone()
        return self.run(hidden, self.context).sum()

    def named(self) -> Iterator[Named]:
        """What is there whether a backward comes or not."""
        yield Named("buffers", "input", self.leaf)
        yield from (Named("weights", name, weight) for name, weight in self.block.named_parameters())
        yield Named("buffers", "positions", self.context.positions)
        for name, table in self.context.tables.items():
            yield from (Named("buffers", f"table {name}", part) for part in table)
        yield from (Named("buffers", "mask", mask) for mask in self.context.masks.values())

    def settle(self) -> None:
        """Run forward and backward once: compilers compile, and libraries take their workspaces."""
        self.backward(self.forward())

    def backward(self, loss: Tensor) -> None:
        """Run it and drop the gradients, so that the next forward begins alike."""
        loss.backward()
        self.leaf.grad = None
        self.block.zero_grad(set_to_none=True)


def rows_of(way: Way, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The rows of one way, in bytes."""
    forget(device)
    predicted, why = _predicted(way)
    with sdpa_kernel(KERNELS[way.kernel]):
        block = Block(way, device, sizes.backend)
        block.settle()
        count: Callable[[Block], int] = by_hooks if way.compiled else by_observer
        meter = "saved tensors" if way.compiled else "storages"
        yield Row(id=f"{way.id}/{meter}", amount=count(block), unit="B", predicted=predicted, note=why)
        if device.type == "cuda":
            kept = by_allocator(block, device)
            more = f"{why}; what is measured has the allocator's rounding and {ROUNDED_BYTES} B of the loss"
            yield Row(id=f"{way.id}/allocator", amount=kept, unit="B", predicted=predicted, note=more)


def by_observer(block: Block) -> int:
    """Bytes of all storages that are alive after the loss, under no name."""
    observer = Observer({})
    with observer.watching(), observer.observing():
        loss = block.forward()
        observer.instant("loss", [*block.named(), Named("buffers", "loss", loss)])
        block.backward(loss)
    return next(int(line.amount) for line in observer.result(0, "", ()).reported if line.id == SAVED)


def by_hooks(block: Block) -> int:
    """Bytes of all storages that a saved tensor lies on, but for those that have a name."""
    known = {named.tensor.untyped_storage().data_ptr() for named in block.named()}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = block.forward()
    known.add(loss.untyped_storage().data_ptr())
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in kept)}
    block.backward(loss)
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


def by_allocator(block: Block, device: torch.device) -> int:
    """What PyTorch's allocator has given out more after the forward than before it."""
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    loss = block.forward()
    synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before
    block.backward(loss)
    return kept


def _predicted(way: Way) -> tuple[float | None, str]:
    """What the ledger says that a block keeps, or None and why it says nothing.

    A compiled block is that of torchtitan, in its newest release that was read; this package's own program compiles
    nothing.
    """
    words = {"recompute": way.recompute}
    if way.kernel == "math":
        return None, "no account has PyTorch's attention without a kernel"
    if way.compiled:
        words |= {"engine": "torchtitan", "compile": "on"}
    run, plans, inventory = prepared(way.subject.request(**words, **({"zero": 3} if way.compiled else {})))
    if way.compiled and any(block.moe is not None for block in run.setting.model.blocks):
        return None, "the account of compiled experts is of torchtitan's own"
    profile = run.setting.profile
    kept = float(parts_of(inventory, plans).blocks[0].saved[0])
    return kept, f"the account of {profile.name} {profile.framework_version}"
