"""What stands behind the evaluator: something that turns prompts into responses.

The engine with a model of ours and an endpoint somewhere else look the same from here: a question goes in as text, a
response comes out as text with its number of tokens and the reason why it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from reasonlab.errors import UserError
from reasonlab.model.text_format import Prompt, TextFormat
from reasonlab.rollout.endpoint import Endpoint, Job
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling

FAILED = "error"  # the finish of a response that never came
UNKNOWN_TOKENS = -1  # an endpoint that does not count

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """One question, as the benchmark's template puts it, and the keys of the answers that are wanted."""

    question: str
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. `failure` says why there is none (then `finish` is "error")."""

    text: str
    tokens: int
    finish: str
    failure: str = ""


Placed = tuple[int, int, Response]
"""The number of the question, the number of its key, and the response."""


class Responder(Protocol):
    def respond(
        self, asks: Sequence[Ask], sampling: Sampling, progress: Progress | None = None
    ) -> Iterator[Sequence[Placed]]:
        """The responses in whatever order they come, together with those that come at the same time."""
        ...


class EngineResponder:
    """Our own engine. `at_once` limits how many answers are sampled before the first of them are handed out."""

    def __init__(self, engine: Engine, text_format: TextFormat, at_once: int | None = None) -> None:
        self.engine, self.format, self.at_once = engine, text_format, at_once

    def respond(
        self, asks: Sequence[Ask], sampling: Sampling, progress: Progress | None = None
    ) -> Iterator[Sequence[Placed]]:
        prompts = self.format.prompts([ask.question for ask in asks])
        self._check_room(prompts, sampling)
        requests = [Request(prompt.ids, ask.keys) for prompt, ask in zip(prompts, asks, strict=True)]
        for part in _parts([len(ask.keys) for ask in asks], self.at_once):
            groups = self.engine.generate([requests[i] for i in part], sampling, progress)
            flat = [(i, n, rollout) for i, group in zip(part, groups, strict=True) for n, rollout in enumerate(group)]
            texts = self.format.responses([rollout.ids for _, _, rollout in flat])
            yield [
                (i, n, self._response(prompts[i], text, rollout))
                for (i, n, rollout), text in zip(flat, texts, strict=True)
            ]

    @staticmethod
    def _response(prompt: Prompt, text: str, rollout: Rollout) -> Response:
        return Response(prompt.opening + text, prompt.opening_tokens + len(rollout.ids), rollout.finish)

    def _check_room(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        room = self.engine.model.config.max_positions
        longest = max((len(prompt.ids) for prompt in prompts), default=0)
        if longest + sampling.max_tokens > room:
            raise UserError(
                f"the longest prompt has {longest:,} tokens and answers may have {sampling.max_tokens:,}, "
                f"but the model reads {room:,} at most",
                f"Give --max-tokens {room - longest}" if longest < room else "Leave out the longest problems",
            )


def _parts(sizes: Sequence[int], most: int | None) -> Iterator[range]:
    """Runs of questions that together want about `most` answers."""
    start, total = 0, 0
    for end, size in enumerate(sizes, 1):
        total += size
        if end == len(sizes) or (most is not None and total >= most):
            yield range(start, end)
            start, total = end, 0


class EndpointResponder:
    """An OpenAI-compatible server. Every answer is a request of its own, so one that fails costs no other."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def respond(
        self, asks: Sequence[Ask], sampling: Sampling, progress: Progress | None = None
    ) -> Iterator[Sequence[Placed]]:
        places = [(i, number) for i, ask in enumerate(asks) for number in range(len(ask.keys))]
        jobs = [Job(asks[i].question, asks[i].keys[number]) for i, number in places]
        for index, completion in self.endpoint.complete_all(jobs, sampling):
            if progress:
                progress(1)
            tokens = UNKNOWN_TOKENS if completion.tokens is None else completion.tokens
            finish = FAILED if completion.failure else completion.finish
            yield [(*places[index], Response(completion.text, tokens, finish, completion.failure))]
