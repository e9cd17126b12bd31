"""How the layers of a model fall on pipeline stages, by each engine's rule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainledger.errors import Refused
from trainledger.facts.model import Block, Model

EMPTY = ("filled", "filled_ends")
"""Splits that are refused where they leave a stage without a layer: the engine's pipeline fails there."""
SEARCH_ENDS = 1e-3
"""Loads that differ by less are one to DeepSpeed's search. [megatron-deepspeed: deepspeed/runtime/utils.py]"""


def layers_per_chunk(
    num_layers: int, chunks: int, split: str, layout: tuple[int, ...] = (), costs: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Layers of each virtual stage in pipeline order. `costs` is compute_costs(model), which balanced asks.

    divisible    equal, and refused otherwise [megatron: arguments.py]
    front        the first stages take one more
    less_ends    embedding and output count as a layer each, on the first and last stage [torchtitan: pipeline_parallel]
    middle       the first stage takes no more than its share, and the next ones one more [torchtitan-split]
    filled       each stage takes as much as the fullest needs, until there is no more [megatron-deepspeed]
    filled_ends  the same with embedding and output as a layer each [megatron-deepspeed: `type:transformer|embedding`]
    padded       the last stage, the first and those after it go one short of an equal share [zero-bubble-fork]
    balanced     a stage is closed once it has passed its share of the work [nanotron: src/nanotron/models/base.py]

    >>> layers_per_chunk(10, 4, "front"), layers_per_chunk(30, 4, "less_ends"), layers_per_chunk(10, 4, "middle")
    ((3, 3, 2, 2), (7, 8, 8, 7), (2, 3, 3, 2))
    >>> layers_per_chunk(10, 4, "filled"), layers_per_chunk(10, 4, "filled_ends"), layers_per_chunk(10, 4, "padded")
    ((3, 3, 3, 1), (2, 3, 3, 2), (2, 3, 3, 2))
    """
    if layout:
        if len(layout) != chunks or sum(layout) != num_layers or min(layout) < 0:
            raise Refused("pp-layout-adds-up", layout_fault(num_layers, chunks, layout))
        return layout
    if chunks == 1:
        return (num_layers,)
    match split:
        case "divisible" | "front" | "less_ends":
            return _shared(num_layers, chunks, split)
        case "middle":
            return _middle(num_layers, chunks)
        case "filled":
            return _filled(num_layers, chunks)
        case "filled_ends":
            return _without_ends(_filled(num_layers + 2, chunks))
        case "padded":
            return _padded(num_layers, chunks)
        case "balanced":
            return _balanced(costs, chunks)
        case _:
            raise AssertionError(f"no split is called {split!r}")


def _shared(num_layers: int, chunks: int, split: str) -> tuple[int, ...]:
    ends = 1 if split == "less_ends" else 0
    share, extra = divmod(num_layers + 2 * ends, chunks)
    if split == "divisible" and extra:
        raise Refused(
            "layers-divisible-by-pp",
            f"{num_layers} layers do not divide over pp x vpp = {chunks} stages (remainder {extra}); "
            "change pp or vpp, or give --pp-layout",
        )
    counts = tuple(share + (index < extra) for index in range(chunks))
    return _without_ends(counts) if ends else counts


def _without_ends(slots: tuple[int, ...]) -> tuple[int, ...]:
    """The layers in slots of which the very first is the embedding and the very last the output layer."""
    counts = list(slots)
    counts[0] -= 1
    counts[max(index for index, count in enumerate(slots) if count)] -= 1
    return tuple(counts)


def _middle(num_layers: int, chunks: int) -> tuple[int, ...]:
    share, extra = divmod(num_layers, chunks)
    return tuple(share + (1 <= index <= extra) for index in range(chunks))


def _filled(slots: int, chunks: int) -> tuple[int, ...]:
    """The smallest load that leaves no more than itself to the last stage, found by halving; a stage stays below it.

    It ends just above a whole number, which stages then take; or, rarely, on one, of which they take one less.
    """
    low, load = slots / chunks, float(slots)
    while load > low + SEARCH_ENDS:
        middle = low + (load - low) / 2
        if (chunks - 1) * (math.ceil(middle) - 1) + middle >= slots:
            load = middle
        else:
            low = middle + SEARCH_ENDS
    most = math.ceil(load) - 1
    counts = [max(min(most, slots - index * most), 0) for index in range(chunks)]
    counts[-1] = slots - sum(counts[:-1])
    return tuple(counts)


def _padded(num_layers: int, chunks: int) -> tuple[int, ...]:
    counts = [-(-num_layers // chunks)] * chunks
    for index in range(sum(counts) - num_layers):
        counts[index - 1] -= 1
    return tuple(counts)


def _balanced(costs: tuple[int, ...], chunks: int) -> tuple[int, ...]:
    """Greedy: the layer that passes the share is still taken, and the output layer counts as work at the end.

    Where that layer alone is more than a share it lands one stage early, behind which nothing but the loss is left; it
    is accounted on the last stage all the same.
    """
    counts = [0] * chunks
    stage, done, whole = 0, 0, sum(costs)
    for cost in costs[:-1]:
        counts[stage] += 1
        done += cost
        stage += done > whole * ((stage + 1) / chunks)
    return tuple(counts)


def compute_costs(model: Model) -> tuple[int, ...]:
    """Multiplications per token of each layer, and of the output layer last, as nanotron counts them.

    Matrices alone, keys and values as if each query head had its own: 4 h^2 + 3 h f of a gated block, V h of the
    output layer, its own or not. Routed experts, which it does not know, count as many as a token visits.
    [nanotron: src/nanotron/models/llama.py get_block_compute_costs]
    """
    costs = {layer: _block_cost(block, model.hidden_size) for block in model.blocks for layer in block.layers}
    layers = (costs.get(layer, 0) for layer in range(model.num_layers))
    return (*layers, model.vocab_size * model.hidden_size)


def _block_cost(block: Block, hidden: int) -> int:
    widths = 0
    if block.attention is not None:
        heads = block.attention.heads
        widths += 4 * heads * (hidden // heads)
    if block.mlp is not None:
        widths += (3 if block.mlp.gated else 2) * block.mlp.intermediate
    if block.moe is not None:
        visited = block.moe.top_k * block.moe.intermediate + block.moe.shared_intermediate
        widths += (3 if block.moe.gated else 2) * visited
    mixer = sum(tensor.numel for tensor in block.tensors if tensor.role == "ssm" and tensor.linear)
    return widths * hidden + mixer


def chunks_of(pp_stage: int, pp: int, vpp: int) -> range:
    """The chunks (virtual stages) of one pipeline stage, in order: chunk c runs on stage c mod pp.

    >>> list(chunks_of(1, pp=4, vpp=2))
    [1, 5]
    """
    return range(pp_stage, pp * vpp, pp)


def layers_of(chunk: int, per_chunk: Sequence[int]) -> range:
    """The layers of a chunk, by their index in the model.

    >>> list(layers_of(1, (3, 3, 2)))
    [3, 4, 5]
    """
    start = sum(per_chunk[:chunk])
    return range(start, start + per_chunk[chunk])


def layout_fault(num_layers: int, chunks: int, layout: tuple[int, ...]) -> str:
    """What is wrong with a layout that does not add up, in words."""
    return (
        f"--pp-layout {','.join(map(str, layout))} has {len(layout)} stages and {sum(layout)} layers; "
        f"the plan has pp x vpp = {chunks} stages and the model {num_layers} layers; give {chunks} numbers, not "
        f"negative, that add up to {num_layers}"
    )
