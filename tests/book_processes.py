"""A writer of a run book, for its tests: `python book_processes.py BOOK RECORD HOW_MANY`, a number a line.

RECORD is a file with a record as JSON: nothing is imported here that would take a process long to start.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from trainledger.records.book import opened
from trainledger.records.record import Baseline
from trainledger.records.store import write


def main(path: str, record: str, count: int) -> None:
    """Write the record so many times, and say each number once it is in the book."""
    made = msgspec.json.decode(Path(record).read_bytes(), type=Baseline)
    for _ in range(count):
        with opened(Path(path), create=True) as db:
            kept = write(db, made)
        sys.stdout.write(f"{kept.number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
