"""A rule of the checklist that needs a ledger: what it looks at, what it says, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from trainledger.checklist.account import Account
from trainledger.lines import Line
from trainledger.rules.rule import Severity


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that a finding rests on.

    line    the id of a line of the ledger, or what the figure is of
    amount  in base units; None where the evidence is that there is none
    """

    line: str
    amount: int | float | None
    unit: str
    note: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule says of one plan.

    message    what is so, with its figures
    knob       what to turn, to what
    severity   where it depends on the figures; None is the rule's own
    """

    message: str
    knob: str
    evidence: tuple[Evidence, ...]
    severity: Severity | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One rule of scope `ledger`.

    severity   the gravest that it can have
    meters     it reads meters or activations, which say nothing of a plan whose states alone are too much
    """

    id: str
    severity: Severity
    source: str
    judge: Callable[[Account], Found | None]
    engines: tuple[str, ...] = ()
    meters: bool = False

    def found(self, account: Account) -> Found | None:
        """What it says; None where it has nothing to say, or speaks of other engines."""
        if self.engines and account.setting.profile.name not in self.engines:
            return None
        if self.meters and account.overfull is not None:
            return None
        return self.judge(account)


def held(line: str, amount: float, note: str = "") -> Evidence:
    """Bytes as evidence."""
    return Evidence(line=line, amount=amount, unit="B", note=note)


def lines_as(lines: Iterable[Line], most: int = 3) -> tuple[Evidence, ...]:
    """The largest of some lines as evidence."""
    largest = sorted(lines, key=lambda line: -line.amount)[:most]
    return tuple(Evidence(line=line.id, amount=line.amount, unit=line.unit, note=line.formula) for line in largest)
