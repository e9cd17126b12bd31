"""How an engine's step is walked for its peak: the table `memory` of a profile."""

from __future__ import annotations

from typing import Literal

import msgspec


class MemoryRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this engine's step is walked for its peak.

    blocks           the manner of inventory/blocks in which parts of the model run
    passing          which class of account/memory/engines says what passes
    unit_gradients   gradients of weights lie beside activations until their layer has run backward; else in a buffer
    regathers        a matrix keeps this rank's part of its input's tokens and gathers the others again (nanotron)
    compile          on | off: torch.compile of blocks unless --compile says; "" where the engine has none
    compiled_loss    the loss by default with compiled blocks; "": it stays as it is
    cut_loss         the same over a vocabulary that tensor parallelism cuts; "": it stays as it is
    loss_chunks      parts of a chunked loss
    norm             RMS norms outside of compiled blocks: fused in one kernel; ATen's steps; own steps of the engine
    fused_qkv        queries, keys and values are the result of one matrix
    no_sync          gradients of several micro-batches add up whole, and are reduced with the last
    outputs_held     the loop has what the model gave in a variable, logits included, until the model gives more
    copies_kv        keys and values are copied for each query head before attention
    dropout          its launcher may say whether hidden states and scores are dropped out
    autocast         each product casts what it is given as it runs, so adapters are kept, and given theirs, in fp32
    reentrant        recomputed layers run behind a reentrant checkpoint that is outside of their wrapper
    keeps_4bit_input  a 4-bit matrix keeps what it multiplies, as bitsandbytes before 0.43.2 did: "step", until the loss
                     is let go of with the step; "steps", until the next one is there, for the loop has it in a variable
    experts_batched  a batched product over each token's rows weighs what experts give; else it is weighed row by row
    selective_keeps  results that a checkpoint which chooses by operation keeps beside those of every second matrix:
                     flash, cudnn (of the attention kernels of that name), reduce_scatter, all_to_all
    cudnn_from       compute capability from which cuDNN's attention runs; "": never
    ends_together    the embedding and what follows the last block are gathered and reduced at once, and stay gathered
    last_block_kept  the last block stays gathered between forward and backward
    workspace_bytes  scratch memory of libraries, allocated once in the device's pool and kept: calibrated
    beside           the entry of data/measured/meters.toml for context and communicators; "": today's of the vendor
    communicators    groups that have one beside every axis and the world: model (tp x pp), tied, neighbour
    loss, losses     how the loss is computed by default, and what else --loss may say (inventory/blocks/loss.py)
    recomputes       parts of a block that --recompute-parts may name
    selective        those that --recompute selective stands for by itself
    recompute_layers  full recomputation may be of the first layers of each virtual stage alone
    recompute_uniform  it may be of regions of several layers, each of which keeps the input of its first alone
    recompute_every  it may be of every N-th layer alone
    allocator        how its launcher has PyTorch's allocator grow
    allocator_nodes  the same of its launcher for several nodes; "": as for one
    first_step       the source that says that an optimizer makes its moments in its first step; "": nobody read it
    device           it runs on cards, beside context and communicators; else it "fits" by what is allocated, on paper
    """

    blocks: str = "plain"
    passing: str = "none"
    unit_gradients: bool = False
    regathers: bool = False
    compile: Literal["", "on", "off"] = ""
    compiled_loss: str = ""
    cut_loss: str = ""
    loss_chunks: int = 8
    norm: Literal["fused", "steps", "own"] = "fused"
    fused_qkv: bool = False
    no_sync: bool = False
    outputs_held: bool = False
    copies_kv: bool = False
    dropout: bool = False
    autocast: bool = False
    reentrant: bool = False
    keeps_4bit_input: Literal["", "step", "steps"] = ""
    experts_batched: bool = False
    selective_keeps: tuple[str, ...] = ()
    cudnn_from: str = ""
    ends_together: bool = False
    last_block_kept: bool = False
    workspace_bytes: int = 0
    beside: str = ""
    communicators: tuple[Literal["model", "tied", "neighbour"], ...] = ()
    loss: str = ""
    losses: tuple[str, ...] = ()
    recomputes: tuple[str, ...] = ()
    selective: tuple[str, ...] = ()
    recompute_layers: bool = False
    recompute_uniform: bool = False
    recompute_every: bool = False
    device: bool = True
    allocator: Literal["default", "expandable"] = "default"
    allocator_nodes: Literal["", "default", "expandable"] = ""
    first_step: str = ""
