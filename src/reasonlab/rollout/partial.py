"""Partial rollouts (Kimi k1.5, §2.6): an iteration does not wait for its longest responses.

A pass gives every rollout at most `Sampling.segment_tokens` new tokens. What is not done then waits here and goes on
in the next pass, beside the new problems and with the weights of that time. A group leaves when all its members are
done, so a reward can be compared with those of the whole group; the report does not say what it does about siblings
that end in different iterations.

A response is thus a chain of segments y = (y^(n−m), …, y^(n)) in which tokens of segment y^(i) were sampled by policy
version i (`Rollout.versions`), which losses need that leave out older ones.

One last pass without a limit, `generate(engine, [], replace(sampling, segment_tokens=0))`, empties the buffer.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling


class PartialRollouts:
    """The buffer of Kimi k1.5's partial rollouts: groups with members that are not done."""

    def __init__(self) -> None:
        self._pending: list[tuple[Problem, Request]] = []  # oldest first; `started` holds all that was sampled

    def generate(
        self,
        engine: Engine,
        new: Sequence[tuple[Problem, Request]],
        sampling: Sampling,
        progress: Callable[[int], None] | None = None,
    ) -> list[tuple[Problem, list[Rollout]]]:
        """One pass over what is pending and what is new; returns the groups that are done, oldest first.

        `progress` is called with the number of rollouts that just ended, be their group done or not.
        """
        groups = [*self._pending, *new]
        sampled = engine.generate([request for _, request in groups], sampling, progress)
        done: list[tuple[Problem, list[Rollout]]] = []
        pending: list[tuple[Problem, Request]] = []
        for (problem, request), rollouts in zip(groups, sampled, strict=True):
            if any(rollout.finish == "unfinished" for rollout in rollouts):
                pending.append((problem, replace(request, started=rollouts)))
            else:
                done.append((problem, rollouts))
        self._pending = pending
        return done

    @property
    def pending_groups(self) -> int:
        return len(self._pending)

    @property
    def pending_rollouts(self) -> int:
        """Members that are not done; their finished siblings do not count."""
        return sum(
            rollout is not None and rollout.finish == "unfinished"
            for _, request in self._pending
            for rollout in request.started
        )

    def state(self) -> dict[str, Any]:
        """Everything that waits, as JSON and without loss."""
        return {
            "groups": [
                {
                    "problem": asdict(problem),
                    "prompt": list(request.prompt),
                    "keys": list(request.keys),
                    "rollouts": [_to_json(rollout) for rollout in request.started if rollout is not None],
                }
                for problem, request in self._pending
            ]
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` returned, in place of what is here."""
        self._pending = []
        for group in state["groups"]:
            prompt, keys = group["prompt"], group["keys"]
            rollouts = [_from_json(prompt, rollout) for rollout in group["rollouts"]]
            self._pending.append((Problem(**group["problem"]), Request(prompt, keys, rollouts)))


def _to_json(rollout: Rollout) -> dict[str, Any]:
    """Logprobs as base64 of little-endian float32: a quarter of the decimal digits that would be exact."""
    return {
        "ids": list(rollout.ids),
        "logprobs": b64encode(rollout.logprobs.astype("<f4").tobytes()).decode(),
        "versions": rollout.versions.tolist(),
        "finish": rollout.finish,
    }


def _from_json(prompt: Sequence[int], values: Mapping[str, Any]) -> Rollout:
    return Rollout(
        prompt=list(prompt),
        ids=values["ids"],
        logprobs=np.frombuffer(b64decode(values["logprobs"]), "<f4").astype(np.float32),
        finish=values["finish"],
        versions=np.array(values["versions"], np.int32),
    )
