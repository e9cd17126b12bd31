"""`list`: what is known by name, and one of them with where each of its facts comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from trainledger.errors import MissingFact, UnknownName, UsageError
from trainledger.service.requests import INPUT, flag

if TYPE_CHECKING:
    from trainledger.facts.cluster import Accelerator
    from trainledger.facts.load import Fact as DataFact

KINDS = ("models", "clusters", "accelerators", "engines", "optimizers", "precisions", "rules")
"""What can be listed."""


class Request(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What is known by name; with NAME, one of them in full."""

    what: Annotated[str, flag(f"{', '.join(KINDS)}; the singular will do.", "WHAT", group=INPUT, positional=True)]
    name: Annotated[
        str | None, flag("One of them, with the source of each fact.", "NAME", group=INPUT, positional=True)
    ] = None


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One fact: `value` in base units, `text` as its file writes it."""

    key: str
    value: int | float | str | bool
    text: str
    basis: str
    source: str
    date: str
    note: str


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Items with the same keys each, or the facts of one named thing."""

    what: str
    items: list[dict[str, Any]] = []
    name: str | None = None
    about: dict[str, Any] = {}
    facts: tuple[Fact, ...] = ()

    @property
    def exit_code(self) -> int:
        """A list is an answer."""
        return 0


def run(request: Request) -> Response:
    """The list, or one entry."""
    what = request.what if request.what.endswith("s") else f"{request.what}s"
    if what not in KINDS:
        raise UnknownName("list", request.what, KINDS)
    if request.name is None:
        return Response(what=what, items=_ITEMS[what]())
    return _DETAILS[what](request.name)


def _models() -> list[dict[str, Any]]:
    from trainledger.facts.presets import other_names, preset_names

    return [{"name": name, "aliases": list(other_names().get(name, ()))} for name in preset_names()]


def _accelerators() -> list[dict[str, Any]]:
    from trainledger.facts.cluster import accelerator_names, find_accelerator

    cards = [find_accelerator(name) for name in accelerator_names()]
    return [
        {
            "name": card.name,
            "vendor": card.vendor,
            "nominal_bytes": _value(card.facts, "memory.nominal"),
            "usable_bytes": _usable(card),
            "bf16_flop_per_s": _value(card.facts, "peak.bf16"),
            "memory_bytes_per_s": _value(card.facts, "memory.bandwidth"),
            "aliases": list(card.aliases),
        }
        for card in cards
    ]


def _value(facts: Mapping[str, DataFact], key: str) -> int | float | str | None:
    """A fact's value; null where no source states it or the hardware lacks it."""
    value = facts[key].value if key in facts else None
    return None if value is False else value


def _usable(card: Accelerator) -> int | None:
    try:
        return int(card.usable_bytes)
    except MissingFact:
        return None


def _clusters() -> list[dict[str, Any]]:
    from trainledger.facts.cluster import cluster_names, find_cluster

    found = [find_cluster(name) for name in cluster_names()]
    return [
        {
            "name": cluster.name,
            "accelerator": cluster.accelerator.name,
            "gpus_per_node": cluster.gpus_per_node,
            "scale_up_domain": cluster.scale_up_domain,
            "aliases": list(cluster.aliases),
        }
        for cluster in found
    ]


def _engines() -> list[dict[str, Any]]:
    from trainledger.profiles import engine_names, load_profile

    profiles = [load_profile(name) for name in engine_names()]
    return [
        {
            "name": profile.name,
            "framework": profile.framework,
            "framework_version": profile.framework_version,
            "zero_stages": list(profile.zero_stages),
            "precisions": list(profile.precision),
        }
        for profile in profiles
    ]


def _optimizers() -> list[dict[str, Any]]:
    from trainledger.profiles import engine_names, load_profile, optimizers

    engines = {engine: load_profile(engine).optimizers for engine in engine_names()}
    return [
        {
            "name": name,
            "states": [moment.what for moment in optimizer.moments],
            "engines": [engine for engine, have in engines.items() if name in have],
            "source": optimizer.source,
        }
        for name, optimizer in optimizers().items()
    ]


def _precisions() -> list[dict[str, Any]]:
    from trainledger.profiles import engine_names, load_profile

    return [
        {
            "name": name,
            "engine": engine,
            "weight": recipe.weight,
            "grad": recipe.grad,
            "master": recipe.master or None,
            "gathered": recipe.gathered,
            "reduce": recipe.reduce,
            "activation": recipe.activation,
        }
        for engine in engine_names()
        for name, recipe in load_profile(engine).precision.items()
    ]


def _rules() -> list[dict[str, Any]]:
    from trainledger.checklist import CHECKS
    from trainledger.rules import ELSEWHERE, RULES

    rules = [{"name": one.id, "severity": one.severity, "scope": one.scope, "source": one.source} for one in RULES]
    checks = [{"name": one.id, "severity": one.severity, "scope": "ledger", "source": one.source} for one in CHECKS]
    beside = [
        {"name": one.id, "severity": "refuse", "scope": one.about, "source": f"trainledger {one.source}"}
        for one in ELSEWHERE
    ]
    return rules + checks + beside


_ITEMS = {
    "models": _models,
    "clusters": _clusters,
    "accelerators": _accelerators,
    "engines": _engines,
    "optimizers": _optimizers,
    "precisions": _precisions,
    "rules": _rules,
}


def _accelerator(name: str) -> Response:
    from trainledger.facts.cluster import find_accelerator

    card = find_accelerator(name)
    about = {"vendor": card.vendor, "file": card.file, "usable_bytes": _usable(card), "aliases": list(card.aliases)}
    return Response(what="accelerators", name=card.name, about=about, facts=_facts(card.facts))


def _cluster(name: str) -> Response:
    from trainledger.facts.cluster import find_cluster

    cluster = find_cluster(name)
    about = {"accelerator": cluster.accelerator.name, "file": cluster.file, "aliases": list(cluster.aliases)}
    return Response(what="clusters", name=cluster.name, about=about, facts=_facts(cluster.facts))


def _facts(facts: Mapping[str, DataFact]) -> tuple[Fact, ...]:
    return tuple(Fact(key=key, **msgspec.structs.asdict(fact)) for key, fact in facts.items())


_STATE_KEYS = ("category", "what", "dtype", "zero", "sharded_from", "cut", "alive", "place", "basis", "cite")
"""What is shown of a state of an engine; its conditions are in the profile's file."""


def _engine(name: str) -> Response:
    from trainledger.profiles import load_profile

    profile = load_profile(name)
    about = {key: value for key, value in msgspec.to_builtins(profile).items() if key not in ("name", "state")}
    about["state"] = [{key: getattr(row, key) for key in _STATE_KEYS} for row in profile.state]
    return Response(what="engines", name=profile.name, about=about)


def _model(name: str) -> Response:
    raise UsageError(f"`list model {name}` would say less than `trainledger model {name}`; use that")


def _item(what: str) -> Callable[[str], Response]:
    """The items of one kind that bear a name: one, or a table of them where engines share it."""

    def find(name: str) -> Response:
        every = _ITEMS[what]()
        items = [item for item in every if item["name"] == name.lower()]
        if not items:
            raise UnknownName(what[:-1], name, {item["name"] for item in every})
        if len(items) > 1:
            return Response(what=what, name=name.lower(), items=items)
        about = {key: value for key, value in items[0].items() if key != "name"}
        return Response(what=what, name=name.lower(), about=about)

    return find


_DETAILS: dict[str, Callable[[str], Response]] = {
    "models": _model,
    "accelerators": _accelerator,
    "clusters": _cluster,
    "engines": _engine,
    "optimizers": _item("optimizers"),
    "precisions": _item("precisions"),
    "rules": _item("rules"),
}
