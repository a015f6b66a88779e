"""The engine: token ids in, token ids out, on the learner's own weights."""
