"""Step labels by a language model behind an OpenAI-compatible endpoint.

The judge reads the problem and the numbered steps, thinks, and ends with a JSON object: a score in [0, 1] for each
step, and the number of the first wrong one. The reply is read strictly: another number of scores, a score outside
[0, 1], or a first wrong step that the scores contradict is no label. Such a reply is asked for once more with another
seed, and then counted as missing with its reason; nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reasonlab.judges.labels import ALL_RIGHT, HALF, StepLabels
from reasonlab.judges.prompt_files import filled
from reasonlab.judges.steps import Rule, steps_of
from reasonlab.judges.types import Candidate, Progress
from reasonlab.keys import key
from reasonlab.rollout.endpoint import Completion, Endpoint, Job
from reasonlab.rollout.types import Sampling

SAMPLING = Sampling(temperature=0.6, top_p=0.95, max_tokens=4096)
_LAST_OBJECT = re.compile(r"(\{[^{}]*\})\s*(?:```)?\s*\Z")


@dataclass(frozen=True, slots=True)
class Judged:
    """What the judge said of a candidate: labels, or why there are none."""

    labels: StepLabels | None
    failure: str = ""


def judge_prompt(candidate: Candidate, rule: Rule, show_answer: bool = False) -> str:
    steps = steps_of(candidate, rule)
    reference = f"\n<reference_answer>\n{candidate.answer}\n</reference_answer>\n" if show_answer else ""
    written = "\n".join(f'<step number="{i}">\n{step.strip()}\n</step>' for i, step in enumerate(steps))
    return filled(
        "label_steps.txt", question=candidate.question, steps=written, count=str(len(steps)), reference=reference
    )


def llm_labels(
    candidates: Sequence[Candidate],
    endpoint: Endpoint,
    rule: Rule = "blank_line",
    sampling: Sampling = SAMPLING,
    attempts: int = 2,
    show_answer: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    keep: Callable[[Candidate, StepLabels], None] | None = None,
) -> list[Judged]:
    """Labels for every candidate, in order. With `show_answer` the judge sees the right answer where it is known.
    `keep` is called with the labels of a candidate as soon as they are there."""
    counts = [len(steps_of(candidate, rule)) for candidate in candidates]
    found = [Judged(None, "" if count else "no steps") for count in counts]
    for attempt in range(attempts):
        asked = [i for i, count in enumerate(counts) if count and found[i].labels is None]
        prompts = [judge_prompt(candidates[i], rule, show_answer and bool(candidates[i].answer)) for i in asked]
        names = [key(seed, "llm-labels", candidates[i].problem, candidates[i].response, attempt) for i in asked]
        jobs = [Job(prompt, name) for prompt, name in zip(prompts, names, strict=True)]
        for place, completion in endpoint.complete_all(jobs, sampling):
            i = asked[place]
            found[i] = read_labels_reply(completion, counts[i])
            if keep and (labels := found[i].labels) is not None:
                keep(candidates[i], labels)
            if progress and (found[i].labels is not None or attempt == attempts - 1):
                progress(1)
    return found


def read_labels_reply(completion: Completion, steps: int) -> Judged:
    """The labels in a reply, or what is wrong with it."""
    if completion.failure:
        return Judged(None, completion.failure)
    if completion.finish == "length":
        return Judged(None, "the reply was cut at the token limit")
    last = _LAST_OBJECT.search(completion.text.rpartition("</think>")[2])
    if last is None:
        return Judged(None, "the reply does not end with a JSON object")
    try:
        said = json.loads(last[1])
    except ValueError:
        return Judged(None, "the object at the end of the reply is not JSON")
    scores, first = said.get("scores"), said.get("first_wrong")
    if set(said) != {"scores", "first_wrong"} or not isinstance(scores, list) or not _is_whole(first):
        return Judged(None, "the object has not exactly a list `scores` and a whole number `first_wrong`")
    if len(scores) != steps:
        return Judged(None, f"{len(scores)} scores for {steps} steps")
    if not all(_is_number(score) and 0 <= score <= 1 for score in scores):
        return Judged(None, "a score is not a number from 0 to 1")
    labels = StepLabels.of(scores)
    if labels.first_wrong != first:
        seen = "none" if labels.all_right else f"step {labels.first_wrong}"
        named = "none" if first == ALL_RIGHT else f"step {first}"
        return Judged(None, f"the first wrong step is {named}, but the first score below {HALF} is {seen}")
    return Judged(labels)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
