"""What a trajectory-aware process judge is trained towards (ReasonFlux-PRM).

For the steps of a thought s_1 … s_T that ends in a response a_1 … a_M there are three opinions about each step,

    alignment    r_t = max_j cos(Φ(s_t), Φ(a_j))                          does it serve what the response says?
    quality      r_t in [0, 1], from `labels.py`                           is it right?
    coherence    r_t = exp(σ_t / τ) / (exp(σ_t / τ) + Σ_{s' ∈ N} exp(cos(Φ(s_{t−1}), Φ(s')) / τ)),
                 σ_t = cos(Φ(s_{t−1}), Φ(s_t))                             does it follow from the step before?

which are fused by weights that come from the opinions themselves, so that the highest one weighs most:

    r_t^step = Σ_k w_k r_t^k,   w = softmax(r_t^align, r_t^qual, r_t^coh)

Where the description leaves room, this is what we do.

- Coherence is published as the logarithm of the fraction above. A log-probability is never above 0, so it would always
  get the smallest weight and pull the target below 0. `exp` takes it back to the probability that it is the logarithm
  of: the chance of picking the true next step among the others. That lies in [0, 1] like its companions, and means
  something (1 / (|N| + 1) is guessing); a sigmoid of it could never exceed one half. The positive is part of the
  denominator; without it the fraction would not be a probability.
- The step before the first one is the question.
- A cosine below 0 counts as 0: nothing in common is the least there is.
- The steps of the response itself are aligned with themselves, so for them alignment says nothing; their target is
  their quality.
- Negatives are steps of other problems, drawn by a key of the response, never one that also occurs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

import numpy as np

from reasonlab.errors import UserError
from reasonlab.judges.encoders import Encoder, Floats, HashedNgrams
from reasonlab.judges.exact_labels import exact_labels, solution_for
from reasonlab.judges.labels import StepLabels
from reasonlab.judges.steps import Rule, spans_of
from reasonlab.judges.templates import TemplateReward
from reasonlab.judges.types import Candidate, Labelled
from reasonlab.keys import key

TAU = 0.1
NEGATIVES = 16


def alignment(thought: Floats, response: Floats) -> Floats:
    """For each step of a thought (rows, unit vectors) the cosine with the step of the response that is nearest."""
    nearest: Floats = np.clip((thought @ response.T).max(axis=1), 0.0, 1.0)
    return nearest


def coherence(before: Floats, steps: Floats, negatives: Floats, tau: float = TAU) -> Floats:
    """For each step the probability of picking it, among the negatives, as the one after the step before it."""
    if tau <= 0:
        raise ValueError(f"the temperature of coherence must be positive, not {tau}")
    positive = (before * steps).sum(axis=1)
    others = before @ negatives.T
    # exp(x_0) / Σ exp(x) = 1 / Σ exp(x − x_0); far better or worse negatives take it to 0 or 1 without harm
    with np.errstate(over="ignore"):
        chance: Floats = 1 / (1 + np.exp((others - positive[:, None]) / tau).sum(axis=1))
    return chance


def fused(*opinions: Floats) -> Floats:
    """Σ_k softmax(r)_k r_k for opinions r_1, r_2, … of the same steps."""
    r = np.stack(opinions)
    weights = np.exp(r - r.max(axis=0))
    together: Floats = (weights * r).sum(axis=0) / weights.sum(axis=0)
    return together


@dataclass(frozen=True, slots=True)
class StepTargets:
    """The opinions about each step of a candidate and the fused target; alignment and coherence are nan for the steps
    of the response, which only have a quality."""

    alignment: Floats
    quality: Floats
    coherence: Floats
    fused: Floats

    def labelled(self, candidate: Candidate, final: float | None = None) -> Labelled:
        return Labelled(candidate, tuple(map(float, self.fused)), final)


def step_targets(
    candidates: Sequence[Candidate],
    quality: Sequence[StepLabels],
    encoder: Encoder,
    rule: Rule = "blank_line",
    references: Sequence[Sequence[str]] | None = None,
    tau: float = TAU,
    negatives: int = NEGATIVES,
    seed: int = 0,
) -> list[StepTargets]:
    """Targets for every candidate. `references` stand in for the steps of the responses, where those say too little."""
    taken_apart = [thought_and_response(candidate, rule) for candidate in candidates]
    other_steps = _steps_by_problem(candidates, [thought for thought, _ in taken_apart])
    chosen: list[tuple[list[str], list[str]]] = []
    for i, (candidate, (thought, response)) in enumerate(zip(candidates, taken_apart, strict=True)):
        if len(quality[i].values) != len(thought) + len(response):
            raise UserError(
                f"a response to {candidate.problem} has {len(thought) + len(response)} steps and "
                f"{len(quality[i].values)} labels",
                "Label and cut with the same rule",
            )
        reference = list(references[i]) if references is not None else response
        if thought and not reference:
            raise UserError(
                f"a response to {candidate.problem} says nothing after its thought", "Leave it out or give references"
            )
        others = _unrelated(candidate, thought, other_steps, negatives, seed) if thought else []
        chosen.append((reference, others))
    questions = [candidate.question for candidate in candidates]
    thoughts = [thought for thought, _ in taken_apart]
    vectors = _Vectors(encoder, chain(questions, *thoughts, *chain.from_iterable(chosen)))
    targets = []
    for candidate, (thought, _), (reference, others), labels in zip(
        candidates, taken_apart, chosen, quality, strict=True
    ):
        values = np.array(labels.values)
        align, cohere, together = np.full(len(values), np.nan), np.full(len(values), np.nan), values.copy()
        if thought:
            steps, n = vectors.rows(thought), len(thought)
            before = vectors.rows([candidate.question, *thought[:-1]])
            align[:n] = alignment(steps, vectors.rows(reference))
            cohere[:n] = coherence(before, steps, vectors.rows(others), tau)
            together[:n] = fused(align[:n], values[:n], cohere[:n])
        targets.append(StepTargets(align, values, cohere, together))
    return targets


def tiny_trajectories(
    candidates: Sequence[Candidate],
    follow: Callable[[Sequence[Candidate]], Sequence[TemplateReward]],
    seed: int = 0,
) -> list[Labelled]:
    """What a trajectory-aware judge of the tiny world learns: each step towards the fusion of its alignment with the
    worked solution, its exact quality and its coherence; the whole towards the share of right answers when others
    `follow` its strategy (`templates.tiny_rewards`)."""
    quality = [exact_labels(candidate) for candidate in candidates]
    references = [worked_reference(candidate) for candidate in candidates]
    targets = step_targets(candidates, quality, HashedNgrams(), "tiny", references, seed=seed)
    rewards = follow(candidates)  # last, because it takes longest: what is wrong with a pool shows before
    return [
        target.labelled(candidate, reward.share)
        for candidate, target, reward in zip(candidates, targets, rewards, strict=True)
    ]


def thought_and_response(candidate: Candidate, rule: Rule) -> tuple[list[str], list[str]]:
    """The steps up to `</think>` and those after it; a response without it is a thought throughout."""
    _, marker, after = candidate.response.rpartition("</think>")
    border = len(candidate.response) - len(after) if marker else len(candidate.response)
    spans = spans_of(candidate, rule)
    texts = [bare(candidate.response[span.start : span.end]) for span in spans]
    inside = sum(span.end <= border for span in spans)
    return texts[:inside], texts[inside:]


def worked_reference(candidate: Candidate) -> list[str]:
    """The steps of the worked solution and the answer, as a response for problems of the tiny world: what the tiny
    models themselves say after a thought is no more than the answer."""
    solution = solution_for(candidate)
    return [*(f"{step.expression}={step.result}" for step in solution.steps), f"Answer:{solution.answer}"]


def bare(step: str) -> str:
    """A step without what stands around it."""
    return step.replace("<think>", "").replace("</think>", "").replace("<eos>", "").strip().removesuffix(";")


def _steps_by_problem(candidates: Sequence[Candidate], thoughts: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """All steps of all thoughts with their problems, in an order that does not depend on the pool's."""
    return sorted({(c.problem, step) for c, thought in zip(candidates, thoughts, strict=True) for step in thought})


def _unrelated(
    candidate: Candidate, own: Sequence[str], steps: Sequence[tuple[str, str]], count: int, seed: int
) -> list[str]:
    rng = Random(key(seed, "negatives", candidate.problem, candidate.response))
    known = set(own)
    chosen: list[str] = []
    for place in _tries(rng, len(steps), 20 * count):
        problem, step = steps[place]
        if problem != candidate.problem and step not in known:
            known.add(step)
            chosen.append(step)
        if len(chosen) == count:
            return chosen
    raise UserError(
        f"{len(chosen)} steps of other problems are too few negatives for {candidate.problem}",
        f"Give a pool with more problems, or ask for fewer than {count} negatives",
    )


def _tries(rng: Random, places: int, quick: int) -> Iterator[int]:
    """Nearly all steps are of other problems, so a few draws are enough; where they are not, every place is tried."""
    for _ in range(quick):
        yield rng.randrange(places)
    yield from rng.sample(range(places), places)


class _Vectors:
    """Each distinct text encoded once."""

    def __init__(self, encoder: Encoder, texts: Iterable[str]) -> None:
        distinct = list(dict.fromkeys(texts))
        self.place = {text: i for i, text in enumerate(distinct)}
        self.matrix = encoder.encode(distinct)

    def rows(self, texts: Sequence[str]) -> Floats:
        return self.matrix[[self.place[text] for text in texts]]
