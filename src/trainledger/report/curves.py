"""A run as one page of curves: everything that it needs is in it, so that it opens on a machine without a network."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from trainledger.report.plain import render
from trainledger.report.train import document
from trainledger.runtime.train.metrics import Line
from trainledger.units import format_bytes

MOST_ROWS = 500
"""Of the table: evenly chosen, beside steps of which there is something to say. The curves have all steps."""

MIB = 1 << 20

Value = float | None


class Curve(NamedTuple):
    """One curve of a chart.

    field    of a Line, or of a part of one
    per      what a value is divided by
    points   shown as points, for what is not measured in every step
    """

    label: str
    field: str
    per: int = 1
    points: bool = False

    def of(self, line: Line) -> Value:
        """Its value in a step; None where there is none."""
        value: Any = line
        for name in self.field.split("."):
            value = None if value is None else getattr(value, name)
        return None if value is None else value / self.per


class Chart(NamedTuple):
    """Curves that share an axis; `log` where factors matter."""

    id: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: bool = False


CHARTS = (
    Chart("loss", "Loss", "nats per token", (Curve("training", "loss"), Curve("held-out", "held_out", points=True))),
    Chart("speed", "Throughput", "tokens/s", (Curve("tokens/s", "tokens_per_s"),)),
    Chart("memory", "Memory of the rank that holds most", "MiB", (Curve("held", "memory_bytes", per=MIB),)),
    Chart("norm", "Norm of the gradients before clipping", "norm", (Curve("norm", "norm"),)),
    Chart("rate", "Learning rate", "rate", (Curve("learning rate", "learning_rate"),)),
    Chart("scale", "Loss scale", "factor", (Curve("scale", "scale"),), log=True),
    Chart(
        "fp8",
        "Casts to FP8, of all operands together",
        "share",
        (Curve("saturated", "fp8.saturated", points=True), Curve("flushed to zero", "fp8.flushed", points=True)),
    ),
)

COLUMNS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("step", lambda line: str(line.step)),
    ("loss", lambda line: _number(line.loss)),
    ("held-out", lambda line: _number(line.held_out)),
    ("norm", lambda line: _number(line.norm)),
    ("learning rate", lambda line: _number(line.learning_rate)),
    ("tokens", lambda line: f"{line.tokens:,}"),
    ("tokens/s", lambda line: f"{line.tokens_per_s:,.0f}"),
    ("memory", lambda line: format_bytes(line.memory_bytes)),
    ("scale", lambda line: f"{_number(line.scale)}{' skipped' if line.skipped else ''}"),
    ("saturated", lambda line: _number(line.fp8 and line.fp8.saturated)),
    ("flushed", lambda line: _number(line.fp8 and line.fp8.flushed)),
    ("checkpoint", lambda line: f"{line.blocked_s:.3f} s" if line.checkpoint else ""),
    ("", lambda line: "; ".join(line.said)),
)


def page(
    title: str, facts: Mapping[str, str], steps: Sequence[Line], answer: Mapping[str, Any] | None, wrong: str
) -> str:
    """The page as HTML.

    facts    what is said in a line under the title
    answer   what `train` answers; None for a run that ended with an error, which `wrong` is
    """
    charts = [chart for chart in CHARTS if any(curve.of(line) is not None for curve in chart.curves for line in steps)]
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="dim">{html.escape(about)}</p>',
        f'<p class="bad">{html.escape(wrong)}</p>' if wrong else "",
        *(f'<h2>{chart.title}</h2><div id="{chart.id}"></div>' for chart in charts),
        "<h2>The answer</h2>" + f'<div class="scroll"><pre>{html.escape(render(document(answer)))}</pre></div>'
        if answer
        else "",
        "<h2>Steps</h2>",
        _table(steps),
        f'<p class="dim">Charts by uPlot, whose licence is: {html.escape(_asset("uplot/LICENSE"))}</p>',
    ]
    return _HTML.format(
        title=html.escape(title),
        css=_asset("uplot/uPlot.min.css") + _asset("curves.css"),
        body="\n".join(filter(None, parts)),
        numbers=_numbers(charts, steps),
        js=_asset("uplot/uPlot.iife.min.js") + _asset("curves.js"),
    )


_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
{body}
<script id="numbers" type="application/json">{numbers}</script>
<script>{js}</script>
</body>
</html>
"""


def _numbers(charts: Sequence[Chart], steps: Sequence[Line]) -> str:
    """What the script draws, as JSON that cannot end its element."""
    told = {
        "steps": [line.step for line in steps],
        "charts": [
            {
                "id": chart.id,
                "unit": chart.unit,
                "log": chart.log,
                "series": [
                    {"label": curve.label, "points": curve.points, "values": [_short(curve.of(line)) for line in steps]}
                    for curve in chart.curves
                ],
            }
            for chart in charts
        ],
    }
    return msgspec.json.encode(told).decode().replace("<", "\\u003c")


def _short(value: Value) -> Value:
    """Six digits are more than a curve shows."""
    return None if value is None else float(f"{value:.6g}")


def _table(steps: Sequence[Line]) -> str:
    """Steps as a table: all, or some with those that have something to say."""
    every = max(1, len(steps) // MOST_ROWS)
    rows = [line for at, line in enumerate(steps) if at % every == 0 or line.held_out is not None or line.said]
    columns = [(name, of) for name, of in COLUMNS if any(of(line) not in ("", "-") for line in rows)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(of(line))}</td>" for _, of in columns) + "</tr>\n" for line in rows
    )
    left_out = f'<p class="dim">{len(steps) - len(rows)} of {len(steps)} steps are left out here.</p>'
    shown = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    return shown + (left_out if len(rows) < len(steps) else "")


def _number(value: Value) -> str:
    return "-" if value is None else f"{value:.6g}"


def _asset(name: str) -> str:
    return resources.files("trainledger.report").joinpath("assets", name).read_text(encoding="utf-8")
