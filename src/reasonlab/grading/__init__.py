"""Answers and verdicts."""
