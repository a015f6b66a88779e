"""The learner, the loop around it, prompt sampling and checkpoints."""
