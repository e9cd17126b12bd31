"""What verbs of the run book share: where it is, and what the ladder of a baseline can be asked."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from trainledger.service.prove_request import ProgramRequest
from trainledger.service.requests import INPUT, RUN, flag

BOOK = flag(
    "The run book: a file, made where there is none [trainledger.db in the user's data folder]; where nothing is "
    "written also what `baseline export` wrote (.json).",
    "FILE",
    group=INPUT,
)

ROUNDS, STEPS = 10, 30
"""Of each number of ranks, and steps of each of them: what a comparison needs, see docs/baselines.md."""
MOST_ROUNDS, MOST_STEPS = 1000, 100_000


class LadderRequest(ProgramRequest, frozen=True, kw_only=True, rename="kebab"):
    """A layout at several numbers of ranks."""

    ranks: Annotated[
        tuple[int, ...] | None,
        flag(
            "Numbers of ranks, each a multiple of tp x pp x cp: data parallelism is what changes, in place of --gpus "
            "and --dp [those of 1, 2, 4 and 8, or what --gpus, --dp or --dp-shard say].",
            "N,N,...",
            group=RUN,
        ),
    ] = None
    scaling: Annotated[
        Literal["weak", "strong"] | None,
        flag(
            "weak: --gbs is that of the fewest ranks and grows with them; strong: it is that of all [weak].", group=RUN
        ),
    ] = None
    shrink: Annotated[
        bool | None, flag("Make the model small first, by the rule of `prove`, once for all ranks.", group=RUN)
    ] = None
    rounds: Annotated[
        int | None, flag(f"Starts of the ranks at each number of them, which take turns [{ROUNDS}].", "N", group=RUN)
    ] = None
    steps: Annotated[
        int | None, flag(f"Steps on the clock in each round, after three that are not [{STEPS}].", "N", group=RUN)
    ] = None


class BookRequest(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Something of the run book."""

    book: Annotated[str | None, BOOK] = None
