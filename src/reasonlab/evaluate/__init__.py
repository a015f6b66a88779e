"""Evaluation: one evaluator for training curves and for `reasonlab eval`, and the statistics of its scores."""
