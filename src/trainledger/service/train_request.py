"""What `train` can be asked: every flag of a plan, the text, and how it is learned."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trainledger.runtime.train.spec import Action
from trainledger.service.prove_request import ProgramRequest
from trainledger.service.requests import DATA, MODEL, RUN, WORK, flag


class Request(ProgramRequest, frozen=True, kw_only=True, rename="kebab"):
    """Train a model: the plan of CONFIG, run on this machine or by torchrun, with checkpoints and a report.

    A CONFIG is a PLAN file with two more tables, [data] and [run], whose keys are the flags under those headings. What
    is given on the command line goes before it.
    """

    model: Annotated[
        str | None, flag("A CONFIG (.toml), or MODEL as of other verbs.", "CONFIG", group=MODEL, positional=True)
    ] = None
    gbs: Annotated[
        int | None,
        flag("Sequences per optimizer step [two micro-batches per pipeline stage and rank].", "N", group=WORK),
    ] = None
    text: Annotated[
        tuple[str, ...] | None, flag("A text to learn; may be repeated.", "FILE", group=DATA, repeat=True)
    ] = None
    tokenizer: Annotated[
        str | None, flag("A tokenizer.json, or bytes: a token is a byte [bytes].", "FILE", group=DATA)
    ] = None
    held_out: Annotated[
        float | None, flag("The share of each text that is held out, and never learned [0.05].", "SHARE", group=DATA)
    ] = None
    tokens: Annotated[
        str | None, flag("A file of tokens that was prepared before, in place of text.", "FILE", group=DATA)
    ] = None
    held_out_tokens: Annotated[
        str | None, flag("The file of those that are held out [the one beside --tokens].", "FILE", group=DATA)
    ] = None

    out: Annotated[
        str | None, flag("The run folder, which all nodes see [runs/ and the name of CONFIG].", "FOLDER", group=RUN)
    ] = None
    resume: Annotated[
        bool | None, flag("Go on after the newest good checkpoint of the run folder, in whatever layout.", group=RUN)
    ] = None
    steps: Annotated[int | None, flag("Optimizer steps of the whole run.", "N", group=RUN)] = None
    learning_rate: Annotated[float | None, flag("The highest learning rate [0.001].", "X", group=RUN)] = None
    min_learning_rate: Annotated[
        float | None, flag("What the rate falls to, along a cosine [a tenth of the highest].", "X", group=RUN)
    ] = None
    warmup: Annotated[int | None, flag("Steps in which the rate rises [0].", "N", group=RUN)] = None
    weight_decay: Annotated[float | None, flag("Decoupled weight decay of AdamW [0].", "X", group=RUN)] = None
    eval_every: Annotated[
        int | None, flag("Steps between held-out losses; 0: at the end alone [a tenth of the steps].", "N", group=RUN)
    ] = None
    eval_sequences: Annotated[
        int | None, flag("Held-out sequences that are judged by; 0: all of them [0].", "N", group=RUN)
    ] = None
    checkpoint_every: Annotated[
        int | None, flag("Steps between checkpoints; 0: at the end alone [a tenth of the steps].", "N", group=RUN)
    ] = None
    keep_last: Annotated[int | None, flag("Good checkpoints that are kept [3].", "N", group=RUN)] = None
    asynchronous: Annotated[bool | None, flag("Write checkpoints while training goes on [on].", group=RUN)] = (
        msgspec.field(default=None, name="async")
    )
    spike_factor: Annotated[
        float | None,
        flag("End the run at a loss above so many times the median before it; 0: never [3].", "X", group=RUN),
    ] = None
    spike_window: Annotated[int | None, flag("Steps of which that median is [50].", "N", group=RUN)] = None
    initial_scale: Annotated[float | None, flag("Under fp16, what the loss is scaled by at first.", "X", group=RUN)] = (
        None
    )
    scale_growth_interval: Annotated[
        int | None, flag("Steps without an infinity after which the scale doubles.", "N", group=RUN)
    ] = None
    minimum_scale: Annotated[
        float | None, flag("An infinity at this scale ends the run: no smaller one is tried.", "X", group=RUN)
    ] = None
    fp8_saturated: Annotated[
        float | None,
        flag("Share of an operand of a layer that casts to FP8 may clamp [0.01].", "SHARE", group=RUN),
    ] = None
    fp8_flushed: Annotated[
        float | None, flag("Share that casts to FP8 may turn into zero [0.1].", "SHARE", group=RUN)
    ] = None
    fp8_action: Annotated[
        Action | None, flag("What follows beyond: say it, let the layer compute in bf16, or stop [warn].", group=RUN)
    ] = None
    fp8_every: Annotated[int | None, flag("Steps between two counts of casts; 0: none [10].", "N", group=RUN)] = None
    timeout: Annotated[int | None, flag("Seconds after which a run is ended [a week].", "N", group=RUN)] = None
