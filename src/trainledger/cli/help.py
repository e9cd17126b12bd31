"""The help: what the page docs/cli.md and `--help` say, from the Request types alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from trainledger.cli.flags import Flag, flags
from trainledger.cli.verbs import VERBS, Verb
from trainledger.report.document import BLANK, Document, Table, Text, left
from trainledger.service.requests import GROUPS

SUMMARY = "Predict what training a large model holds and moves, line by line, for the engine that will run it."
EXIT_CODES = {
    0: "it fits, or the question is answered",
    1: "an error: something cannot be read, is not known, or a named rule refuses it",
    2: "usage: flags that cannot be parsed or contradict each other",
    3: "it does not fit, or no plan does",
    4: "what was measured is not what was predicted, or a baseline is not accepted",
    5: "check found what it was asked about",
    130: "interrupted (Ctrl-C); train has saved before it ended, and can go on",
    143: "train was asked to end (SIGTERM), has saved, and can go on",
}
WIDTH = 74
"""Of the column that explains."""

JSON_OPTION = ("--json", "Print the answer as JSON.")


def overview(verbs: Sequence[Verb] = VERBS) -> Document:
    """What `trainledger --help` says, or `trainledger KIND --help` of verbs of one kind."""
    rows = [(verb.name, verb.summary) for verb in verbs]
    globals_ = [("--help", "This, or with a verb, its flags."), ("--version", "The version.")]
    return [
        Text("trainledger VERB ...", "answer"),
        Text(SUMMARY),
        BLANK,
        Text("Verbs (trainledger VERB --help has the flags)", "heading"),
        _wrapped(rows),
        BLANK,
        Text("Flags", "heading"),
        _wrapped(globals_),
        BLANK,
        Text("Exit codes", "heading"),
        _wrapped([(str(code), meaning) for code, meaning in EXIT_CODES.items()]),
    ]


def of_verb(verb: Verb) -> Document:
    """What `trainledger VERB --help` says."""
    found: Document = [Text(usage(verb), "answer"), Text(summary(verb))]
    groups = grouped(verb)
    width = max(len(name) for _, entries in groups for name, _ in entries)
    for group, entries in groups:
        found += [BLANK, Text(group, "heading"), _wrapped(entries, width)]
    return found


def usage(verb: Verb) -> str:
    """The verb, its values and that flags follow."""
    names = [one.value if one.required else f"[{one.value}]" for one in flags(verb.service.Request) if one.positional]
    return " ".join(["trainledger", verb.name, *names, "[flags]"])


def summary(verb: Verb) -> str:
    """The first paragraph of the Request's docstring."""
    return " ".join((verb.service.Request.__doc__ or "").partition("\n\n")[0].split())


def grouped(verb: Verb) -> list[tuple[str, list[tuple[str, str]]]]:
    """Under each heading, (what is typed, what it means)."""
    entries: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    for one in flags(verb.service.Request):
        entries[one.group].append((typed(one), one.description))
    entries["Answer"].append(JSON_OPTION)
    return [(group, rows) for group, rows in entries.items() if rows]


def typed(one: Flag) -> str:
    """How a flag is written.

    >>> from trainledger.service.requests import PlanRequest
    >>> [typed(one) for one in flags(PlanRequest) if one.name in ("model", "sp", "zero", "recompute")]
    ['MODEL', '--sp, --no-sp', '--recompute HOW', '--zero N']
    """
    if one.positional or not one.value:
        return ", ".join(one.options)
    return f"{one.options[0]} {one.value}"


def _wrapped(entries: list[tuple[str, str]], width: int = 0) -> Table:
    rows: list[tuple[str, str]] = []
    for name, meaning in entries:
        lines = textwrap.wrap(meaning, WIDTH) or [""]
        rows += [(name if index == 0 else "", line) for index, line in enumerate(lines)]
    return Table(columns=(left(""), left("")), rows=tuple((f"  {name.ljust(width)}", line) for name, line in rows))
