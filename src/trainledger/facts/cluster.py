"""Accelerators and clusters: which card, how many share a link, and what leaves the node.

Every figure is a Fact under a dotted key; the properties are the figures that accounts use, in base units.
`data/accelerators/` and `data/clusters/` hold one file each, named like what it describes, and an `index.toml` with
the other names it is known by. Only the file that is asked for is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.facts.load import DATA, Fact, Slot, display, load_toml, missing, read_facts, read_text
from trainledger.units import format_bytes

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""What a peak can be of. fp64 and fp32 are vector units; the others are tensor (matrix) units, without sparsity."""

DRIVER_KEEPS_BYTES = 11 * 1024**3 // 10
"""1.1 GiB: what usable memory is assumed to lack of what nvidia-smi prints, where no log states usable memory.

The logs that state both give 0.47 to 1.05 GiB (H100 to GB300); the largest, rounded up.
"""

ACCELERATOR_KEYS: dict[str, Slot] = {
    **{f"peak.{dtype}": Slot("flop_per_s", may_lack=True) for dtype in DTYPES},
    "memory.nominal": Slot("byte"),
    "memory.reported": Slot("byte"),
    "memory.usable": Slot("byte"),
    "memory.bandwidth": Slot("byte_per_s"),
    "link.kind": Slot("text"),
    "link.one_way": Slot("byte_per_s", may_lack=True),
    "board.tdp": Slot("W"),
    "board.sms": Slot("count"),
    "board.capability": Slot("text"),
}
CLUSTER_KEYS: dict[str, Slot] = {
    "accelerator": Slot("text"),
    "gpus_per_node": Slot("count"),
    "scale_up.domain": Slot("count"),
    "scale_up.one_way": Slot("byte_per_s"),
    "inter.nics": Slot("count"),
    "inter.nic_rate": Slot("byte_per_s"),
    "inter.one_way": Slot("byte_per_s"),
    "inter.fabric": Slot("text"),
    "host.memory": Slot("byte"),
    "host.cpu": Slot("text"),
    "host.pcie_one_way": Slot("byte_per_s"),
}


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device as a framework sees it (of an MI250X: one of its two dies).

    peak.*            operations per second without sparsity; False: the hardware lacks the format
    memory.nominal    the name plate; memory.reported: what nvidia-smi or rocm-smi prints;
                      memory.usable: what PyTorch reports as total
    link.one_way      bytes per second of one device to all others of its domain, one direction
    board.capability  CUDA compute capability, or gfx name
    """

    name: str
    vendor: str
    file: str
    facts: dict[str, Fact]
    aliases: tuple[str, ...] = ()

    def fact(self, key: str) -> Fact:
        """The fact at a dotted key, with its provenance; MissingFact where no source states it."""
        if key not in self.facts:
            raise missing(
                self.file, key, f"copy the file, add {key} with your source, and give the copy's path as the card"
            )
        return self.facts[key]

    def supports(self, dtype: str) -> bool:
        """Whether the tensor or vector units have this format; MissingFact where no source says."""
        if dtype not in DTYPES:
            raise UnknownName("format of arithmetic", dtype, DTYPES)
        return self.fact(f"peak.{dtype}").value is not False

    def peak_flop_per_s(self, dtype: str) -> float:
        """Peak rate of dense arithmetic; a format that the hardware lacks is refused."""
        if not self.supports(dtype):
            have = [name for name in DTYPES if f"peak.{name}" in self.facts and self.supports(name)]
            raise BadInput(f"{self.name} has no {dtype} arithmetic: choose one of {', '.join(have)}")
        return float(self.facts[f"peak.{dtype}"].value)

    @property
    def usable(self) -> Fact:
        """Memory that a framework can get hold of; assumed from what nvidia-smi prints where no log states it."""
        if "memory.usable" in self.facts or "memory.reported" not in self.facts:
            return self.fact("memory.usable")
        reported = self.facts["memory.reported"]
        if int(reported.value) <= DRIVER_KEEPS_BYTES:
            raise BadInput(
                f"{self.file}: memory.reported is {reported.text}, less than a driver keeps "
                f"({format_bytes(DRIVER_KEEPS_BYTES)}); correct it, or state memory.usable"
            )
        return Fact(
            value=int(reported.value) - DRIVER_KEEPS_BYTES,
            basis="assumed",
            source=reported.source,
            date=reported.date,
            note=f"memory.reported ({reported.text}) minus {format_bytes(DRIVER_KEEPS_BYTES)} that the driver keeps: "
            "no source states what PyTorch reports",
        )

    @property
    def usable_bytes(self) -> int:
        """What "fits" is judged against."""
        return int(self.usable.value)

    @property
    def nominal_bytes(self) -> int:
        """The name plate's memory."""
        return int(self.fact("memory.nominal").value)

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak rate of device memory."""
        return float(self.fact("memory.bandwidth").value)

    @property
    def capability(self) -> tuple[int, ...]:
        """CUDA compute capability as numbers, (9, 0); () where the card has none or no source states it."""
        stated = self.facts.get("board.capability")
        parts = str(stated.value).split(".") if stated is not None else []
        return tuple(map(int, parts)) if all(part.isascii() and part.isdigit() for part in parts) else ()

    @property
    def link_bytes_per_s(self) -> float:
        """One direction of the scale-up link, per device; refused where the card has none."""
        fact = self.fact("link.one_way")
        if fact.value is False:
            raise BadInput(f"{self.name} has no scale-up link ({self.file}): its traffic goes over PCIe")
        return float(fact.value)


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes of one kind and the network between them.

    scale_up.domain   ranks joined by NVLink or xGMI: a node, a rack, or 1 where only PCIe joins the cards
    inter.*           network cards of one node that carry collectives
    """

    name: str
    file: str
    accelerator: Accelerator
    facts: dict[str, Fact]
    aliases: tuple[str, ...] = ()

    def fact(self, key: str) -> Fact:
        """The fact at a dotted key, with its provenance; MissingFact where no source states it."""
        if key not in self.facts:
            raise missing(
                self.file, key, f"copy the file, add {key} with your source, and give the copy's path as the cluster"
            )
        return self.facts[key]

    @property
    def gpus_per_node(self) -> int:
        """Devices that one host drives."""
        return int(self.facts["gpus_per_node"].value)

    @property
    def host_bytes(self) -> int | None:
        """Memory of one node's host; None where no source states it."""
        return int(self.facts["host.memory"].value) if "host.memory" in self.facts else None

    def host_share_bytes(self, gpus: int) -> int | None:
        """Host memory for each of a job's ranks on one node; None where no source states the node's memory."""
        return self.host_bytes // min(self.gpus_per_node, gpus) if self.host_bytes is not None else None

    @property
    def scale_up_domain(self) -> int:
        """Ranks joined by NVLink or xGMI."""
        return int(self.facts["scale_up.domain"].value)

    @property
    def scale_up_bytes_per_s(self) -> float:
        """One direction, per device, inside the domain; the card's link where the node states no other."""
        stated = self.facts.get("scale_up.one_way")
        return float(stated.value) if stated else self.accelerator.link_bytes_per_s

    @property
    def inter(self) -> Fact:
        """One direction, per device, between nodes: stated, or the node's network cards shared by its devices."""
        if "inter.one_way" in self.facts:
            return self.facts["inter.one_way"]
        if "inter.nics" not in self.facts:
            return self.fact("inter.one_way")
        nics, rate = self.facts["inter.nics"], self.fact("inter.nic_rate")
        return Fact(
            value=int(nics.value) * float(rate.value) / self.gpus_per_node,
            basis="derived",
            source=rate.source,
            date=rate.date,
            note=f"{nics.text} network cards of {rate.text} over {self.gpus_per_node} devices",
        )

    @property
    def inter_bytes_per_s(self) -> float:
        """One direction, per device, between nodes."""
        return float(self.inter.value)


_KINDS = {"accelerators": "accelerator", "clusters": "cluster"}


_MAKERS = re.compile(r"^(?:(?:nvidia|amd|geforce|tesla|instinct)-)+")
"""What drivers write before the name of a card."""


@functools.cache
def _index(folder: str) -> dict[str, tuple[str, ...]]:
    """Name of each file of a data folder -> its other names."""
    aliases = load_toml(DATA / folder / "index.toml")
    stems = sorted(path.stem for path in (DATA / folder).glob("*.toml") if path.stem != "index")
    return {stem: tuple(aliases.get(stem, ())) for stem in stems}


def _find(folder: str, name: str) -> Path:
    """The file of a name or alias in any case, or the user's own; UnknownName with the nearest names."""
    if name.endswith(".toml"):
        return Path(name)
    wanted = name.strip().lower()
    joined = _MAKERS.sub("", re.sub(r"[\s_]+", "-", wanted))
    for spelling in (wanted, f"nvidia {wanted}", joined):
        for stem, aliases in _index(folder).items():
            if spelling == stem.lower() or spelling in aliases:
                return DATA / folder / f"{stem}.toml"
    known = {other.lower() for stem, aliases in _index(folder).items() for other in (stem, *aliases)}
    hint = "or give the path of a .toml file of your own"
    raise UnknownName(_KINDS[folder], name, known, hint, listed=f"trainledger list {folder}")


def _head(path: Path, tables: dict[str, Any], kind: str) -> str:
    """The name of a file: the one it gives itself, which for the package's own is the file's."""
    name = read_text(display(path), tables, "name")
    if path.is_relative_to(DATA) and name != path.stem:
        raise BadInput(f'{display(path)}: name is {name!r}: write name = "{path.stem}", as the {kind} file is called')
    return name


def _aliases(folder: str, path: Path) -> tuple[str, ...]:
    return _index(folder)[path.stem] if path.parent == DATA / folder else ()


def load_accelerator(path: Path) -> Accelerator:
    """An accelerator from its TOML file, the package's or a user's."""
    where, tables = display(path), load_toml(path)
    facts = read_facts(
        where, {key: value for key, value in tables.items() if key not in ("name", "vendor")}, ACCELERATOR_KEYS
    )
    card = Accelerator(
        name=_head(path, tables, "accelerator"),
        vendor=read_text(where, tables, "vendor"),
        file=where,
        facts=facts,
        aliases=_aliases("accelerators", path),
    )
    if {"memory.usable", "memory.reported"} <= facts.keys():
        _refuse_more(where, facts, "memory.usable", "memory.reported")
    return card


def _refuse_more(where: str, facts: Mapping[str, Fact], less: str, more: str) -> None:
    if int(facts[less].value) > int(facts[more].value):
        raise BadInput(
            f"{where}: {less} ({facts[less].text}) is above {more} ({facts[more].text}): check which is which"
        )


def load_cluster(path: Path) -> Cluster:
    """A cluster from its TOML file, the package's or a user's; its accelerator is a name, or a path beside the file."""
    where, tables = display(path), load_toml(path)
    facts = read_facts(where, {key: value for key, value in tables.items() if key != "name"}, CLUSTER_KEYS)
    for key in ("accelerator", "gpus_per_node", "scale_up.domain"):
        if key not in facts:
            raise BadInput(f"{where} has no {key}: a cluster cannot do without it; add {key} with its source")
    node, domain = int(facts["gpus_per_node"].value), int(facts["scale_up.domain"].value)
    if domain % node and node % domain:
        raise BadInput(
            f"{where}: scale_up.domain is {domain} and gpus_per_node is {node}: one must be a multiple of the other"
        )
    card = str(facts["accelerator"].value)
    return Cluster(
        name=_head(path, tables, "cluster"),
        file=where,
        accelerator=load_accelerator(path.parent / card) if card.endswith(".toml") else find_accelerator(card),
        facts=facts,
        aliases=_aliases("clusters", path),
    )


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name or alias in any case, or of a path that ends in .toml.

    >>> find_accelerator("h100").name
    'H100-SXM5-80GB'
    """
    return load_accelerator(_find("accelerators", name))


def find_cluster(name: str) -> Cluster:
    """The cluster of a name or alias in any case, or of a path that ends in .toml.

    >>> find_cluster("h100").name, find_cluster("gb200").scale_up_domain
    ('dgx-h100', 72)
    """
    return load_cluster(_find("clusters", name))


def accelerator_names() -> tuple[str, ...]:
    """Every accelerator that the package knows, sorted."""
    return tuple(_index("accelerators"))


def cluster_names() -> tuple[str, ...]:
    """Every cluster that the package knows, sorted."""
    return tuple(_index("clusters"))
