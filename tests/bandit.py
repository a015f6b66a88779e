"""A policy small enough to write down, and its exact gradients.

The policy has two tokens. A response ends when a token comes twice running, or after four tokens: eight responses in
all. Its logits are a table with one row for each prefix, so log π and its gradient are known exactly:
∂ log π(token | prefix) / ∂ logits[prefix] = onehot(token) − softmax(logits[prefix]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reasonlab.config import VARIANTS, GrpoConfig, MirrorDescentConfig, RestConfig
from reasonlab.grading.grade import Grade, Verdict
from reasonlab.methods.group import Group, Method
from reasonlab.methods.grpo import Grpo
from reasonlab.methods.mirror_descent import MirrorDescent
from reasonlab.methods.rest import Rest
from reasonlab.methods.sft import SupervisedFineTuning
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.train.batch import Example, Totals, pack

Array = NDArray[np.float64]
Response = tuple[int, ...]
MAX_TOKENS = 4
PROBLEM = Problem("bandit", "?", "0", "bandit")


def _responses(prefix: Response = ()) -> Iterator[Response]:
    if len(prefix) == MAX_TOKENS or prefix[-2:] in ((0, 0), (1, 1)):
        yield prefix
    else:
        for token in (0, 1):
            yield from _responses((*prefix, token))


RESPONSES = list(_responses())
PREFIXES = sorted({r[:t] for r in RESPONSES for t in range(len(r))})
ROWS = {prefix: i for i, prefix in enumerate(PREFIXES)}
_rng = np.random.default_rng(7)
THETA: Array = _rng.normal(0, 0.8, (len(PREFIXES), 2))
OLD: Array = THETA + _rng.normal(0, 0.35, THETA.shape)  # the policy that sampled, some steps behind
REFERENCE: Array = THETA + _rng.normal(0, 0.5, THETA.shape)


def table(theta: Array) -> Array:
    """log π of each token after each prefix."""
    shifted = theta - theta.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def token_logprobs(theta: Array, response: Response) -> Array:
    return np.array([table(theta)[ROWS[response[:t]], token] for t, token in enumerate(response)])


def scores(theta: Array, response: Response) -> Array:
    """∇ log π of each token: [tokens, prefixes, 2]."""
    gradient = np.zeros((len(response), *theta.shape))
    for t, token in enumerate(response):
        row = ROWS[response[:t]]
        gradient[t, row] = -np.exp(table(theta)[row])
        gradient[t, row, token] += 1
    return gradient


def probability(theta: Array, response: Response) -> float:
    return float(np.exp(token_logprobs(theta, response).sum()))


def rollout(response: Response, policy: Array) -> Rollout:
    return Rollout([0], list(response), token_logprobs(policy, response).astype(np.float32), "stop")


def group(
    responses: Sequence[Response],
    rewards: Sequence[float],
    policy: Array = OLD,
    verdicts: Sequence[Verdict] | None = None,
    reference: Array | None = None,
) -> Group:
    verdicts = verdicts or ["correct" if reward > 0 else "wrong" for reward in rewards]
    return Group(
        PROBLEM,
        [rollout(r, policy) for r in responses],
        [Grade(verdict, None, "test") for verdict in verdicts],
        np.array(rewards, dtype=float),
        None if reference is None else [token_logprobs(reference, r).astype(np.float32) for r in responses],
    )


REWARDS = ([1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.0])
PICKED = ([RESPONSES[i] for i in (0, 2, 5, 7)], [RESPONSES[i] for i in (1, 1, 3, 4)])


def two_groups(policy: Array = OLD, reference: Array | None = None) -> list[Group]:
    return [group(p, r, policy, reference=reference) for p, r in zip(PICKED, REWARDS, strict=True)]


def flat_logprobs(theta: torch.Tensor, examples: Sequence[Example]) -> torch.Tensor:
    logprobs = theta.log_softmax(-1)
    parts = [
        logprobs[[ROWS[tuple(e.response[:t].tolist())] for t in range(len(e.response))], e.response] for e in examples
    ]
    return torch.cat(parts)


def loss_and_gradient(
    method: Method, examples: Sequence[Example], theta: Array = THETA, totals: Totals | None = None
) -> tuple[float, Array]:
    """The method's loss of the table policy, and its gradient by autograd."""
    parameter = torch.tensor(theta, requires_grad=True)
    batch = pack(examples, totals or Totals.of(examples), "cpu")
    loss, _ = method.loss(flat_logprobs(parameter, examples), batch)
    loss.backward()
    assert parameter.grad is not None
    return loss.item(), parameter.grad.numpy()


def weighted_scores(examples: Sequence[Example], weights: Sequence[Array], theta: Array = THETA) -> Array:
    """Σ w_{i,t} ∇ log π(y_{i,t}), the form of every policy gradient here."""
    total = np.zeros_like(theta)
    for e, w in zip(examples, weights, strict=True):
        total += np.tensordot(w, scores(theta, response_of(e)), axes=1)
    return total


def response_of(e: Example) -> Response:
    return tuple(e.response.tolist())


def grpo(variant: str, **options: Any) -> Grpo:
    return Grpo(GrpoConfig(type="grpo", variant=variant, **options), MAX_TOKENS)  # type: ignore[arg-type]


METHODS: dict[str, Method] = {
    "sft": SupervisedFineTuning(),
    "rest": Rest(RestConfig(type="rest", keep="correct")),
    "mirror_descent": MirrorDescent(MirrorDescentConfig(tau=0.4)),
    "mirror_descent_per_token": MirrorDescent(MirrorDescentConfig(tau=0.4, per_token=True)),
    **{variant: grpo(variant) for variant in VARIANTS},
}
