"""What `prove` can be asked: every flag of a plan, and how it is run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from trainledger.service.requests import ANSWER, RUN, WORK, PlanRequest, flag

Again = Literal["none", "full"]

DEFAULTS: dict[str, Any] = {"engine": "pytorch", "precision": "fp32", "recompute": "none", "zero": 0}
"""Of the flags of a plan, where verbs that run it differ from others: what needs the least of a machine."""

CLUSTER_ARGS = flag(
    "Start the ranks by torchrun with these arguments of its own, as one text, instead of forking them here.",
    "ARGS",
    group=RUN,
    hyphen=True,
)
TIMEOUT = flag("Seconds after which a run is ended [600].", "N", group=RUN)


class ProgramRequest(PlanRequest, frozen=True, kw_only=True, rename="kebab"):
    """A plan that this package's own program runs, and how: what verbs that run something share."""

    seq: Annotated[
        int | None, flag("Tokens of one sequence [4096, or what learned positions allow].", "N", group=WORK)
    ] = None
    gbs: Annotated[
        int | None,
        flag("Sequences per optimizer step [two micro-batches per pipeline stage and rank].", "N", group=WORK),
    ] = None
    recompute: Annotated[Again | None, flag("Which activations are computed again [none].")] = None
    precision: Annotated[str | None, flag("Recipe of dtypes: fp32 or bf16 [fp32].", "RECIPE")] = None
    engine: Annotated[str | None, flag("Whose accounting: that of this package's program [pytorch].", "ENGINE")] = None
    zero: Annotated[int | None, flag("ZeRO stage, 0 to 3 [0].", "N")] = None
    seed: Annotated[int | None, flag("Seed of weights and tokens [0].", "N", group=RUN)] = None
    early_stop: Annotated[
        bool | None,
        flag("A recomputed block stops at the last tensor that its backward needs [on, as in PyTorch].", group=RUN),
    ] = None
    loss_parallel: Annotated[
        bool | None, flag("Under --tp, compute the loss on the cut vocabulary [on].", group=RUN)
    ] = None
    clip_norm: Annotated[
        float | None, flag("Scale gradients down to this global norm; 0 leaves them alone [1.0].", "X", group=RUN)
    ] = None
    cluster_args: Annotated[str | None, CLUSTER_ARGS] = None
    timeout: Annotated[int | None, TIMEOUT] = None


class Request(ProgramRequest, frozen=True, kw_only=True, rename="kebab"):
    """Run the plan on this machine, at sizes that fit it, and compare every line of its ledger with what is measured.

    The plan must be legal at the sizes that were asked for; then the model is shrunken, by a rule that the answer says.
    """

    dry: Annotated[
        bool | None, flag("Run no ranks: a dry run with fake tensors and a fake process group.", group=RUN)
    ] = None
    full_size: Annotated[
        bool | None, flag("Run the model, the sequence and the batch as they are, and do not shrink them.", group=RUN)
    ] = None
    checkpoint: Annotated[
        bool | None, flag("Save a checkpoint too, and compare the tensors in its files with their line.", group=RUN)
    ] = None
    steps: Annotated[int | None, flag("Optimizer steps; the last one is measured [3].", "N", group=RUN)] = None
    all: Annotated[bool | None, flag("Print equal lines too; --json has them always.", group=ANSWER)] = None
