"""One file for each method, named after it. A method turns graded groups into examples and logprobs into a loss."""

from __future__ import annotations

from reasonlab.config import Config, DpoConfig, GrpoConfig, MirrorDescentConfig, RestConfig
from reasonlab.methods.dpo import Dpo
from reasonlab.methods.group import Method
from reasonlab.methods.grpo import Grpo
from reasonlab.methods.mirror_descent import MirrorDescent
from reasonlab.methods.rest import Rest
from reasonlab.methods.sft import SupervisedFineTuning


def build_method(config: Config) -> Method:
    """The method that a recipe names."""
    match config.method:
        case GrpoConfig():
            return Grpo(config.method, config.rollout.max_tokens)
        case MirrorDescentConfig():
            return MirrorDescent(config.method)
        case DpoConfig():
            return Dpo(config.method)
        case RestConfig():
            return Rest(config.method)
        case _:
            return SupervisedFineTuning()
