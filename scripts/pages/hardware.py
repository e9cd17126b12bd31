"""The page of accelerators and clusters: what their files state, on what basis, from where, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainledger.errors import BadInput, MissingFact
from trainledger.facts.cluster import (
    ACCELERATOR_KEYS,
    CLUSTER_KEYS,
    Accelerator,
    Cluster,
    accelerator_names,
    cluster_names,
    find_accelerator,
    find_cluster,
)
from trainledger.facts.load import BASES, Fact
from trainledger.units import format_bytes

LETTERS = dict(zip(BASES, ("d", "l", "m", "r", "c", "p", "g", "a", "w"), strict=True))
"""One letter for each basis of a fact."""

CARD_COLUMNS: tuple[tuple[str, str], ...] = (
    ("name plate", "memory.nominal"),
    ("bf16", "peak.bf16"),
    ("fp8", "peak.fp8"),
    ("fp4", "peak.fp4"),
    ("memory rate", "memory.bandwidth"),
    ("link, one way", "link.one_way"),
    ("TDP", "board.tdp"),
    ("capability", "board.capability"),
)
NODE_COLUMNS: tuple[tuple[str, str], ...] = (
    ("GPUs per node", "gpus_per_node"),
    ("scale-up domain", "scale_up.domain"),
    ("fabric", "inter.fabric"),
    ("host memory", "host.memory"),
)
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "inter.one_way": ("inter.nics",),
    "inter.nics": ("inter.one_way",),
    "inter.nic_rate": ("inter.one_way",),
    "scale_up.one_way": ("scale_up.domain",),
    "memory.reported": ("memory.usable",),
    "memory.usable": ("memory.reported",),
}
"""Facts that are not missed where another is stated."""

INTRO = """# Hardware

What the files under `src/trainledger/data` state, as they write it. A letter says what kind of source stands behind a
value:

{legend}

`none`: the hardware lacks it. A dash: no source that was opened states it, so whoever asks is refused with file and key
([decision 7](decisions/0007-unsourced-hardware-values-stay-absent.md)). Rates are without sparsity, per device, one
direction. `trainledger list accelerator NAME` and `trainledger list cluster NAME` print every fact with its note.

What the verbs read today: usable memory (does it fit), capability and formats (does the recipe run), the scale-up
domain and the GPUs of a node (rules about layouts). The rates are recorded, and no verb computes with them.

## Accelerators

"usable" is what PyTorch reports as total; where no log states it, it is assumed to be what nvidia-smi prints less what
the driver keeps, and marked `a`.
"""

BY_SOURCE = """## Where the figures of each accelerator come from

"not stated": keys that a file may have and this one lacks.
"""

CLUSTERS = """## Clusters

"scale-up" is the link inside a domain, the card's own where the node states no other; "between nodes" is one device's
share of the node's network cards where no source states it per device.
"""


def render() -> str:
    """The whole page."""
    cards = [find_accelerator(name) for name in accelerator_names()]
    nodes = [find_cluster(name) for name in cluster_names()]
    legend = ", ".join(f"`{letter}` {basis}" for basis, letter in LETTERS.items())
    parts = [INTRO.format(legend=legend), _cards(cards), BY_SOURCE, *map(_sources, cards), CLUSTERS, _nodes(nodes)]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = (head, ["---"] * len(head), *rows)
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _shown(fact: Fact | None) -> str:
    """A value as its file writes it, and the letter of its basis; a dash where there is none."""
    return "-" if fact is None else f"{fact.text} `{LETTERS[fact.basis]}`"


def _cards(cards: Sequence[Accelerator]) -> str:
    head = ["accelerator", "usable", *(title for title, _ in CARD_COLUMNS)]
    rows = [[card.name, _usable(card), *(_shown(card.facts.get(key)) for _, key in CARD_COLUMNS)] for card in cards]
    return table(head, rows)


def _usable(card: Accelerator) -> str:
    try:
        return f"{format_bytes(card.usable_bytes)} `{LETTERS[card.usable.basis]}`"
    except MissingFact:
        return "-"


def _sources(card: Accelerator) -> str:
    """Facts grouped by the page that states them, and the keys that nobody states."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, fact in card.facts.items():
        groups.setdefault((_short(fact.source), fact.basis, fact.date), []).append(key)
    rows = [(source, f"{basis}, {date}", ", ".join(keys)) for (source, basis, date), keys in groups.items()]
    also = f"Also called {', '.join(f'`{name}`' for name in card.aliases)}.\n\n" if card.aliases else ""
    lacking = _lacking(card.facts, ACCELERATOR_KEYS)
    return f"### {card.name}\n\n{also}{table(('source', 'basis, read', 'states'), rows)}\nNot stated: {lacking}.\n"


def _short(source: str) -> str:
    """A source without what every address begins with."""
    return source.removeprefix("https://").removeprefix("github.com/").rstrip("/")


def _lacking(facts: Mapping[str, Fact], known: Iterable[str]) -> str:
    missing = [
        key for key in known if key not in facts and not any(other in facts for other in ALTERNATIVES.get(key, ()))
    ]
    return ", ".join(missing) or "nothing"


def _nodes(nodes: Sequence[Cluster]) -> str:
    head = [
        "cluster",
        "accelerator",
        *(t for t, _ in NODE_COLUMNS),
        "scale-up",
        "between nodes",
        "not stated",
        "source",
    ]
    return table(head, map(_node, nodes))


def _node(node: Cluster) -> list[str]:
    sources = dict.fromkeys(_short(fact.source) for fact in node.facts.values())
    return [
        node.name,
        node.accelerator.name,
        *(_shown(node.facts.get(key)) for _, key in NODE_COLUMNS),
        _rate(node, "scale_up_bytes_per_s", node.facts.get("scale_up.one_way")),
        _rate(node, "inter_bytes_per_s", None),
        _lacking(node.facts, CLUSTER_KEYS),
        "; ".join(sources),
    ]


def _rate(node: Cluster, name: str, stated: Fact | None) -> str:
    """A rate of a node with its basis; `none` where it lacks the link, a dash where no source states it."""
    try:
        rate = float(getattr(node, name))
    except MissingFact:
        return "-"
    except BadInput:
        return "none"
    basis = stated if stated is not None else (node.inter if name == "inter_bytes_per_s" else None)
    fact = basis or node.accelerator.fact("link.one_way")
    return f"{rate / 10**9:,g} GB/s `{LETTERS[fact.basis]}`"
