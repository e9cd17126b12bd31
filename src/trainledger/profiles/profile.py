"""An engine profile: what one engine, at one range of releases, keeps and sends. Data, read from TOML.

A profile answers for the states (which buffers exist under which zero_stage, in which dtype, cut how, alive when) and
for the traffic (which collectives in which dtype). It holds no formula.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from trainledger.arrays import IntArray
from trainledger.profiles.memory import MemoryRules
from trainledger.profiles.remark import Remark

Instant = Literal["rest", "loss", "backward", "step"]
INSTANTS: tuple[Instant, ...] = ("rest", "loss", "backward", "step")
"""Between steps; when the last activation of a micro-batch is saved; at the end of the last backward; in the step."""

Category = Literal["weights", "gradients", "optimizer", "buffers"]
CATEGORIES: tuple[Category, ...] = ("weights", "gradients", "optimizer", "buffers")
Cut = Literal["none", "even", "dim0", "tensor", "flat", "bucket", "unit", "flat_unit"]
Split = Literal["divisible", "front", "less_ends", "middle", "filled", "filled_ends", "padded", "balanced"]


Select = Literal[
    "trainable", "all", "linear", "persistent", "largest_unit", "largest_module", "largest_tensor", "bucket"
]


class StateRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of buffer.

    what          label, the last part of the line id when the buffer is one storage
    dtype         a dtype, or a word of the precision recipe (weight, grad, master, gathered ...), or "moments"
    zero          the zero_stages under which it exists
    sharded_from  the zero_stage from which it is divided; 0 always, 4 never
    cut           how it is cut and padded (plans/partition.py)
    select        trainable | all | linear (weight matrices in blocks) | persistent | largest_unit | largest_module |
                  largest_tensor (of the trained ones) | bucket (the elements of one communication bucket)
    cap           at most this many elements; -1: as many as a bucket of this setting has
    floor         of a largest unit: at least this many elements, where the stage holds that many
    per           one element for each `per` selected ones (block scales)
    copies        how many such buffers are alive at once
    alive         the instants; with `accumulates` also at the loss of every micro-batch but the first
    only_accumulating   exists only with more than one micro-batch per step
    wrapped             exists only where data parallelism wraps the model so (plans/sharding.py): ddp | unit | none
    grad, same_grad, precision, not_optimizer, pp, offload, non_tn   conditions: gradient dtypes, whether gradients
                  are kept in the dtype of the weights, recipes, optimizers that lack it, "1" or ">1" pipeline stages,
                  what is offloaded (not_offload: what must not be), and whether the card multiplies FP8 matrices in
                  every layout
    overlap       exists only where communication is said to overlap the backward (DeepSpeed's overlap_comm)
    place         device or host memory
    passing       it comes and goes within a step: where account/memory walks the step, its `passing` places it instead
    eager         moments that are made before the first step, not in it
    pinned        in page-locked host memory: as one storage, of at most `pinned_elements` where that is not 0, or each
                  tensor as its own
    basis, cite   how sure, and the key of data/references.toml
    """

    category: Category
    what: str
    dtype: str
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sharded_from: int = 4
    cut: Cut = "none"
    select: Select = "trainable"
    cap: int = 0
    floor: int = 0
    per: int = 1
    copies: int = 1
    alive: tuple[Instant, ...] = INSTANTS
    accumulates: bool = False
    only_accumulating: bool = False
    wrapped: Literal["", "ddp", "unit", "none"] = ""
    grad: tuple[str, ...] = ()
    same_grad: bool | None = None
    not_optimizer: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    pp: Literal["", "1", ">1"] = ""
    offload: str = ""
    not_offload: str = ""
    overlap: bool = False
    place: Literal["device", "host"] = "device"
    non_tn: bool | None = None
    passing: bool = False
    eager: bool = False
    pinned: Literal["", "one", "each"] = ""
    pinned_elements: int = 0
    basis: Literal["exact", "modelled", "calibrated", "assumed"] = "exact"
    cite: str = ""


class OutsideRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a run holds outside of its steady step: while it loads, or while it saves.

    what         label, with the engine's own switch where it is the user's choice
    place, per   device or host memory, of one rank or of all ranks of a node
    parts        what it is of, in rows like those of the states table
    whole        of the whole model; else of what one rank owns
    every        each rank of a node holds it, not one alone
    zero, quantised   conditions: zero_stages, with or without frozen weights in 4 bits
    basis, cite  how sure, and the key of data/references.toml
    """

    what: str
    when: Literal["load", "save"]
    place: Literal["device", "host"]
    parts: tuple[StateRow, ...]
    per: Literal["rank", "node"] = "rank"
    whole: bool = False
    every: bool = False
    zero: tuple[int, ...] = (0, 1, 2, 3)
    quantised: bool | None = None
    basis: Literal["exact", "modelled", "calibrated", "assumed"] = "exact"
    cite: str = ""


class Precision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dtypes of a recipe in this engine.

    weight, frozen         stored weights; those that do not train ("": as those that do)
    grad, sharded_grad     gradients as kept; where the engine divides them in another dtype, in that
    master                 the optimizer's copy; "" where it steps on the weights themselves
    gathered               what travels in a weight all-gather
    reduce                 what travels in a gradient reduction
    activation             saved activations and their collectives
    grad_choices           values that --grad-dtype may take
    fp8                    the recipe runs GEMMs in FP8 (or FP4)
    multiplied             dtype of the form in which a GEMM's input is kept for its backward; "": as activations are
    scale_block, scale_dtype   elements that share a scale in that form, and its dtype; 0: one for the tensor
    gemm_multiple          what both sides of a matrix that is multiplied in FP8 must be a multiple of
    full_master            the master copy stays whole whatever the optimizer could leave out
    accelerator_dtype      format of arithmetic that the card must have, where it is not that of the activations
    least_capability       CUDA compute capability from which the recipe runs; "": any
    scaled_loss            the loss is scaled, and each step all ranks of the job agree whether a gradient is not finite
    weight_scales          after each step scales of the weights that are gathered in FP8 are computed, all together
    """

    weight: str
    grad: str
    gathered: str
    reduce: str
    activation: str
    master: str = ""
    frozen: str = ""
    sharded_grad: str = ""
    grad_choices: tuple[str, ...] = ()
    fp8: bool = False
    multiplied: str = ""
    scale_block: int = 0
    scale_dtype: str = "fp32"
    gemm_multiple: int = 16
    full_master: bool = False
    accelerator_dtype: str = ""
    least_capability: str = ""
    scaled_loss: bool = False
    weight_scales: bool = False


class TrafficRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this engine communicates: the knobs of account/traffic/data.py and its neighbours.

    style                    which function of account/traffic/data.py counts the data-parallel calls
    tp_style                 megatron saves a layer's sharded input and gathers it again, dtensor keeps it gathered
    cp_comm, cp_choices      how context parallelism exchanges by default, and what --cp-comm may say
    recompute_reruns_last    recomputing a block repeats its last reduction; a checkpoint that stops early does not
    loss_all_reduces         tensor-parallel reductions of a loss over a cut vocabulary, per micro-batch
    gathers_logits           the loss is computed on logits that are gathered whole
    reduces_norms            with sp, gradients of what tp leaves whole are summed over the tp ranks once per step
    reduces_partial          the same of every whole tensor of which a rank has seen a part only, with or without sp,
                             after the reduction over data-parallel ranks: from zero_stage 1 on each sums its shards
    joins_parallel           attention and network of a parallel block share their tensor-parallel exchanges
    experts_in_region        without expert parallelism routed experts are cut like a dense network; else tokens travel
    regathers_kv             a backward under cp_comm all_gather gathers keys and values again
    rotates_kv               keys and values travel as one tensor, a hop is an all-to-all, and their gradients go round
                             in fp32 under either cp_comm; v of latent attention is padded to the width of k
    counts_tokens            ranks first tell each other how many tokens each of their experts will get, in int64
    bucket_elements          elements of one gradient bucket; 0: none
    keeps_received           a pipeline receives each micro-batch into buffers of its own, held for the whole run
    pipeline_keeps_gathered  in a pipeline weights are gathered and gradients reduced once per step
    final_unit_kept          what follows the last block stays gathered between forward and backward
    reduce_follows_grad      --grad-dtype is the dtype of reductions too
    replicas_by_unit         at zero_stage 0 each unit is reduced after every micro-batch; else once per step, in DDP's
                             buckets or, where DDP does not wrap the model, by unit
    shards_embedding         where both ends of a pipeline hold an embedding, each rank sums its shard of the gradient
    norm_all_reduces         all-reduces of one fp32 over the whole job by which gradients are clipped
    """

    style: Literal["paper", "ddp_fsdp2", "fsdp1", "deepspeed", "megatron", "nanotron"]
    tp_style: Literal["megatron", "dtensor"] = "megatron"
    cp_comm: Literal["ring", "all_to_all", "all_gather"] = "ring"
    cp_choices: tuple[str, ...] = ("ring", "all_to_all", "all_gather")
    recompute_reruns_last: bool = True
    loss_all_reduces: int = 3
    gathers_logits: bool = False
    keeps_received: bool = False
    reduces_norms: bool = False
    reduces_partial: bool = False
    joins_parallel: bool = True
    experts_in_region: bool = False
    regathers_kv: bool = False
    rotates_kv: bool = False
    counts_tokens: bool = False
    bucket_elements: int = 0
    pipeline_keeps_gathered: bool = False
    final_unit_kept: bool = False
    reduce_follows_grad: bool = True
    replicas_by_unit: bool = False
    shards_embedding: bool = False
    norm_all_reduces: int = 0


class Offload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keeping something in host memory: possible from zero_stage `zero`; moves whole categories where no row says.

    needs   what must be offloaded too
    cites   keys of data/references.toml, where no row of the states table has them
    pinned  of the categories that it moves, those that lie in page-locked memory, each tensor a storage
    """

    zero: int
    moves: tuple[Category, ...] = ()
    pinned: tuple[Category, ...] = ()
    needs: str = ""
    cites: tuple[str, ...] = ()


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One engine at one range of releases.

    framework_version   the release that was read; `from_version` <= release < `before_version` use this file
    released            days of releases by their numbers, where the files of an engine are ranges of days
    zero_stages, axes   what the engine can run: an axis missing here must be 1
    zero_default        the zero_stage of its own default config, where there are ranks to share; -1: its lowest
    vocab_multiple      the vocabulary is padded to a multiple of this times tp; 0: not padded
    kv_replication      KV heads are copied where tp exceeds them
    etp_default         expert tensor parallelism: "tp" follows tp, "tp_without_ep" does so where ep is 1, "1"
    split               how layers fall on pipeline stages: a word of plans/split.py
    schedules           in what order a pipeline may work
    experts_stacked     routed experts are one tensor [experts, ...] that is cut along the experts first
    vectors_by_expert   stacked vectors of experts are cut along the experts even where more ranks share them
    loss_dtypes         dtypes alive per logit at the loss
    activations         activations belong to the account; an estimator that knows none prints a total without them
    memory              how its peak is found
    outside             what it holds while it loads and saves
    offload             what may live in host memory, and from which zero_stage
    persistent_elements  ZeRO-3 keeps parameters of up to this size gathered
    lora                adapters are accounted for
    lacks               parts of a block that the engine has no code for: experts, latent attention, state-space mixers
    shards_quantised    4-bit frozen weights are divided like others
    kbit_fp32           what stays unquantised beside them is cast to fp32 unless told; else it has the recipe's dtype
    optimizer_alias     the entry of optimizers.toml that a name stands for in this engine
    optimizer_master    dtype of the master copy under optimizers that keep it in fewer bits
    counts_steps        optimizers that keep a step count of one fp32 for each tensor; on CUDA some keep it on the host,
                        so only the account of one rank's storages has them
    whole_blocks        block-quantised optimizer state needs whole blocks, and each 8-bit tensor has a table [torchao]
    """

    name: str
    framework: str
    framework_version: str
    source: str
    zero_stages: tuple[int, ...]
    zero_default: int = -1
    axes: tuple[str, ...]
    optimizers: tuple[str, ...]
    precision: dict[str, Precision]
    state: tuple[StateRow, ...]
    traffic: TrafficRules
    memory: MemoryRules = MemoryRules()
    outside: tuple[OutsideRow, ...] = ()
    from_version: str = ""
    before_version: str = ""
    released: dict[str, str] = {}
    vocab_multiple: int = 0
    kv_replication: bool = False
    etp_default: Literal["tp", "tp_without_ep", "1"] = "1"
    split: Split = "front"
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    experts_stacked: bool = False
    vectors_by_expert: bool = False
    loss_dtypes: tuple[str, ...] = ()
    activations: bool = True
    offload: dict[str, Offload] = {}
    persistent_elements: int = 0
    lora: bool = True
    lacks: tuple[Literal["experts", "latent attention", "state-space mixers"], ...] = ()
    shards_quantised: bool = True
    kbit_fp32: bool = True
    optimizer_master: dict[str, str] = {}
    optimizer_alias: dict[str, str] = {}
    counts_steps: tuple[str, ...] = ()
    whole_blocks: bool = False
    notes: tuple[Remark, ...] = ()

    @property
    def zero_unsaid(self) -> int:
        """The zero_stage of a run whose user says nothing."""
        return self.zero_default if self.zero_default >= 0 else min(self.zero_stages)

    def default_etp(self, tp: IntArray, ep: IntArray) -> IntArray:
        """Expert tensor parallelism where none is asked for."""
        if self.etp_default == "tp":
            return tp
        if self.etp_default == "tp_without_ep":
            return np.where(ep == 1, tp, 1)
        return np.ones_like(tp)


class Moment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One state tensor of an optimizer, per trained tensor.

    dtype    a dtype, or "master": that of the copy that is stepped on
    layout   full | block (codes with a scale per `block` elements) | factored (a row and a column of each matrix)
    least    tensors of fewer elements are not quantised
    select   all | matrix (weight matrices inside blocks) | rest (all others)
    """

    what: str
    dtype: str
    layout: Literal["full", "block", "factored"] = "full"
    block: int = 0
    least: int = 0
    select: Literal["all", "matrix", "rest"] = "all"


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an optimizer keeps per trained element."""

    source: str
    moments: tuple[Moment, ...]
