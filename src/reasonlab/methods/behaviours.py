"""The four behaviours that the long-CoT warm-up of Kimi k1.5 (§2.2) wants to see in a response, and who shows them.

    planning      the steps are laid out before they are taken
    evaluation    an intermediate result is checked
    reflection    something is found wrong and done again, or the approach is revised
    exploration   another way is tried

English prose is searched for phrases that say so; a behaviour without its phrase is not found, and the phrases are kept
narrow, because a demonstration that does not show what it is chosen for teaches nothing. The tiny world's language
(`families/steps.py`) knows two of the four: a step with its reverse calculation (`12+5=17 check 17-5=12 ok`) is an
evaluation, and a check that fails with the step done again after it is a reflection. It has no mark for a plan and none
for another way, so planning and exploration are never found in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from reasonlab.methods.group import Group
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout

PLANNING, EVALUATION, REFLECTION, EXPLORATION = "planning", "evaluation", "reflection", "exploration"
BEHAVIOURS = (PLANNING, EVALUATION, REFLECTION, EXPLORATION)

_START = r"(?:^|(?<=[.!?…:;)>]\s)|(?<=>))[ \t]{0,4}(?:(?:but|so|oh|hmm|okay|ok|well|now|no|and)\b[,.]?\s)*"
_I = r"(?:I|we)"
_WILL = r"(?:I'll|we'll|(?:I|we) (?:will|should|need to|must|can|could|have to)|let's|let us|let me)"
_OFFER = r"(?:I'll|we'll|(?:I|we) (?:will|should|can|could)|let's|let us|let me)(?: just| quickly| also)?"
_WORK = (
    r"(?:answer|result|solution|work|calculation|computation|arithmetic|algebra|sum|product|value|step|steps"
    r"|equation|equations|condition|conditions|units|logic|reasoning)"
)
_WAY = r"(?:way|approach|method|strategy|route|idea|angle)"
_WORDS = r"(?:(?!\bif\b)[^.?!=:\n]){0,160}"
_GOES_ON = rf"\b{_WORDS}(?:[,;.]| and)\s(?:and )?(?:then|next|after that|afterwards|finally)\b{_WORDS}[.!?\n]"

_PROSE: dict[str, tuple[str, ...]] = {
    PLANNING: (
        # An intention that goes on: "First I'll find the slope, then …". What is calculated at once is no plan.
        rf"{_START}first,? {_WILL}{_GOES_ON}",
        rf"\b{_WILL} (?:first|start by|begin by){_GOES_ON}",
        r"\b(?:my|our|the) (?:plan|strategy|approach) (?:is|will be) to\b",
        r"\bhere(?:'s| is) (?:my|our|the|a) plan\b",
        rf"{_START}(?:the |my |our )?plan:\s",
        rf"\b{_WILL} (?:plan|outline|lay out) (?:the|my|our|a|how|what)\b",
        rf"\b{_WILL} (?:break|split) (?:this|it|the (?:problem|question|task)) (?:down )?into (?:\w+ )?"
        r"(?:parts|pieces|steps|cases|stages)\b",
    ),
    EVALUATION: (
        # "We need to check whether 91 is prime" is a step of the solution, not a look back at one.
        rf"\b{_OFFER} (?:double[- ]check|sanity[- ]check|verify)\b",
        rf"\b{_OFFER} check (?:this|it|by|again|(?:my|our|the|each|this|that) (?:\w+ )?{_WORK})\b",
        rf"{_START}to (?:double[- ]check|verify|check)(?: (?:this|that|it|(?:my|our|the) {_WORK}))?,",
        rf"{_START}(?:checking|verifying)(?:[:,]| (?:this|that|it|(?:my|our|the) {_WORK})\b)",
        rf"{_START}(?:(?:a|quick|double|sanity)[- ])+check[:,]",
        r"\b(?:does|do) (?:this|that|it|these) (?:really |actually )?make sense\?",
        r"\b(?:this|that|it|which|everything) checks out\b",
    ),
    REFLECTION: (
        rf"{_START}(?:wait|hold on|hang on)(?: ?[,!…—–-]|\.(?!\d)| a (?:moment|minute|second)\b)",
        rf"{_START}actually,",
        rf"\b{_I} (?:made|must have made|have made) (?:a|an) (?:\w+ )?(?:mistake|error|slip)\b",
        rf"\b{_I} (?:misread|miscounted|miscalculated|misunderstood|forgot to|overlooked|got that wrong)\b",
        # At the start of what is said: "a triangle that is not right" is no regret.
        rf"(?:{_START}|, (?:but |so )?)(?:that|this)(?:'s| is| was| looks| seems) "
        r"(?:wrong|incorrect|not (?:right|correct)(?![- ]angled)|a mistake)\b",
        rf"(?:{_START}|, (?:but |so )?)(?:that|this) (?:can't|cannot|can not|does(?:n't| not) (?:seem|look)) "
        r"(?:be )?(?:right|correct)\b",
        rf"\b{_WILL} (?:redo|recompute|recalculate|recount|reconsider|rethink|start over|start again|try again"
        r"|(?:correct|fix) (?:that|this|my)|go back and)\b",
        r"\bon second thought\b",
    ),
    EXPLORATION: (
        rf"{_START}alternatively,",
        rf"{_START}(?:another|a different|an alternative|one more) {_WAY} (?:is|would be|could be|might be)\b",
        rf"\b(?:another|a different|an alternative) {_WAY} to "
        r"(?:see|solve|do|find|compute|count|think|look at|approach|check|get the|prove|verify|calculate)\b",
        rf"\b(?:another|a different|an alternative) {_WAY} of (?:solving|counting|looking|seeing|thinking|doing)\b",
        rf"\b{_WILL} (?:try|consider|use|explore) (?:another|a different|an alternative|some other) (?:\w+ )?"
        rf"(?:{_WAY}|case|value|values)\b",
        rf"{_START}what if {_I} (?:try|tried|use|used|consider|look at|write|let|set|start|count)\b",
        rf"{_START}(?:let's|let me|let us) try (?!again\b|to\b)",
        rf"{_START}instead,? {_WILL}\b",
    ),
}
_PATTERNS = {
    name: re.compile("|".join(f"(?:{one})" for one in patterns), re.IGNORECASE | re.MULTILINE)
    for name, patterns in _PROSE.items()
}

# A step of the tiny world with its check; what follows the semicolon is the next step.
_CHECKED = re.compile(r"(?P<step>[0-9]+[-+*/%][0-9]+)=-?[0-9]+ check [-+*/%=0-9]+ (?P<verdict>ok|no)(?![a-z])")


def behaviours(text: str) -> frozenset[str]:
    """Which of the four behaviours a response shows, in English prose or in the tiny world's language."""
    text = text.replace("’", "'")
    found = {name for name, pattern in _PATTERNS.items() if pattern.search(text)}
    for check in _CHECKED.finditer(text):
        found.add(EVALUATION)
        if check["verdict"] == "no" and text.startswith(f";{check['step']}=", check.end()):
            found.add(REFLECTION)
    return frozenset(found)


def warmup_demonstrations(
    groups: Iterable[Group], decode: Callable[[Sequence[int]], str], per_problem: int = 1
) -> list[tuple[Problem, Rollout]]:
    """For each problem the correct, finished rollouts that show the most behaviours, at most `per_problem`.

    A rollout that shows none is no demonstration, and a problem without any gives none. Among equals the longest comes
    first: the warm-up is to prime long thinking, and what is too long is cut or punished later, in training. Groups of
    the same problem are taken together; the same response counts once. `decode` turns a rollout's ids into text.
    """
    found: dict[str, tuple[Problem, dict[tuple[int, ...], tuple[int, Rollout]]]] = {}
    for group in groups:
        _, responses = found.setdefault(group.problem.id, (group.problem, {}))
        for rollout, right in zip(group.rollouts, group.correct, strict=True):
            if right and rollout.finish == "stop" and (shown := behaviours(decode(rollout.ids))):
                responses.setdefault(tuple(rollout.ids), (len(shown), rollout))
    chosen: list[tuple[Problem, Rollout]] = []
    for problem, responses in found.values():
        best = sorted(responses.values(), key=lambda one: (-one[0], -len(one[1].ids)))  # stable: the first among twins
        chosen += [(problem, rollout) for _, rollout in best[:per_problem]]
    return chosen
