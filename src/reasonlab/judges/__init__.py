"""Judges: models that score answers (outcome) or steps (process); their training, their targets, their benchmarks."""
