"""A document as aligned lines: what a pipe or a file gets, and what a terminal colours."""

from __future__ import annotations

from trainledger.report.document import Document, Table, Text

GAP = "  "


def lines(document: Document) -> list[Text]:
    """Every line with its style; tables are aligned, and nothing is wrapped or cut."""
    found: list[Text] = []
    for part in document:
        found += [Text(spelled(part.text), part.style)] if isinstance(part, Text) else _table(part)
    return found


def spelled(text: str) -> str:
    r"""The text with whatever would move the cursor or recolour the screen spelled out; names may hold anything.

    >>> spelled("llama\x1b[31m\n")
    'llama\\x1b[31m\\n'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def render(document: Document) -> str:
    """The document as text, each line ended.

    >>> from trainledger.report.document import Column, left, table
    >>> print(render([table([left("state"), Column("bytes")], [["weights", "2 B"], ["gradients", "16 B"]])]), end="")
    state      bytes
    weights      2 B
    gradients   16 B
    """
    return "".join(f"{line.text}\n" for line in lines(document))


def _table(part: Table) -> list[Text]:
    titles = tuple(spelled(column.title) for column in part.columns)
    rows = [tuple(map(spelled, row)) for row in part.rows]
    grid = [titles, *rows] if any(titles) else rows
    widths = [max((len(row[index]) for row in grid), default=0) for index in range(len(part.columns))]
    styles = part.styles or ("",) * len(part.rows)
    if any(titles):
        styles = ("title", *styles)
    laid = [
        GAP.join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, part.columns, strict=True)
        ).rstrip()
        for row in grid
    ]
    return [Text(text, style) for text, style in zip(laid, styles, strict=True)]
