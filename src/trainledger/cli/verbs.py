"""The verbs of the command line: each a service and a report of the same name."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple


class Verb(NamedTuple):
    """A verb and what it answers, for the help; its modules are imported when it is used.

    name   one word, or two for one of several verbs of a kind: `baseline run`
    """

    name: str
    summary: str
    runs: bool = False
    """Whether it takes long enough to say how far it is: its `run` then takes `progress`."""

    @property
    def words(self) -> tuple[str, ...]:
        """What is typed."""
        return tuple(self.name.split())

    @property
    def module(self) -> str:
        """The name of its modules."""
        return "_".join(self.words)

    @property
    def service(self) -> ModuleType:
        """The module with Request, Response and run."""
        return importlib.import_module(f"trainledger.service.{self.module}")

    @property
    def report(self) -> ModuleType:
        """The module with `document`."""
        return importlib.import_module(f"trainledger.report.{self.module}")


VERBS: tuple[Verb, ...] = (
    Verb(name="model", summary="The model as read: family, total and active parameters, shapes."),
    Verb(name="states", summary="The training states under ZeRO-0..3 side by side, per GPU, with fit and traffic."),
    Verb(name="ledger", summary="One plan in full: every line it holds and moves; --explain one, --sweep a number."),
    Verb(name="plan", summary="Search: the best plans for a number of GPUs, and why the others are not among them."),
    Verb(
        name="prove", summary="Run the plan on this machine and compare every line with what was measured.", runs=True
    ),
    Verb(name="train", summary="Train a plan on text: checkpoints, held-out losses, metrics, a report.", runs=True),
    Verb(name="checkpoint verify", summary="Checkpoints read whole: which are as they were written."),
    Verb(name="checkpoint export", summary="The weights of a checkpoint as safetensors and config.json."),
    Verb(
        name="baseline run",
        summary="A layout at several numbers of ranks: throughput, memory, traffic and scaling, recorded.",
        runs=True,
    ),
    Verb(name="baseline compare", summary="One baseline in the place of another: accepted or rejected.", runs=True),
    Verb(name="baseline history", summary="What the run book has."),
    Verb(name="baseline export", summary="Records of the run book as JSON, or their steps as CSV."),
    Verb(name="baseline import", summary="Exported records into a run book."),
    Verb(name="diff", summary="Two plans: the lines that moved."),
    Verb(name="check", summary="What stands against a plan, with evidence and knobs; or an out-of-memory message."),
    Verb(name="predict", summary="A prediction for each row of a table, from its inputs alone."),
    Verb(name="score", summary="The same, graded against what was measured or printed."),
    Verb(name="list", summary="Models, clusters, accelerators, engines, optimizers, precisions, rules."),
)
