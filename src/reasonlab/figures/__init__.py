"""Figures: one file per figure, drawn from the run record alone."""
