"""Starting values that depend on the name of a parameter and the seed alone, however the model is cut."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from trainledger.runtime.model.decoder import Decoder
from trainledger.runtime.model.norms import Norm
from trainledger.runtime.model.tree import Stack


def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill the parameters of a whole or cut decoder, before they are sharded.

    Matrices, tables and bare parameters are normal with the decoder's spread, biases zero, norms the identity. Each
    expert of a stack is drawn on its own, by its index.
    """
    quiet: dict[int, float] = {}
    stacks: set[int] = set()
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Norm):
                quiet[id(parameter)] = 1.0 if name == "weight" and not module.rule.plus_one else 0.0
            elif name == "bias" or name.endswith("_bias"):
                quiet[id(parameter)] = 0.0
            if isinstance(module, Stack) or parameter.dim() == 3:
                stacks.add(id(parameter))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if id(parameter) in quiet:
                parameter.fill_(quiet[id(parameter)])
            elif id(parameter) in stacks:
                for index, part in enumerate(parameter):
                    _draw(part, f"{name}#{index}", seed, decoder.spread)
            else:
                _draw(parameter, name, seed, decoder.spread)


def _draw(target: Tensor, name: str, seed: int, spread: float) -> None:
    # the CPU generator looks at 32 bits of its seed only, so both go into one checksum
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    drawn = torch.randn(target.shape, generator=generator, dtype=torch.float32, device="cpu")
    target.copy_(drawn * spread)
