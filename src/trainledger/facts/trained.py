"""The dtype that a published model was trained in, where a source says it."""

from __future__ import annotations

from functools import lru_cache

from trainledger.facts.load import DATA, Fact, Slot, display, load_toml, read_fact

FILE = DATA / "trained_in.toml"


def trained_in(name: str) -> Fact | None:
    """The dtype of the training of a preset, by its name; None where no source says.

    >>> found = trained_in("llama-3.1-405b")
    >>> found.value if found else None, trained_in("gpt2")
    ('bf16', None)
    """
    return next((fact for begins, fact in _known() if name.startswith(begins)), None)


@lru_cache(maxsize=1)
def _known() -> tuple[tuple[str, Fact], ...]:
    """(beginning of a name, fact) of every table of the file."""
    tables = load_toml(FILE).items()
    where = display(FILE)
    return tuple(
        (begins, read_fact(f"{where}: {begins}", table.get("dtype"), Slot("text"))) for begins, table in tables
    )
