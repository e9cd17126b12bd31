"""The checklist: what a plan's ledger, and what is told beside it, say against it. Rules of scope `ledger`.

Those that need no ledger are in `rules`; what users have reported, and which rule says it, is in `reported`.
"""

from __future__ import annotations

from trainledger.checklist import fit, sharing, told, work
from trainledger.checklist.account import Account, Told
from trainledger.checklist.check import Check, Evidence, Found

__all__ = ["CHECKS", "Account", "Check", "Evidence", "Found", "Told"]

CHECKS: tuple[Check, ...] = (*fit.CHECKS, *sharing.CHECKS, *work.CHECKS, *told.CHECKS)
"""In the order in which a plan meets them."""
