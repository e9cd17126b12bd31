"""The page of the command line, from the Request and Response types of the verbs."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trainledger.cli.flags import flags
from trainledger.cli.help import EXIT_CODES, summary, typed, usage
from trainledger.cli.verbs import VERBS, Verb
from trainledger.service.requests import GROUPS

INTRODUCTION = """# The command line

Written by `python scripts/docs.py` from the Request types in `src/trainledger/service`; edit those.

`trainledger VERB --help` says the same of one verb. The answer goes to standard output, as text or with `--json` as
JSON; an error is one line on standard error, beginning with `error:`, that names the value seen, the rule and the knob.
In square brackets: the default. The defaults that an answer used are printed with it.
"""

PLAN_FILES = """## PLAN files

A PLAN file is TOML whose keys are the flags without their dashes. It stands where MODEL stands; flags on the command
line go over what it says (`--offload none` empties its list). A list is an array, or text with commas as the flag takes
it. A file that it names (`model = "sub/config.json"`, a `cluster` or `gpu` of your own) is looked for from its own
folder. A key that is not a flag is refused, with the nearest one. `states` shows every ZeRO stage, whatever `zero`
says. Some are in `examples/`.

```toml
model = "llama-3-70b"
cluster = "dgx-h100"
gpus = 64
engine = "megatron"
tp = 8
zero = 1
pp-layout = [40, 40]
pp = 2
```

    trainledger ledger plan.toml
    trainledger ledger plan.toml --gpus 128
    trainledger diff plan.toml other.toml
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _verbs(), _exit_codes(), PLAN_FILES, _flags(), _answers()]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def _verbs() -> str:
    rows = [(f"`{usage(verb)}`", summary(verb)) for verb in VERBS]
    return f"## Verbs\n\n{_table(('verb', 'answers'), rows)}"


def _exit_codes() -> str:
    return f"## Exit codes\n\n{_table(('code', 'means'), ((str(code), text) for code, text in EXIT_CODES.items()))}"


def _flags() -> str:
    """Each flag once, with the verbs that have it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for verb in VERBS:
        for one in flags(verb.service.Request):
            found.setdefault((one.group, typed(one), one.description), []).append(verb.name)
    parts = ["## Flags\n"]
    for group in GROUPS:
        rows = [(f"`{name}`", text, ", ".join(have)) for (of, name, text), have in found.items() if of == group]
        if group == "Answer":
            rows.append(("`--json`", "Print the answer as JSON.", "all"))
        parts.append(f"### {group}\n\n{_table(('flag', 'meaning', 'verbs'), rows)}")
    return "\n".join(parts)


def _answers() -> str:
    """The keys of each JSON answer."""
    parts = ["## JSON\n\nA key may be added in a later version; none is renamed. Bytes are bytes, not GiB.\n"]
    for verb in VERBS:
        for name in ("Response", "Explanation", "Sweep", "Fit"):
            kind = getattr(verb.service, name, None)
            if kind is not None:
                parts.append(_answer(verb, name, kind))
    return "\n".join(parts)


def _answer(verb: Verb, name: str, kind: type[msgspec.Struct]) -> str:
    flags = {"Response": "", "Explanation": " --explain", "Sweep": " --sweep", "Fit": " --fit-params"}
    keys = ", ".join(f"`{key}`" for key in kind.__struct_encode_fields__)
    return f"### `{verb.name}{flags[name]}`\n\n{_paragraphs(kind.__doc__ or '')}\n\nKeys: {keys}.\n"


def _paragraphs(docstring: str) -> str:
    """The docstring with its aligned lists as lists."""
    head, _, rest = docstring.partition("\n\n")
    first = " ".join(head.split())
    return first if not rest.strip() else f"{first}\n\n```\n{_dedented(rest)}\n```"


def _dedented(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join(line.removeprefix("    ") for line in lines)
