"""Everything that is fixed while plans vary: the one argument that rules and accounts share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from trainledger.facts.model import PRODUCT_LIMIT, Model
from trainledger.facts.workload import Workload
from trainledger.plans.limits import between, check_reserve, check_scenario
from trainledger.plans.plan import Scenario
from trainledger.profiles import load_optimizer, load_profile
from trainledger.profiles.profile import Category, Optimizer, Precision, Profile

if TYPE_CHECKING:
    from trainledger.facts.cluster import Accelerator, Cluster

NODE_GPUS = 8
"""Cards of a node where no cluster is named: what launchers start unless they are told."""

EVERY = "every-"
"""Begins a word of --recompute that ends in a number of layers."""
MOST_DIGITS = 6
"""Of that number: no model has a million layers."""
UNIFORM = "uniform-"
"""Begins the word for regions of so many layers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Model, workload and scenario with what they name looked up.

    reserve_bytes           memory of the card kept free for others; all that the run takes has lines, its context too
    largest_module_params   parameters of the largest single layer, where a count alone was given (estimators ask it)
    """

    model: Model
    workload: Workload
    scenario: Scenario
    profile: Profile
    optimizer: Optimizer
    accelerator: Accelerator | None = None
    cluster: Cluster | None = None
    largest_module_params: int = 0
    reserve_bytes: int = 0

    @property
    def precision(self) -> Precision | None:
        """The recipe in this engine; None where the profile lacks it (rule `engine-precision` refuses that)."""
        return self.profile.precision.get(self.scenario.precision)

    @property
    def recipe(self) -> Precision:
        """The recipe, once rules have passed."""
        return self.profile.precision[self.scenario.precision]

    @property
    def casts(self) -> bool:
        """Whether a wrapper gives what is multiplied in another dtype than the weights that are kept.

        Adapters are cast where they are applied, beside weights that are frozen in the product's dtype. [peft-lora]
        """
        return self.recipe.gathered != self.recipe.weight and not self.workload.lora_rank

    @property
    def prepared(self) -> bool:
        """Whether what stays unquantised beside 4-bit weights is cast to fp32. [peft: prepare_model_for_kbit_training]

        It is if nothing is told; not where the engine casts the whole module itself, or all is in 16 bits.
        """
        recipe = self.recipe
        pure = recipe.weight == recipe.activation and not recipe.master
        return self.workload.qlora and not self.scenario.frozen_dtype and self.profile.kbit_fp32 and not pure

    @property
    def stream(self) -> str:
        """Dtype of hidden states between layers: an embedding in fp32 gives them so, and nothing casts them back."""
        wide = self.prepared and self.profile.memory.autocast
        return "fp32" if wide else self.recipe.activation

    @property
    def usable_bytes(self) -> int | None:
        """What "fits" is judged against: the card's usable memory less the reserve; None without a card."""
        return self.accelerator.usable_bytes - self.reserve_bytes if self.accelerator is not None else None

    def under(self, **changes: object) -> Setting:
        """The same setting with categories of its scenario changed; the engine stays."""
        scenario = msgspec.structs.replace(self.scenario, **changes)
        return dataclasses.replace(self, scenario=scenario, optimizer=_optimizer(self.profile, scenario))

    @property
    def bucket_elements(self) -> int:
        """Elements of one gradient bucket: the scenario's, or the engine's default."""
        return self.scenario.reduce_bucket or self.profile.traffic.bucket_elements

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """The parts of a block that are recomputed; full stands for all of it."""
        match self.scenario.recompute:
            case "full":
                return ("full",)
            case "selective":
                return self.scenario.recompute_parts or self.profile.memory.selective
            case _:
                return ("full",) if self.recomputed_region > 1 else ()

    @property
    def recomputes_all(self) -> bool:
        """Whether layers are recomputed whole, each by itself or regions of several; every so-manieth alone is not."""
        return self.scenario.recompute == "full" or self.recomputed_region > 1

    @property
    def recomputed_region(self) -> int:
        """Layers that are recomputed together, of which the first alone keeps its input: N of uniform-N, else 1."""
        word = self.scenario.recompute
        count = word.removeprefix(UNIFORM) if word.startswith(UNIFORM) else ""
        return int(count) if count.isascii() and count.isdigit() and len(count) <= MOST_DIGITS else 1

    def allocator(self, gpus: int) -> str:
        """How PyTorch's allocator grows: as the scenario says, or as the engine's launcher sets it where a card can.

        Engines have a launcher for one node and another for several; a node that is not known has eight cards.
        """
        if self.scenario.allocator or not self.maps_memory:
            return self.scenario.allocator or "default"
        rules = self.profile.memory
        node = self.cluster.gpus_per_node if self.cluster is not None else NODE_GPUS
        return rules.allocator_nodes if gpus > node and rules.allocator_nodes else rules.allocator

    @property
    def maps_memory(self) -> bool:
        """Whether segments can grow: ROCm's caching allocator had no expandable ones. [rocm-expandable]"""
        return self.accelerator is None or self.accelerator.vendor != "amd"

    @property
    def loss(self) -> str:
        """How the loss is computed: as the scenario says, or the engine's default."""
        return self.scenario.loss or self.profile.memory.loss

    @property
    def attention_kernel(self) -> str:
        """Which kernel attends: cuDNN's from a compute capability on, where a release says so, else flash attention."""
        card, least = self.accelerator, self.profile.memory.cudnn_from
        newer = card is not None and bool(least) and card.capability >= tuple(map(int, least.split(".")))
        return "cudnn" if newer else "flash"

    @property
    def cp_comm(self) -> str:
        """How context parallelism exchanges: as the scenario says, or the engine's default."""
        return self.scenario.cp_comm or self.profile.traffic.cp_comm

    @property
    def compiled(self) -> bool:
        """Whether torch.compile runs the blocks."""
        return (self.scenario.compile or self.profile.memory.compile) == "on"

    @property
    def recomputed_every(self) -> int:
        """Every so-manieth layer is recomputed where --recompute says every-N, else 1."""
        return int(self.scenario.recompute.removeprefix(EVERY)) if self.scenario.recompute.startswith(EVERY) else 1

    def loss_of(self, *, cut: bool) -> str:
        """How the loss runs, by a word of inventory/blocks/loss.py or chunked; `cut`: tp cuts the vocabulary."""
        return "chunked" if self.scenario.loss == "chunked" else self.whole_loss(cut=cut)

    def whole_loss(self, *, cut: bool) -> str:
        """The same of logits that are all there, or of those of one chunk."""
        rules = self.profile.memory
        chosen = "" if self.scenario.loss == "chunked" else self.scenario.loss
        how = chosen or (rules.compiled_loss if self.compiled else "")
        if how and how == rules.compiled_loss and cut and rules.cut_loss:
            return f"{how}-{rules.cut_loss}"
        return how or (rules.cut_loss if cut and rules.cut_loss else rules.loss)

    def loss_word(self, *, cut: bool) -> str:
        """What --loss says to have it so: a compiled loss is one word, whether tp cuts the vocabulary or not."""
        how, compiled = self.loss_of(cut=cut), self.profile.memory.compiled_loss
        return compiled if compiled and how.startswith(f"{compiled}-") else how

    @property
    def loss_chunks(self) -> int:
        """Parts of a chunked loss."""
        return self.scenario.loss_chunks or self.profile.memory.loss_chunks

    @property
    def offload_moves(self) -> tuple[tuple[Category, ...], ...]:
        """The categories that each offload of the scenario moves whole."""
        places = self.profile.offload
        return tuple(places[place].moves for place in self.scenario.offload if place in places)

    def dtype(self, word: str) -> str:
        """The dtype that a word of the recipe stands for; a dtype stands for itself; "" is nothing kept.

        --grad-dtype replaces the dtype of gradients as kept and accumulated, and as reduced where the engine does so.
        """
        recipe = self.recipe
        chosen = self.scenario.grad_dtype
        if word in ("grad", "sharded_grad") and chosen:
            return chosen
        match word:
            case "weight" | "grad" | "gathered" | "activation":
                return str(getattr(recipe, word))
            case "reduce":
                return chosen if chosen and self.profile.traffic.reduce_follows_grad else recipe.reduce
            case "sharded_grad":
                return recipe.sharded_grad or recipe.grad
            case "unsharded_grad":
                return recipe.reduce
            case "frozen":
                return self.scenario.frozen_dtype or recipe.frozen or recipe.weight
            case "master":
                kept = self.profile.optimizer_master.get(self.scenario.optimizer, "")
                reduced = kept and recipe.master and recipe.weight == "bf16" and not recipe.full_master
                return kept if reduced else recipe.master
            case "stepped":
                return recipe.master or recipe.weight
            case _:
                return word


def _optimizer(profile: Profile, scenario: Scenario) -> Optimizer:
    return load_optimizer(profile.optimizer_alias.get(scenario.optimizer, scenario.optimizer))


def make_setting(
    model: Model,
    workload: Workload,
    scenario: Scenario,
    *,
    accelerator: Accelerator | None = None,
    cluster: Cluster | None = None,
    largest_module_params: int = 0,
    reserve_bytes: int = 0,
) -> Setting:
    """Look up the engine and the optimizer; raises UnknownName for either, and BadInput for numbers beyond count."""
    check_scenario(scenario)
    between("largest-layer", largest_module_params, 0, PRODUCT_LIMIT >> 8)
    if accelerator is not None:
        check_reserve(reserve_bytes, accelerator.name, accelerator.usable_bytes)
    profile = load_profile(scenario.engine, scenario.framework_version)
    return Setting(
        model=model,
        workload=workload.checked(),
        scenario=scenario,
        profile=profile,
        optimizer=_optimizer(profile, scenario),
        accelerator=accelerator,
        cluster=cluster,
        largest_module_params=largest_module_params,
        reserve_bytes=reserve_bytes,
    )
