"""One plan as the checklist looks at it: its ledger, what other plans would hold, and what a run is told beside."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import numpy as np

from trainledger.account.flop import step_flop
from trainledger.account.ledger import Entry, entry
from trainledger.account.memory import Memory, StageMemory, memory_of
from trainledger.account.memory.outside import Outside
from trainledger.account.memory.outside.first import first_step
from trainledger.account.memory.outside.rows import from_profile
from trainledger.errors import BadInput, MissingFact
from trainledger.inventory.inventory import Inventory
from trainledger.lines import Line
from trainledger.plans.plan import Plans, make_plans
from trainledger.plans.setting import NODE_GPUS, Setting
from trainledger.profiles.profile import Category, Instant
from trainledger.rules import REFUSALS, passing
from trainledger.search.change import Change, smallest_change

STATES: tuple[Category, ...] = ("weights", "gradients", "optimizer")
PHASES: tuple[tuple[str, Instant], ...] = (
    ("loading", "rest"),
    ("the first backward", "backward"),
    ("the first optimizer step", "step"),
)
"""When states come to be, and the instant at which they are there."""
MARGIN = 0.1
"""Of usable memory: what a plan should leave free, for what no account has. [meter residuals: docs/accuracy.md]"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a run is told beside its plan; None where nobody said.

    loss_scaling    whether losses are scaled before their backward
    initial_scale   by how much, at first
    tokens          the budget of the whole run
    baselines       those of this layout in the run book `book`; None where there is no book
    """

    learning_rate: float | None = None
    loss_scaling: bool | None = None
    initial_scale: float | None = None
    tokens: int | None = None
    usd_per_gpu_hour: float | None = None
    baselines: int | None = None
    book: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """A single plan that every refusal lets pass. What costs time is worked out when it is first asked for."""

    inventory: Inventory
    plans: Plans
    told: Told = Told()

    @property
    def setting(self) -> Setting:
        """Model, workload, scenario, card and cluster."""
        return self.inventory.setting

    @cached_property
    def row(self) -> dict[str, int]:
        """The plan as integers."""
        return self.plans.row(0)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of sharded states."""
        return self.row["dp_shard"] * self.row["cp"]

    @property
    def usable(self) -> int | None:
        """What "fits" is judged against; None without a card."""
        return self.setting.usable_bytes

    @cached_property
    def entry(self) -> Entry:
        """The ledger."""
        return entry(self.inventory, self.plans)

    @property
    def stages(self) -> StageMemory:
        """Every place of its step."""
        return self.entry.stages

    @cached_property
    def memory(self) -> Memory:
        """Its meters, and what is alive where most is held."""
        return memory_of(self.inventory, self.plans, self.stages)

    @property
    def device(self) -> int:
        """What the device meter shows; of an accounting on paper, what is allocated."""
        return self.memory.meters.get("device", self.memory.meters["allocated"]).estimate

    @cached_property
    def outside(self) -> tuple[Outside, ...]:
        """What the run holds while it loads and saves."""
        return tuple(line for line in from_profile(self.inventory, self.entry.own) if line.amount)

    @cached_property
    def first(self) -> Outside | None:
        """What its first forward and backward hold; None where its engine makes all states before."""
        return next(iter(first_step(self.inventory, self.entry.own, self.stages)), None)

    @cached_property
    def change(self) -> Change | None:
        """The smallest single change that makes the plan fit."""
        row, gbs = self.row, self.setting.workload.gbs
        batch = row["num_microbatches"] * row["mbs"] * int(self.plans.dp[0])
        return smallest_change(self.setting, self.plans, gbs or batch)

    @property
    def fits(self) -> bool | None:
        """Whether the card holds it; None without a card."""
        return self.device <= self.usable if self.usable is not None else None

    @property
    def roomy(self) -> bool:
        """Whether a card is known and holds it with the margin. The lower bound that costs nothing is asked first."""
        if self.usable is None:
            return False
        most = self.usable * (1 - MARGIN)
        return int(self.stages.device[0]) <= most and self.device <= most

    @property
    def nodes_crossed(self) -> bool:
        """Whether ranks that share states are further apart than fast links reach; a node has eight where unsaid."""
        cluster = self.setting.cluster
        near = cluster.scale_up_domain if cluster is not None else NODE_GPUS
        return self.row["tp"] * self.shards > near

    @cached_property
    def least_step_s(self) -> float | None:
        """Seconds that a step's arithmetic takes at the card's peak, on the busiest rank; None where not known."""
        card, recipe = self.setting.accelerator, self.setting.recipe
        if card is None or self.setting.model.states_alone:
            return None
        try:
            peak = card.peak_flop_per_s(recipe.accelerator_dtype or recipe.activation)
            done = step_flop(self.inventory, self.plans)
        except (BadInput, MissingFact):
            return None
        return float(np.sum(list(done.values()), axis=0).max()) / peak

    def held(self, category: Category, instant: Instant) -> int:
        """Bytes of a category of states at an instant, on the stage that has most of it."""
        return int(self.stages.states.held[category, instant].max())

    def states(self, instant: Instant) -> int:
        """Weights, gradients and optimizer at an instant, on the stage that has most of them."""
        there = self.stages.states.held
        return int(np.sum([there[category, instant] for category in STATES], axis=0).max())

    @cached_property
    def overfull(self) -> tuple[str, Instant] | None:
        """When states alone are more than the card has; None where they never are, or no card is known."""
        usable = self.usable
        if usable is None:
            return None
        return next(((phase, instant) for phase, instant in PHASES if self.states(instant) > usable), None)

    def lines(self, begins: str, holds: str = "") -> list[Line]:
        """Lines of the ledger by how their ids begin and what they hold."""
        return [line for line in self.entry.lines if line.id.startswith(begins) and holds in line.id]

    def instead(self, scenario: dict[str, object] | None = None, **columns: int) -> Account | None:
        """The same run with some of its plan changed; None where a rule refuses it."""
        setting = self.setting.under(**scenario) if scenario else self.setting
        plans = make_plans({**self.row, **columns})
        if setting.precision is None or not passing(REFUSALS, setting, plans).all():
            return None
        return Account(inventory=Inventory(setting), plans=plans, told=self.told)
