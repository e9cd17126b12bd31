"""Answers as people and programs read them: JSON, plain aligned text, and the same text in colour at a terminal.

A report takes the answer as JSON has it, so no figure can be in the text that is not in the JSON.
"""
