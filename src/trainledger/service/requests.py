"""What a user can ask with: the flags, declared once, for the command line, PLAN files and an HTTP API alike.

A field's name with hyphens is its flag and its key in a PLAN file. None is "not given": defaults are applied when a
request is resolved, and printed with the answer, so that a PLAN file and flags can be laid over each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

Group = Literal["Input", "Model", "Place", "Workload", "Plan", "Data", "Run", "Answer"]
GROUPS: tuple[Group, ...] = get_args(Group)
"""Headings of the help, in its order."""


def flag(
    description: str,
    value: str = "",
    *,
    group: Group = "Plan",
    repeat: bool = False,
    positional: bool = False,
    hyphen: bool = False,
) -> Meta:
    """The description of a field.

    value        what help shows in place of the value; "" for a switch or a choice of words
    group        its heading in the help
    repeat       a tuple that is given value by value, not with commas
    positional   given without its name
    hyphen       the value may begin with a hyphen
    """
    extra: dict[str, Any] = {
        "value": value,
        "group": group,
        "repeat": repeat,
        "positional": positional,
        "hyphen": hyphen,
    }
    return Meta(description=description, extra=extra)


MODEL: Group = "Model"
PLACE: Group = "Place"
WORK: Group = "Workload"
DATA: Group = "Data"
RUN: Group = "Run"
ANSWER: Group = "Answer"
INPUT: Group = "Input"

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-1p", "zb-2p", "zero-bubble"]
Attention = Literal["flash", "eager"]
Switch = Literal["on", "off"]
CpComm = Literal["ring", "all_to_all", "all_gather"]
Offload = Literal["optimizer", "parameters", "activations"]


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Which model: by name, file or count, or by hand."""

    model: Annotated[
        str | None,
        flag(
            "A preset (`list models`), a config.json or its directory, either with :text_config for the decoder in it, "
            "ORG/NAME on the Hub, a parameter count such as 70B, a PLAN file (.toml), or custom with the sizes below.",
            "MODEL",
            group=MODEL,
            positional=True,
        ),
    ] = None
    set: Annotated[
        tuple[str, ...] | None,
        flag(
            "Change a key of the model's config before it is read; may be repeated.",
            "KEY=VALUE",
            repeat=True,
            group=MODEL,
        ),
    ] = None
    hidden: Annotated[int | None, flag("Hidden size of a custom model.", "N", group=MODEL)] = None
    layers: Annotated[int | None, flag("Layers of a custom model.", "N", group=MODEL)] = None
    heads: Annotated[int | None, flag("Attention heads of a custom model.", "N", group=MODEL)] = None
    kv_heads: Annotated[
        int | None, flag("Key and value heads of a custom model; as many as heads unless given.", "N", group=MODEL)
    ] = None
    ffn: Annotated[int | None, flag("Width of a custom model's gated feed-forward network.", "N", group=MODEL)] = None
    vocab: Annotated[int | None, flag("Vocabulary of a custom model.", "N", group=MODEL)] = None
    largest_layer: Annotated[
        int | None,
        flag("Parameters of the largest layer, which DeepSpeed's estimator asks [from the shapes].", "N", group=MODEL),
    ] = None


class RunRequest(ModelRequest, frozen=True, kw_only=True, rename="kebab"):
    """A training run: model, place, workload and everything of a plan but its zero_stage."""

    cluster: Annotated[
        str | None, flag("A cluster (`list clusters`) or a .toml file of your own.", "C", group=PLACE)
    ] = None
    gpu: Annotated[
        str | None, flag("An accelerator (`list accelerators`) or a .toml file of your own.", "CARD", group=PLACE)
    ] = None
    reserve: Annotated[
        str | None,
        flag('Memory of the card kept free on top, for others that use it, such as "4 GiB" [0].', "SIZE", group=PLACE),
    ] = None
    gpus: Annotated[
        int | None, flag("Ranks of the whole job; the product of the degrees unless given.", "N", group=PLACE)
    ] = None
    seq: Annotated[int | None, flag("Tokens of one sequence [4096].", "N", group=WORK)] = None
    gbs: Annotated[
        int | None,
        flag("Sequences per optimizer step of the whole job; one micro-batch per rank unless given.", "N", group=WORK),
    ] = None
    lora_rank: Annotated[int | None, flag("Train adapters of this rank and freeze the rest [0].", "N", group=WORK)] = (
        None
    )
    lora_targets: Annotated[
        tuple[str, ...] | None,
        flag("Layers that get an adapter [q_proj,v_proj], or all-linear.", "NAME,...", group=WORK),
    ] = None
    lora_dropout: Annotated[
        float | None, flag("Share of an adapter's input that is dropped while it trains [0].", "SHARE", group=WORK)
    ] = None
    qlora: Annotated[bool | None, flag("Hold the frozen weights of linear layers in 4 bits.", group=WORK)] = None
    frozen_copy: Annotated[
        int | None,
        flag("Further frozen copies of the model on the same ranks, such as a reference model [0].", "N", group=WORK),
    ] = None
    ema: Annotated[bool | None, flag("Keep a moving average of the trained parameters.", group=WORK)] = None
    mtp: Annotated[bool | None, flag("Train the multi-token-prediction layers too.", group=WORK)] = None

    tp: Annotated[int | None, flag("Tensor-parallel degree [1].", "N")] = None
    sp: Annotated[bool | None, flag("Sequence parallelism inside the TP group [on where tp > 1].")] = None
    pp: Annotated[int | None, flag("Pipeline stages [1].", "N")] = None
    vpp: Annotated[int | None, flag("Virtual stages per pipeline rank [1].", "N")] = None
    pp_layout: Annotated[
        tuple[int, ...] | None, flag("Layers of each (virtual) stage, in order [the engine's own split].", "N,N,...")
    ] = None
    cp: Annotated[int | None, flag("Context-parallel degree [1].", "N")] = None
    ep: Annotated[int | None, flag("Expert-parallel degree [1].", "N")] = None
    etp: Annotated[int | None, flag("Tensor-parallel degree of routed experts [the engine's own].", "N")] = None
    dp: Annotated[
        int | None, flag("Data-parallel degree: derived from the GPUs, and refused where it does not agree.", "N")
    ] = None
    dp_replicate: Annotated[int | None, flag("Replicas of the sharded group (HSDP) [1].", "N")] = None
    dp_shard: Annotated[int | None, flag("Ranks that a sharded state is divided over [dp / dp-replicate].", "N")] = None
    mbs: Annotated[int | None, flag("Sequences in one micro-batch [1].", "N")] = None
    recompute: Annotated[
        str | None,
        flag(
            "Which activations are computed again: none, full, selective, every-2 or uniform-2 and so on [full].", "HOW"
        ),
    ] = None
    recompute_parts: Annotated[
        tuple[str, ...] | None,
        flag("Parts of a block that selective recomputes, in the engine's words [its own choice].", "PART,..."),
    ] = None
    recompute_layers: Annotated[
        int | None, flag("Layers of each virtual stage, from its first, that full recomputes [all].", "N")
    ] = None
    loss: Annotated[str | None, flag("How the loss is computed, of the engine's ways [its own].", "NAME")] = None
    loss_chunks: Annotated[int | None, flag("Parts of a chunked loss [the engine's own].", "N")] = None
    routing: Annotated[
        str | None,
        flag("Tokens of one rank's experts: balanced, worst [balanced, with the worst as a bound].", "NAME"),
    ] = None
    allocator: Annotated[
        str | None,
        flag("How PyTorch's allocator grows: default, expandable [as the engine's launcher sets it].", "NAME"),
    ] = None
    compile: Annotated[Switch | None, flag("Whether torch.compile runs the blocks [the engine's own].")] = None
    dropout: Annotated[
        Switch | None,
        flag("Whether Megatron drops hidden states and scores out [as models of its kind are trained]."),
    ] = None
    schedule: Annotated[
        Schedule | None,
        flag(
            "Pipeline schedule, of those that the engine has: gpipe, 1f1b, interleaved, zb-h1, zb-1p, zb-2p, "
            "zero-bubble [1f1b].",
            "NAME",
        ),
    ] = None
    precision: Annotated[str | None, flag("Recipe of dtypes (`list precisions`) [bf16].", "RECIPE")] = None
    grad_dtype: Annotated[
        str | None, flag("Dtype that gradients are kept and reduced in [the engine's own].", "DTYPE")
    ] = None
    optimizer: Annotated[str | None, flag("Optimizer (`list optimizers`) [adamw].", "NAME")] = None
    frozen_dtype: Annotated[
        str | None, flag("Dtype of weights that do not train, beside adapters [the engine's own].", "DTYPE")
    ] = None
    reduce_bucket: Annotated[
        int | None, flag("Elements of DeepSpeed's gradient bucket; auto of Hugging Face is hidden squared [5e8].", "N")
    ] = None
    overlap_comm: Annotated[
        Switch | None,
        flag("DeepSpeed's overlap_comm, for which stages 1 and 2 have a second bucket [off there]."),
    ] = None
    offload: Annotated[
        tuple[Offload, ...] | None,
        flag("What lives in host memory: optimizer, parameters, activations, or none [none].", "WHAT,..."),
    ] = None
    attention: Annotated[
        Attention | None, flag("Whether attention scores are ever held in memory (eager) [flash].")
    ] = None
    cp_comm: Annotated[CpComm | None, flag("How context parallelism communicates [the engine's own].")] = None
    engine: Annotated[str | None, flag("Whose accounting (`list engines`) [paper].", "ENGINE")] = None
    framework_version: Annotated[str | None, flag("Release of the engine [the newest that was read].", "VERSION")] = (
        None
    )


class PlanRequest(RunRequest, frozen=True, kw_only=True, rename="kebab"):
    """A training run with one plan: every key that a PLAN file may have."""

    zero: Annotated[int | None, flag("ZeRO stage, 0 to 3 [what the engine does unless told].", "N")] = None
