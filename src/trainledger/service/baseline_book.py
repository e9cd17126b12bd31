"""Where the run book is, and what is read from it or from an export of one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainledger.errors import BadInput, UnknownName
from trainledger.records.compare import peak_bytes
from trainledger.records.record import Baseline

if TYPE_CHECKING:
    from sqlite_utils import Database

EXPORTED = ".json"
FILE = "trainledger.db"


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What `baseline export` writes, and reads back."""

    baselines: tuple[Baseline, ...]


def book_path(given: str | None) -> Path:
    """The file that was named, or trainledger.db in the folder that the system keeps for a user's data."""
    if given is not None:
        if not given:
            raise BadInput("--book is empty; name a file, or leave it out")
        return Path(given).expanduser()
    try:
        from platformdirs import user_data_path
    except ImportError:
        raise _lacking() from None
    return user_data_path("trainledger", appauthor=False) / FILE


@contextmanager
def book(given: str | None, *, create: bool) -> Generator[Database]:
    """The run book, to be written or read."""
    path = book_path(given)
    if path.suffix == EXPORTED:
        raise BadInput(f"--book {path} is an export, which is only read; name the book that it came from")
    if find_spec("sqlite_utils") is None:
        raise _lacking()
    from trainledger.records.book import opened

    with opened(path, create=create) as db:
        yield db


def _lacking() -> BadInput:
    return BadInput("the run book is kept by sqlite-utils, which is not installed; pip install 'trainledger[records]'")


def find(given: str | None, names: tuple[str, ...]) -> tuple[Baseline, ...]:
    """The newest record of each name, or of each number."""
    path = book_path(given)
    if path.suffix == EXPORTED:
        every = exported(path)
        return tuple(_named(path, every, name) for name in names)
    from trainledger.records.store import read

    with book(given, create=False) as db:
        return tuple(read(db, name) for name in names)


def _named(path: Path, every: tuple[Baseline, ...], name: str) -> Baseline:
    found = [made for made in every if made.name == name] or [made for made in every if str(made.number) == name]
    if not found:
        raise UnknownName(f"baseline in {path}", name, {made.name for made in every})
    return found[-1]


def all_of(given: str | None, name: str | None, *, brief: bool = False) -> tuple[Baseline, ...]:
    """Every record, or those of one name; an unknown name is refused with the nearest. `brief` as in `every`."""
    path = book_path(given)
    if name is not None:
        find(given, (name,))
    if path.suffix == EXPORTED:
        return tuple(made for made in exported(path) if name in (None, made.name, str(made.number)))
    from trainledger.records.store import every

    with book(given, create=False) as db:
        return tuple(made for made in every(db, brief=brief) if name in (None, made.name, str(made.number)))


def exported(path: Path) -> tuple[Baseline, ...]:
    """What an export holds."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Exported).baselines
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); name what `baseline export` wrote") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(
            f"{path} is no export of a run book ({error}); write one with `baseline export OUT{EXPORTED}`"
        ) from None
    for made in found:
        if not all(peak_bytes(rung) for rung in made.rungs):
            raise BadInput(f"{path}: {made.name} has a rung without a peak of memory; record it anew")
        if not all(isinstance(rung.spec.get("model"), dict) for rung in made.rungs):
            raise BadInput(f"{path}: {made.name} has a rung that does not say its model; record it anew")
    return found
