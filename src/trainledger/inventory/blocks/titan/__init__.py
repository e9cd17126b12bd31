"""How the parts of a torchtitan model run: FSDP2's units as PyTorch runs them, compiled block by block or not at all.

The embedding, the last norm and the output layer are never compiled; the loss is where its release compiles it.
[torchtitan: models/llama3/infra/parallelize.py]
"""

from __future__ import annotations

import msgspec

from trainledger.facts.model import Attention, Block
from trainledger.inventory.blocks.parts import Parts
from trainledger.inventory.blocks.sizes import Sizes
from trainledger.inventory.blocks.titan.attention import attention
from trainledger.inventory.blocks.titan.builder import Builder, unlike
from trainledger.inventory.blocks.titan.ends import embedding, final
from trainledger.inventory.blocks.titan.mlp import network
from trainledger.inventory.blocks.titan.moe import moe
from trainledger.inventory.blocks.titan.norm import norm
from trainledger.inventory.inventory import Inventory
from trainledger.inventory.tape import Tape, Value, walk

__all__ = ["parts", "unlike"]


def parts(inventory: Inventory, sizes: Sizes) -> Parts:
    """The parts under a Setting."""
    setting = sizes.setting
    how, every = setting.scenario.recompute, setting.recomputed_every
    how = "full" if every > 1 else how
    return Parts(
        embedding=embedding(sizes),
        blocks=tuple(_block(block, sizes, how) for _, block in inventory.layers),
        final=final(sizes),
        every=every,
        between=tuple(_block(block, sizes, "none") for _, block in inventory.layers) if every > 1 else (),
    )


def _block(block: Block, sizes: Sizes, recompute: str) -> Tape:
    build = Builder(sizes, compiled=sizes.setting.compiled, selective=recompute == "selective")
    x = build.program.input("input of the layer", sizes.residual)
    if recompute == "none":
        return walk(build.program, _layer(build, block, x))
    # around experts the parts are compiled one by one, inside a checkpoint that is not
    with build.recomputed(lazy=build.compiled and block.moe is None):
        output = _layer(build, block, x)
    return walk(build.program, output)


def _layer(build: Builder, block: Block, x: Value) -> Value:
    """Norm, branch and residual sum, once for attention and once for the network."""
    for part in (block.attention, block.mlp, block.moe):
        if part is None:
            continue
        name = "attention" if part is block.attention else "network"
        sizes = build.sizes
        normed = norm(build, f"{name} norm", x, sizes.residual, build.rows, sizes.hidden_size)
        whole = build.gathered(normed, f"input of the {name}")
        if block.attention is not None and part is block.attention:
            branch = attention(build, _without_bare_norms(block, block.attention), whole)
        elif block.mlp is not None and part is block.mlp:
            branch = network(build, whole, block.mlp.intermediate, sizes.tp)
        else:
            assert block.moe is not None
            branch = moe(build, block.moe, whole)
        given = build.scattered(branch, f"output of the {name}")
        x = build.program.op(f"residual after the {name}", (x, given), sizes.residual, passes=True)
    return x


def _without_bare_norms(block: Block, shape: Attention) -> Attention:
    """Its attention norms queries and keys where norms have weights; Llama 4's have none, and it has no code for them.

    [torchtitan: models/llama4/model.py, models/common/attention.py]
    """
    weighted = any(tensor.role == "norm" and tensor.name.startswith("self_attn.q") for tensor in block.tensors)
    return shape if weighted or not shape.qk_norm else msgspec.structs.replace(shape, qk_norm=False)
