"""The errors a user can meet, each with its exit code.

TrainledgerError          exit 1   the base: shown as one message, without a traceback
  BadInput                exit 1   a value, file or configuration that cannot be read as asked
    UnknownName           exit 1   a model, cluster, card, engine ... that is not there; names the nearest
    MissingFact           exit 1   a figure that no source states; names file and key
    Damaged               exit 1   a checkpoint that is not as it was written (runtime/checkpoint/manifest.py)
    SaveFailed            exit 1   a checkpoint that could not be written (runtime/checkpoint/write.py)
  Refused                 exit 1   a named rule forbids the model, the plan or the pair
  RankFailed              exit 1   a rank of a run that raised, died or did not end in time (runtime/launch/failure.py)
  Diverged                exit 1   a training run whose numbers are of no use any more (runtime/train/stop.py)
  UsageError              exit 2   flags that contradict each other or cannot be parsed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainledgerError(Exception):
    """Base of everything shown to a user: value, rule, knob, in one message."""

    exit_code = 1
    many_lines = False
    """Whether the message has further lines, which something else wrote: shown as lines then."""


class BadInput(TrainledgerError):
    """A value, file or configuration that cannot be read as asked."""


class UnknownName(BadInput):
    """A name that is not in the list it was looked up in; the message carries the nearest ones."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "", *, listed: str = "") -> None:
        """`listed` is the command that shows all names, where they are too many for a sentence."""
        names = sorted(known)
        near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
        every = f"`{listed}` shows those that are" if listed else f"known: {', '.join(names)}"
        advice = f"nearest: {', '.join(near)}" if near else every
        super().__init__(f"{name!r} is not a known {what}; {advice}{'; ' + hint if hint else ''}")
        self.name = name


class MissingFact(BadInput):
    """A figure that no source in the data states; the message names the file and the key."""


class Refused(TrainledgerError):
    """A named rule forbids this; `rule` is its id."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"[{rule}] {message}")
        self.rule = rule


class UsageError(TrainledgerError):
    """Flags that contradict each other or cannot be parsed."""

    exit_code = 2
