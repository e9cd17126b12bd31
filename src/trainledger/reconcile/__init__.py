"""Predicted against measured, line by line; what no line claims is named."""
