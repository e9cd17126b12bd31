"""`model` as text."""

from __future__ import annotations

from trainledger.report.document import BLANK, Column, Document, Text, left, table
from trainledger.report.words import Answer, percent, whole
from trainledger.units import format_count


def document(answer: Answer) -> Document:
    """Totals, then every distinct tensor."""
    total, active = answer["total_params"], answer["active_params"]
    visited = f", {format_count(active)} active" if active != total else ""
    kinds = ", ".join(f"{block['num_layers']} {block['kind']}" for block in answer["blocks"])
    shape = (
        f"hidden {answer['hidden_size']}, vocabulary {answer['vocab_size']}"
        f"{', embedding tied to the output' if answer['tied'] else ''}"
    )
    tensors = [
        [
            tensor["name"],
            "x".join(map(str, tensor["shape"])),
            str(tensor["copies"]),
            str(tensor["layers"]),
            whole(tensor["params"]),
            percent(tensor["share"]),
        ]
        for tensor in answer["tensors"]
    ]
    copied = any(tensor["copies"] > 1 for tensor in answer["tensors"])
    if not copied:
        tensors = [[*row[:2], "", *row[3:]] for row in tensors]
    mtp = answer["mtp_params"]
    return [
        Text(f"{answer['name']} ({answer['family']}): {format_count(total)} parameters{visited}", "answer"),
        Text(f"total {whole(total)}, active {whole(active)}{f', and {whole(mtp)} in MTP layers' if mtp else ''}"),
        *([] if answer["params_only"] else [Text(f"{answer['num_layers']} layers ({kinds}), {shape}")]),
        BLANK,
        table(
            [
                left("tensor"),
                Column("shape"),
                Column("copies"),
                Column("layers"),
                Column("parameters"),
                Column("share"),
            ],
            tensors,
        ),
        BLANK,
        Text(f"source: {answer['source']}", "dim"),
        *(Text(f"note: {note}", "dim") for note in answer["notes"]),
    ]
