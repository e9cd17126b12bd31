"""Predict the rows of a table from their inputs alone, and grade the predictions against what was printed."""

from __future__ import annotations

from trainledger.scoring.predict import predict_csv
from trainledger.scoring.score import score_csv

__all__ = ["predict_csv", "score_csv"]
