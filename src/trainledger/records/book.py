"""The run book as a file: opened, brought up to date, written one whole record at a time.

A record is one transaction under write-ahead logging: a process that is killed leaves the book with the record or
without it, and readers see no part of one. Writers wait for each other as long as BUSY_S.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainledger.errors import BadInput
from trainledger.records.schema import APPLICATION, MIGRATIONS

if TYPE_CHECKING:
    from sqlite_utils import Database

BUSY_S = 30.0
"""How long a writer waits for another one; a record is written in far less."""
HEAD = b"SQLite format 3\x00"
"""How a SQLite file begins. [sqlite: fileformat2 1.3]"""


@contextmanager
def opened(path: Path, *, create: bool, busy_s: float | None = None) -> Generator[Database]:
    """The book at `path`, at the newest version of its tables.

    Another writer is waited for BUSY_S, or as long as is said. A file that is locked, damaged, another program's or a
    newer release's is refused and left as it is; without `create` so is one that is not there.
    """
    busy_s = BUSY_S if busy_s is None else busy_s
    _check_file(path, create=create)
    with _complaining(path, busy_s), closing(_connected(path, busy_s)) as connection:
        from sqlite_utils import Database

        _check_owner(path, connection)
        db = Database(connection, execute_plugins=False)
        connection.execute("PRAGMA journal_mode = wal")
        connection.execute("PRAGMA foreign_keys = on")
        _migrate(db)
        yield db


@contextmanager
def transaction(db: Database) -> Generator[None]:
    """All that is written within, or nothing; the lock is taken at once, so that two writers cannot both have read."""
    db.conn.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.conn.rollback()
        raise
    db.conn.commit()


def _check_file(path: Path, *, create: bool) -> None:
    if not path.exists():
        if not create:
            raise BadInput(
                f"there is no run book {path}; `trainledger baseline run` makes one, or name another with --book"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    if not path.is_file():
        raise BadInput(f"--book {path} is not a file; name a file, which is made where there is none")
    with path.open("rb") as file:
        head = file.read(len(HEAD))
    if not head and not create:
        raise BadInput(
            f"--book {path} is an empty file and no run book; `trainledger baseline run` makes one, or name another"
        )
    if head and head != HEAD:
        raise BadInput(f"--book {path} is not a SQLite file, and is left as it is; name another file with --book")


def _connected(path: Path, busy_s: float) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=busy_s)


def _check_owner(path: Path, connection: sqlite3.Connection) -> None:
    """Refuse a database that is not a book, is one of a later release, or is damaged."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if owner != APPLICATION and tables:
        raise BadInput(
            f"--book {path} is a database of another program, and is left as it is; name another file with --book"
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise BadInput(
            f"--book {path} has tables of version {version}, and this release of trainledger knows {len(MIGRATIONS)}; "
            "upgrade trainledger, or name another file with --book"
        )
    (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if said != "ok":
        _damaged(path, said)


def _migrate(db: Database) -> None:
    """Bring the tables up to date: every step that is missing, in one transaction."""
    if _version(db) == len(MIGRATIONS):
        return
    with transaction(db):
        # another process may have done it while this one waited for the lock
        for migrate in MIGRATIONS[_version(db) :]:
            migrate(db)
        db.conn.execute(f"PRAGMA application_id = {APPLICATION}")
        db.conn.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _version(db: Database) -> int:
    return int(db.conn.execute("PRAGMA user_version").fetchone()[0])


@contextmanager
def _complaining(path: Path, busy_s: float) -> Generator[None]:
    """What SQLite says, as a refusal that names the file."""
    try:
        yield
    except sqlite3.OperationalError as error:
        code = error.sqlite_errorcode & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise BadInput(
                f"--book {path} has been locked by another process for {busy_s:g} s; end that process or wait for it, "
                "or name another file with --book"
            ) from None
        raise BadInput(
            f"--book {path} cannot be used ({error}); check its permissions and those of its folder, and the space on "
            "the disk, or name another file with --book"
        ) from None
    except sqlite3.DatabaseError as error:
        # what is derived from it is a mistake of ours, such as a row that breaks a constraint
        if type(error) is not sqlite3.DatabaseError:
            raise
        _damaged(path, str(error))


def _damaged(path: Path, said: str) -> NoReturn:
    raise BadInput(
        f"--book {path} is damaged ({said}), and is left as it is; name another file with --book, and save what can be "
        f"read with `sqlite3 {path} .recover`"
    ) from None
