"""The input cells of one row, read as text, whole numbers and flags; what cannot be read raises Unclear."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from trainledger.scoring.table import whole_number
from trainledger.scoring.words import Unclear

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True, slots=True)
class Cells:
    """A row's inputs by column; a column that the table lacks is blank."""

    inputs: Mapping[str, str]

    def text(self, column: str) -> str:
        """The cell as it stands."""
        return self.inputs.get(column, "")

    def words(self, column: str) -> str:
        """The cell in lower case, each run of blanks as one.

        >>> Cells({"system": "Megatron-LM   (fork)"}).words("system")
        'megatron-lm (fork)'
        """
        return " ".join(self.text(column).lower().split())

    def whole(self, column: str, least: int = 1) -> int | None:
        """The whole number in a cell, or None where it is blank.

        >>> Cells({"vocab": "128256.0"}).whole("vocab")
        128256
        """
        text = self.text(column)
        if not text:
            return None
        value = whole_number(text, least)
        if value is None:
            raise Unclear(f"{column} is {text!r}, not a whole number of at least {least}")
        return value

    def flag(self, column: str) -> bool | None:
        """What a cell that holds yes or no says, or None where it is blank.

        >>> Cells({"glu": "1"}).flag("glu"), Cells({}).flag("glu")
        (True, None)
        """
        text = self.words(column)
        if not text:
            return None
        if text not in (*YES, *NO):
            raise Unclear(f"{column} is {self.text(column)!r}; it takes 1 or 0")
        return text in YES
