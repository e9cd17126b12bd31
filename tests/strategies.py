"""Small models, plans and hypothesis strategies that the tests of states, traffic and rules share, and an oracle.

The oracle says in plain integers, tensor by tensor, what one rank owns before any sharding. It shares no code with the
arrays that it checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache

from hypothesis import strategies as st

from trainledger.account.memory import stage_memory
from trainledger.account.shares import shares
from trainledger.account.states import state_account
from trainledger.account.traffic import all_traffic
from trainledger.facts.by_hand import model_by_hand
from trainledger.facts.families import model_from_config
from trainledger.facts.model import Model, Tensor
from trainledger.facts.model_load import load_model
from trainledger.facts.workload import Workload
from trainledger.inventory.inventory import Inventory
from trainledger.plans.plan import Plans, Scenario, make_plans
from trainledger.plans.setting import Setting, make_setting
from trainledger.profiles.profile import CATEGORIES, INSTANTS, Category, Instant
from trainledger.rules import REFUSALS, passing

ENGINES = ("paper", "pytorch", "torchtitan", "deepspeed", "megatron")


@lru_cache(maxsize=32)
def dense(
    hidden: int = 64,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    ffn: int = 96,
    vocab: int = 211,
    *,
    tied: bool = False,
) -> Model:
    """A Llama of a few thousand parameters; the vocabulary is a prime."""
    return model_by_hand(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, tied=tied, name="dense"
    )


@lru_cache(maxsize=8)
def routed(experts: int = 8, layers: int = 4) -> Model:
    """A Mixtral of a few thousand parameters."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": experts,
        "vocab_size": 211,
    }
    return load_model("mixtral-8x7b", overrides={key: str(value) for key, value in sizes.items()})


def convolving(layers: int = 4) -> Model:
    """An LFM2 of a few thousand parameters: some of its layers have no account of what they keep."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 211}
    kinds = ["conv", "full_attention"] * (layers // 2)
    config = {"model_type": "lfm2", **sizes, "num_hidden_layers": layers, "layer_types": kinds}
    return model_from_config(config, name="convolving", source="")


@lru_cache(maxsize=1)
def latent() -> Model:
    """A DeepSeek-V3 of a few thousand parameters: latent attention, shared and routed experts, one MTP depth."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "vocab_size": 211,
    }
    return load_model("deepseek-v3", overrides={key: str(value) for key, value in sizes.items()})


@lru_cache(maxsize=1)
def tiny() -> Model:
    """The decoder of 869,504 parameters that was trained on CPU ranks to measure PyTorch."""
    return model_by_hand(hidden=128, layers=4, heads=4, kv_heads=2, ffn=352, vocab=512, name="tiny")


@lru_cache(maxsize=2)
def llama(size: str) -> Model:
    """Llama 3 at its real shapes: "8b" or "70b"."""
    return load_model(f"llama-3-{size}")


def setting_of(model: Model, workload: Workload | None = None, /, **scenario: object) -> Setting:
    """A setting from keywords of Scenario."""
    return make_setting(model, workload or Workload(), Scenario(**scenario))  # type: ignore[arg-type]


def plan_of(**columns: object) -> Plans:
    """Plans from keywords."""
    return make_plans(columns)


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes of one plan on the stage named: by (category, instant), and in host memory."""

    bytes: Mapping[tuple[Category, Instant], int]
    host: int

    def at(self, instant: Instant) -> int:
        """Every category at one instant."""
        return sum(self.bytes[category, instant] for category in CATEGORIES)

    def of(self, category: Category) -> int:
        """A category at its own largest."""
        return max(self.bytes[category, instant] for instant in INSTANTS)


def held(setting: Setting, pp_stage: int = 0, /, **columns: object) -> Held:
    """The states of one plan."""
    account = state_account(Inventory(setting), plan_of(**columns))
    row = int(account.index[0])
    where = account.pp_stage[row].tolist().index(pp_stage)
    found = {key: int(array[row, where]) for key, array in account.held.items()}
    return Held(bytes=found, host=int(account.host[row, where]))


def state_rows(setting: Setting, plans: Plans) -> list[list[tuple[int, ...]]]:
    """Per plan and stage row: every category at every instant, host, and activations, as plain integers."""
    inventory = Inventory(setting)
    account = state_account(inventory, plans)
    activations = stage_memory(inventory, plans).saved
    out: list[list[tuple[int, ...]]] = []
    for plan in range(len(plans)):
        row = int(account.index[plan])
        rows = [
            (
                int(account.pp_stage[row, stage]),
                *(int(account.held[c, i][row, stage]) for c in CATEGORIES for i in INSTANTS),
                int(account.host[row, stage]),
                int(activations[plan, stage]),
            )
            for stage in range(account.pp_stage.shape[1])
        ]
        out.append([entry for entry in rows if any(entry[1:])])
    return out


@dataclasses.dataclass(frozen=True)
class Owned:
    """A tensor as one rank owns it, `times` over: rows x rest, layers and local experts multiplied out."""

    tensor: Tensor
    rows: int
    rest: int
    times: int

    @property
    def numel(self) -> int:
        """Elements of one."""
        return self.rows * self.rest

    @property
    def expert(self) -> bool:
        """A routed expert, cut and averaged over groups of its own."""
        return self.tensor.role == "expert"


def owned(
    model: Model,
    *,
    tp: int = 1,
    etp: int | None = None,
    ep: int = 1,
    vocab_multiple: int = 0,
    layers: range | None = None,
    ends: tuple[bool, bool] = (True, True),
) -> list[Owned]:
    """What rank 0 of a tensor and expert parallel group owns of `layers` and, by `ends`, of embedding and head."""
    whole = range(model.num_layers) if layers is None else layers
    pieces = [(tensor, 1) for tensor in model.embedding] if ends[0] else []
    for block in model.blocks:
        times = len(set(block.layers) & set(whole))
        pieces += [(tensor, times) for tensor in block.tensors if times]
    pieces += [(tensor, 1) for tensor in model.final] if ends[1] else []
    return [_cut(tensor, times, tp, tp if etp is None else etp, ep, vocab_multiple) for tensor, times in pieces]


def _cut(tensor: Tensor, times: int, tp: int, etp: int, ep: int, vocab_multiple: int) -> Owned:
    over = etp if tensor.role == "expert" else tp
    rows, rest = tensor.shape[0], tensor.numel // tensor.shape[0]
    if vocab_multiple and tensor.role in ("embedding", "head") and tensor.tp_dim == 0:
        rows = -(-rows // (vocab_multiple * tp)) * vocab_multiple * tp
    if tensor.tp_dim is not None:
        length = rows if tensor.tp_dim == 0 else rest
        units = tensor.tp_units or length
        kept = -(-units // over) * (length // units)
        rows, rest = (kept, rest) if tensor.tp_dim == 0 else (rows, kept)
    copies = -(-tensor.copies // ep) if tensor.role == "expert" else tensor.copies
    return Owned(tensor=tensor, rows=rows, rest=rest, times=times * copies)


def elements(tensors: list[Owned], *, expert: bool | None = None) -> int:
    """Elements of the dense ones, of the experts, or of all."""
    return sum(t.numel * t.times for t in tensors if expert is None or t.expert == expert)


def up(amount: int, multiple: int) -> int:
    """The smallest multiple not below amount."""
    return -(-amount // multiple) * multiple


def small_models() -> st.SearchStrategy[Model]:
    """Models of every kind of block, with sizes that divide badly."""
    plain = st.builds(
        dense,
        hidden=st.sampled_from((24, 40, 64)),
        layers=st.integers(1, 7),
        heads=st.just(8),
        kv_heads=st.sampled_from((1, 2, 4, 8)),
        ffn=st.sampled_from((17, 96, 101)),
        vocab=st.sampled_from((1, 3, 127, 211, 256)),
        tied=st.booleans(),
    )
    return plain | st.builds(routed, experts=st.sampled_from((3, 8)), layers=st.integers(1, 5)) | st.just(latent())


def columns() -> st.SearchStrategy[dict[str, int]]:
    """One plan's columns, legal or not."""
    small = st.sampled_from((1, 2, 3, 4, 8))
    return st.fixed_dictionaries(
        {
            "tp": st.sampled_from((1, 2, 4, 8)),
            "sp": st.integers(0, 1),
            "pp": st.sampled_from((1, 2, 3)),
            "vpp": st.sampled_from((1, 2)),
            "cp": st.sampled_from((1, 2, 4)),
            "ep": st.sampled_from((1, 2, 4)),
            "etp": st.sampled_from((1, 2)),
            "dp_replicate": st.sampled_from((1, 2)),
            "dp_shard": st.sampled_from((1, 2, 3, 7, 8, 64)),
            "zero_stage": st.integers(0, 3),
            "mbs": small,
            "num_microbatches": small,
        }
    )


def mended(setting: Setting, row: dict[str, int]) -> dict[str, int]:
    """The row with what its engine and model plainly refuse put right, so that more rows are legal."""
    profile, model = setting.profile, setting.model
    fixed = {**row, **{axis: 1 for axis in ("pp", "vpp", "cp", "ep", "dp_replicate") if axis not in profile.axes}}
    fixed["zero_stage"] = row["zero_stage"] if row["zero_stage"] in profile.zero_stages else profile.zero_stages[-1]
    if profile.name == "deepspeed" and fixed["pp"] > 1:
        fixed["zero_stage"] %= 2
    while model.num_layers % (fixed["pp"] * fixed["vpp"]) or fixed["pp"] * fixed["vpp"] > model.num_layers:
        fixed["pp"], fixed["vpp"] = fixed["pp"] - (fixed["vpp"] == 1), 1
    if fixed["pp"] == 1 or setting.scenario.schedule == "1f1b":
        fixed["vpp"] = 1
    fixed["num_microbatches"] *= fixed["pp"] if fixed["vpp"] > 1 else 1
    experts = [block.moe.experts for block in model.blocks if block.moe is not None]
    fixed["ep"] = 1 if not experts or experts[0] % row["ep"] else fixed["ep"]
    fixed["tp"] = min(row["tp"], 4) if any(b.mlp and b.mlp.intermediate % row["tp"] == 0 for b in model.blocks) else 1
    fixed["tp"] = row["tp"] if experts else fixed["tp"]
    fixed["sp"] = int("sp" in profile.axes and fixed["tp"] > 1)
    fixed["etp"] = min(row["etp"], fixed["tp"]) if "etp" in profile.axes else 1
    fixed["dp_replicate"] = fixed["dp_replicate"] if fixed["zero_stage"] else 1
    return fixed


def legal(setting: Setting, rows: list[dict[str, int]]) -> list[dict[str, int]]:
    """The rows, mended, that no refusal breaks."""
    rows = [mended(setting, row) for row in rows]
    if not rows:
        return []
    plans = make_plans({name: [row[name] for row in rows] for name in rows[0]})
    return [row for row, good in zip(rows, passing(REFUSALS, setting, plans), strict=True) if good]


def as_plans(rows: list[dict[str, int]]) -> Plans:
    """Rows as Plans."""
    return make_plans({name: [row[name] for row in rows] for name in rows[0]})


def calls_of(setting: Setting, pp_stage: int = 0, /, **columns: object) -> list[Call]:
    """Every collective of one plan's step on one stage that is issued at all."""
    inventory = Inventory(setting)
    own = shares(inventory, plan_of(**columns))
    where = own.pp_stage[0].tolist().index(pp_stage)
    return [
        Call(
            op=call.op,
            group=call.group,
            what=call.what,
            dtype=call.dtype,
            ranks=int(call.ranks[0]),
            count=int(call.count[0, where]),
            in_bytes=int(call.in_bytes[0, where]),
            out_bytes=int(call.out_bytes[0, where]),
            wire=float(call.wire_bytes()[0, where]),
        )
        for call in all_traffic(inventory, own)
        if call.count[0, where]
    ]


@dataclasses.dataclass(frozen=True)
class Call:
    """One kind of collective on one stage, all calls of a step together."""

    op: str
    group: str
    what: str
    dtype: str
    ranks: int
    count: int
    in_bytes: int
    out_bytes: int
    wire: float

    @property
    def key(self) -> tuple[str, str, int]:
        """(operation, group, calls)."""
        return self.op, self.group, self.count


def one_call(calls: list[Call], op: str, group: str, what: str = "") -> Call:
    """The one collective of that operation on that group."""
    (found,) = [call for call in calls if (call.op, call.group) == (op, group) and what in ("", call.what)]
    return found
