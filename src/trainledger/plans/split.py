"""How the layers of a model fall on pipeline stages, by each engine's rule."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.errors import Refused


def layers_per_chunk(num_layers: int, chunks: int, split: str, layout: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of each virtual stage in pipeline order.

    divisible   equal, and refused otherwise [megatron: arguments.py]
    front       the first stages take one more
    less_ends   embedding and output count as a layer each, on the first and last stage [torchtitan: pipeline_parallel]

    >>> layers_per_chunk(10, 4, "front"), layers_per_chunk(30, 4, "less_ends")
    ((3, 3, 2, 2), (7, 8, 8, 7))
    """
    if layout:
        if len(layout) != chunks or sum(layout) != num_layers or min(layout) < 0:
            raise Refused("pp-layout-adds-up", layout_fault(num_layers, chunks, layout))
        return layout
    ends = 1 if split == "less_ends" and chunks > 1 else 0
    share, extra = divmod(num_layers + 2 * ends, chunks)
    if split == "divisible" and extra:
        raise Refused(
            "layers-divisible-by-pp",
            f"{num_layers} layers do not divide over pp x vpp = {chunks} stages (remainder {extra}); "
            "change pp or vpp, or give --pp-layout",
        )
    counts = [share + (index < extra) for index in range(chunks)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)


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
