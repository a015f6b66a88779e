"""Studies: arms and seeds of runs, one figure, verdicts. So far the demo, the smallest of them."""
