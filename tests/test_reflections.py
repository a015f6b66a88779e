"""Reflections: their language, wrong responses with planted mistakes, and the corpus that shows both."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import islice, product
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import KIND_SHARES, RULE_ONLY, WRONG_ONLY, Kind, Sample, corpus, prompt_text
from reasonlab.problems.families import FAMILIES, Solution, Step, Style, parse, render
from reasonlab.problems.problem import Problem
from reasonlab.problems.reflections import (
    MISTAKE_SHARES,
    Reflection,
    heuristic_only,
    hinted_prompt,
    parse_reflection,
    reflect,
    retrospective_prompt,
    spoiled,
)
from reasonlab.problems.tiny_world import Drawn, draw, problem_set, solution_of, verify
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.pretrain import Pretraining, experience, make_corpus, shard

LEVELS = (1, 2, 3, 4, 5)
DRAWS = 40  # of each family and level
STEPS: tuple[Style, ...] = ("worked", "checked")
POSITIONS = 1024  # of the tiny models
# Of the first 500 samples with seed 7, prompts and responses, before the corpus had reflections.
OLD_CORPUS = "dccc4ccad153cf936f21cd39fdb5d550df67ac68aa56900e542d60334f545db4"

each_family = pytest.mark.parametrize("family", FAMILIES)
tokenizer = TinyTokenizer.load()

SOLUTION = Solution((Step("*", 12, 5), Step("*", 12, 7), Step("+", 60, 84)), "144")


@cache
def sample(family: str) -> list[tuple[Drawn, Style, str]]:
    """Wrong responses to problems of one family, in every style and at every level."""
    rng = Random(key("wrong", family))
    drawn = [draw(family, level, "train", index) for level in LEVELS for index in range(DRAWS)]
    styles: tuple[Style, ...] = ("answer", *STEPS)
    return [(d, style, spoiled(d, rng, style, mistakes=0.1)) for d, style in product(drawn, styles)]


@cache
def mixture(kind: Kind | None = None, count: int = 4000) -> list[Sample]:
    return list(islice(corpus(3, kinds=KIND_SHARES if kind is None else {kind: 1.0}), count))


def standing(text: str) -> list[str]:
    """The steps and the answer of a response, without checks and without the steps that failed one."""
    text = re.sub(r"[^;>]* check [^;<]* no;", "", text)
    text = re.sub(r" check [^;<]* ok", "", text)
    return text.replace("<think>", "").replace("</think>", ";").split(";")


def canonical(piece: str) -> list[str] | str:
    """Terms and factors in order, because theirs does not matter."""
    commutes = re.fullmatch(r"(\d+)([+*])(\d+)=(.*)", piece)
    return [*sorted(commutes.group(1, 3)), *commutes.group(2, 4)] if commutes else piece


@each_family
def test_spoiled_responses_are_wrong_and_keep_their_style(family: str) -> None:
    for drawn, style, text in sample(family):
        parsed = parse(text)
        assert parsed.style == style
        assert not verify(drawn.problem, parsed.answer), (drawn.problem.question, text)


@each_family
def test_a_reflection_names_the_first_place_that_is_not_in_the_solution(family: str) -> None:
    for drawn, _, text in sample(family):
        reflection = parse_reflection(reflect(drawn.solution, text) or "")
        assert reflection is not None, text
        written, right = standing(text), standing(render(drawn.solution, "worked", Random(0)))
        same = [canonical(here) == canonical(there) for here, there in zip(written, right, strict=False)]
        place = same.index(False)
        assert reflection.bifurcation == f"{place + 1}:{written[place]}"
        assert reflection.critique == right[place]


@each_family
def test_most_mistakes_are_slips_and_everything_else_is_calculated_right(family: str) -> None:
    """Of the steps that a response stands by, at most one has a wrong result, and that is the one reflected on."""
    slips = 0
    wrong = [(drawn, text) for drawn, style, text in sample(family) if style != "answer"]
    for drawn, text in wrong:
        steps = [re.fullmatch(r"(\d+)(\D)(\d+)=(\d+)", piece) for piece in standing(text)[:-1]]
        faulty = [i for i, m in enumerate(steps, 1) if m and Step(m[2], int(m[1]), int(m[3])).result != int(m[4])]
        assert None not in steps
        assert len(faulty) <= 1
        if faulty:
            assert f"first wrong {faulty[0]}:" in (reflect(drawn.solution, text) or "")
        slips += len(faulty)
    assert 0.4 < slips / len(wrong) < 0.95


def test_a_mistake_is_carried_through_to_the_answer() -> None:
    """Where the last step gives the answer, it gives the wrong one too, unless the answer itself is the mistake."""
    carried = total = 0
    for family in ("sum", "product", "expression", "modpow", "linear", "sequence", "counting", "word"):
        for _, style, text in sample(family):
            if style == "worked":
                *_, last, answer = standing(text)
                carried += answer == f"Answer:{last.partition('=')[2]}"
                total += 1
    assert carried / total > 0.9


def spoiled_by_hand(family: str, question: str, solution: Solution) -> Iterator[tuple[list[str], list[str], str]]:
    """Operations, results and answer of many wrong responses with a mistake in the steps."""
    drawn = Drawn(Problem("made by hand", question, solution.answer, family), solution)
    for seed in range(300):
        text = spoiled(drawn, Random(seed))
        if not re.search("rule (check Answer|no more|more to)", reflect(solution, text) or ""):
            *steps, answer = standing(text)
            pieces = [re.fullmatch(r"\d+(\D)\d+=(\d+)", step) for step in steps]
            found = [piece.group(1, 2) for piece in pieces if piece]
            yield [op for op, _ in found], [result for _, result in found], answer.removeprefix("Answer:")


def test_equal_quotient_and_remainder_are_not_confused() -> None:
    solution = Solution((Step("*", 14, 4), Step("-", 60, 56)), "4r4")
    answers = set()
    for operations, results, answer in spoiled_by_hand("division", "60/14=?", solution):
        if operations == ["*", "-"]:
            quotient, remainder = answer.split("r")
            assert remainder == results[-1]
            answers.add(quotient)
    assert {"4", "3"} <= answers  # a wrong remainder leaves the quotient alone; another digit is another quotient


def test_euclid_goes_on_until_nothing_remains() -> None:
    steps = set()
    for operations, results, answer in spoiled_by_hand("gcd", "gcd(44,22)=?", Solution((Step("%", 44, 22),), "22")):
        if set(operations) == {"%"}:
            assert results[-1] == "0"
            assert len(results) == 1 or answer == results[-2]
            steps.add(len(results))
    assert max(steps) >= 4


def test_digits_of_a_spoiled_numeral_are_the_remainders() -> None:
    solution = Solution(tuple(Step(op, a, 3) for a in (65, 21, 7) for op in "%/"), "2102")
    lengths = set()
    for operations, results, answer in spoiled_by_hand("base", "65 in base 3=?", solution):
        if set(operations) == {"%", "/"} and operations[::2] == ["%"] * (len(operations) // 2):
            assert answer == results[-1] + "".join(results[-2::-2])
            lengths.add(len(operations))
    assert len(lengths) > 1


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("<think>12*5=60;12*7=94;60+94=154</think>Answer:154", "2:12*7=94 because 12*7=84;rule * check /"),
        ("<think>5*12=60;7*12=94;60+94=154</think>Answer:154", "2:7*12=94 because 12*7=84;rule * check /"),
        ("<think>12*5=60;12*9=108;60+108=168</think>Answer:168", "2:12*9=108 because 12*7=84;rule check numbers"),
        ("<think>12*5=60;12*7=84;84-60=24</think>Answer:24", "3:84-60=24 because 60+84=144;rule + not -"),
        ("<think>12*5=60;12-15=-3</think>Answer:-3", "2:12-15=-3 because 12*7=84;rule * not -"),
        ("<think>12*5=60;12*7=84</think>Answer:84", "3:Answer:84 because 60+84=144;rule more to Answer"),
        (
            "<think>12*5=60;12*7=84;60+84=144;144+84=228</think>Answer:228",
            "4:144+84=228 because Answer:144;rule no more",
        ),
        ("<think>12*5=60;12*7=84;84+60=144</think>Answer:154", "4:Answer:154 because Answer:144;rule check Answer"),
        ("Answer:154", "1:Answer:154 because 12*5=60;rule not Answer first"),
        ("Answer: 154<eos>", "1:Answer:154 because 12*5=60;rule not Answer first"),
        ("Answer:", "1:Answer: because 12*5=60;rule not Answer first"),
        (
            "<think>12*5=50 check 50%5=0 no;12*5=60 check 60/5=12 ok;12*7=94 check 94/7=12 ok;"
            "60+94=154 check 154-94=60 ok</think>Answer:154",
            "2:12*7=94 because 12*7=84;rule * check /",
        ),
    ],
)
def test_every_way_to_be_wrong_has_its_reflection(wrong: str, expected: str) -> None:
    assert reflect(SOLUTION, wrong) == f"first wrong {expected}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<think>12*5=60;12*7=94",
        "<think>12*5=60;12*7</think>Answer:154",
        "Answer:25</think>Answer:25",
        "Answer:many",
        "Answer:1 because 2",
        render(SOLUTION, "worked", Random(0)),
        render(SOLUTION, "checked", Random(0), mistakes=1.0),
    ],
)
def test_no_reflection_on_what_cannot_be_read_or_is_right(text: str) -> None:
    assert reflect(SOLUTION, text) is None


@settings(deadline=None)
@given(st.text(alphabet="<think>/;=Answer:0123456789+-*% checkokno"), st.booleans())
def test_reflect_never_fails_and_its_reflections_can_be_read(text: str, thinks: bool) -> None:
    reflection = reflect(SOLUTION, f"<think>{text}</think>Answer:1" if thinks else text)
    assert reflection is None or parse_reflection(reflection)


@each_family
def test_reflections_are_short_and_made_of_known_tokens(family: str) -> None:
    reflections = [reflect(drawn.solution, text) or "" for drawn, _, text in sample(family)]
    for text in reflections:
        ids = tokenizer.encode(text)
        assert len(ids) <= 42
        assert tokenizer.unknown_id not in ids
        assert tokenizer.decode(ids) == text
        assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.think_id, tokenizer.end_think_id} & set(ids)
        assert "\n" not in text


@each_family
def test_the_heuristic_holds_nothing_of_the_problem(family: str) -> None:
    for drawn, _, text in sample(family):
        rule = heuristic_only(reflect(drawn.solution, text) or "")
        assert rule is not None
        assert rule.startswith("rule ")
        assert not re.search("[0-9]", rule)


def test_reflections_are_read_as_they_are_written() -> None:
    reflection = Reflection("2:12*7=94", "12*7=84", "* check /")
    assert reflection.text == "first wrong 2:12*7=94 because 12*7=84;rule * check /"
    assert parse_reflection(reflection.text) == parse_reflection(reflection.text + "<eos>") == reflection
    assert heuristic_only(reflection.text) == "rule * check /"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rule * check /",
        "first wrong 2:12*7=94 because 12*7=84",
        "first wrong 0:12*7=94 because 12*7=84;rule * check /",
        "first wrong 2:12*7 because 12*7=84;rule * check /",
        "first wrong 2:12*7=94 because 12*7=84;rule 12 check 7",
        "first wrong 2:12*7=94 because 12*7=84;rule * check /\n",
        "first wrong 2:12*7=94 because 12*7=84;rule <think>",
    ],
)
def test_text_that_is_no_reflection_does_not_parse(text: str) -> None:
    assert parse_reflection(text) is None
    assert heuristic_only(text) is None


def test_the_prompts_are_exactly_the_documented_ones() -> None:
    assert retrospective_prompt("1+1=?", "Answer:3", "Answer:2") == "<bos>1+1=?\nwrong:Answer:3\nright:Answer:2\n"
    assert retrospective_prompt("1+1=?", "Answer:3", None) == "<bos>1+1=?\nwrong:Answer:3\n"
    assert hinted_prompt("1+1=?", "rule + check -") == "<bos>1+1=?\nhint rule + check -\n"


def test_the_end_of_a_text_does_not_get_into_a_prompt() -> None:
    assert retrospective_prompt("1+1=?", "Answer:3<eos>", "Answer:2<eos>") == (
        retrospective_prompt("1+1=?", "Answer:3", "Answer:2")
    )
    assert hinted_prompt("1+1=?", "rule no more<eos>") == hinted_prompt("1+1=?", "rule no more")


def test_a_hint_can_be_taken_out_of_its_prompt_again() -> None:
    for drawn, kind, prompt, response in mixture("hinted"):
        assert kind == "hinted"
        assert prompt.startswith(prompt_text(drawn.problem.question))
        hint = prompt.removeprefix(prompt_text(drawn.problem.question)).removeprefix("hint ").removesuffix("\n")
        assert hinted_prompt(drawn.problem.question, hint) == prompt
        reflection = parse_reflection(hint)
        assert hint.startswith("rule ") if reflection is None else reflection.critique in standing(response[:-5])
        assert response == render(drawn.solution, "worked", Random(0)) + "<eos>"
    rules = np.mean(["\nhint rule " in sample.prompt for sample in mixture("hinted")])
    assert abs(rules - RULE_ONLY) < 0.02


def test_reflections_of_the_corpus_are_true_and_see_all_pairs_of_styles() -> None:
    pairs: Counter[tuple[Style, Style | None]] = Counter()
    for drawn, _, prompt, response in mixture("reflection"):
        question, wrong, *right = prompt.removeprefix("<bos>").removesuffix("\n").split("\n")
        assert question == drawn.problem.question
        wrong_response = wrong.removeprefix("wrong:")
        assert not verify(drawn.problem, parse(wrong_response).answer)
        assert response == f"{reflect(drawn.solution, wrong_response)}<eos>"
        right_style = None
        if right:
            parsed = parse(right[0].removeprefix("right:"))
            assert verify(drawn.problem, parsed.answer)
            right_style = parsed.style
        pairs[parse(wrong_response).style, right_style] += 1
    assert all(pairs[pair] > 100 for pair in product(("answer", *STEPS), ("answer", *STEPS)))
    alone = sum(count for (_, right_style), count in pairs.items() if right_style is None)
    assert abs(alone / pairs.total() - WRONG_ONLY) < 0.02


def test_reflections_of_the_corpus_have_about_thirty_tokens() -> None:
    lengths = [len(tokenizer.encode(s.response)) for s in mixture("reflection")]
    assert 20 < np.mean(lengths) < 30
    assert np.mean(np.array(lengths) <= 36) > 0.97


def test_every_kind_of_mistake_occurs() -> None:
    """About as often as its share says; mistakes that lead to the right answer are drawn again."""
    rules = Counter(
        (parse_reflection(s.response) or Reflection("", "", "")).heuristic
        for s in mixture("reflection")
        if "\nwrong:<think>" in s.prompt
    )
    slips = sum(count for rule, count in rules.items() if re.fullmatch(r". check .", rule))
    assert abs(slips / rules.total() - MISTAKE_SHARES["slip"]) < 0.08
    for rule in ("check numbers", "more to Answer", "no more", "check Answer", "+ not *", "- not +"):
        assert rules[rule] > 5


def test_kinds_come_in_their_shares() -> None:
    counts = Counter(s.kind for s in mixture())
    for kind, share in KIND_SHARES.items():
        assert abs(counts[kind] / counts.total() - share) < 4 * (share * (1 - share) / counts.total()) ** 0.5


def test_the_mixture_is_a_function_of_its_seed() -> None:
    assert mixture()[:300] == list(islice(corpus(3), 300))
    assert mixture()[:300] != list(islice(corpus(4), 300))


def test_the_corpus_without_reflections_is_what_it_was() -> None:
    plain: dict[Kind, float] = {"plain": 1.0}
    samples = list(islice(corpus(7, kinds=plain), 500))
    assert {s.kind for s in samples} == {"plain"}
    assert sha256("".join(s.prompt + s.response for s in samples).encode()).hexdigest() == OLD_CORPUS


def test_contexts_fit_the_models() -> None:
    for kind in KIND_SHARES:
        samples = mixture(kind)
        prompts = tokenizer.encode_batch([s.prompt for s in samples])
        responses = tokenizer.encode_batch([s.response for s in samples])
        lengths = np.array([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
        assert lengths.max() < POSITIONS / 2
        assert np.mean(lengths < 350) > 0.998


def test_the_longest_retrospective_context_fits() -> None:
    """A problem of the hardest level, both responses checked, with noticed mistakes, and room for a reflection."""
    longest = 0
    for family in FAMILIES:
        for index in range(20):
            drawn = draw(family, 7, "harder", index)
            wrong = spoiled(drawn, Random(index), "checked", mistakes=0.3)
            right = render(drawn.solution, "checked", Random(index), mistakes=0.3)
            longest = max(longest, len(tokenizer.encode(retrospective_prompt(drawn.problem.question, wrong, right))))
    assert longest + 64 < POSITIONS


def test_shards_hold_long_prompts_whole() -> None:
    flat, prompts, responses = shard(3, 4000, Pretraining("tiny-0.3m", reflection_share=1.0))
    samples = mixture("reflection")
    assert prompts.max() > 255
    assert len(flat) == prompts.sum(dtype=int) + responses.sum(dtype=int)
    longest = int(prompts.argmax())
    start = int(prompts[:longest].sum(dtype=int) + responses[:longest].sum(dtype=int))
    end = start + int(prompts[longest])
    assert tokenizer.decode(flat[start:end].tolist()) == samples[longest].prompt
    assert tokenizer.decode(flat[end : end + int(responses[longest])].tolist()) == samples[longest].response


def test_only_the_response_is_learnt() -> None:
    example = make_corpus(Pretraining("tiny-0.3m", samples=1, processes=1, reflection_share=1.0))[0]
    assert example.mask.all()
    assert len(example.mask) == len(example.response)
    assert tokenizer.decode(example.response.tolist()).startswith("first wrong ")
    assert tokenizer.decode(example.prompt.tolist()).endswith("\n")


def test_settings_say_the_shares() -> None:
    assert Pretraining("tiny-1m").kinds["plain"] == 1.0, "the shipped models are made without reflections"
    shares = {f"{kind}_share": KIND_SHARES[kind] for kind in ("reflection", "hinted")}
    assert Pretraining("tiny-1m", **shares).kinds == KIND_SHARES  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no shares"):
        _ = Pretraining("tiny-1m", reflection_share=0.8, hinted_share=0.4).kinds


class Oracle:
    """Stands in for the engine: reflects truly (but for the rule, if one is given), and is right only with a hint."""

    model = SimpleNamespace(config=SimpleNamespace(max_positions=POSITIONS))

    def __init__(self, solutions: dict[str, Solution], rule: str | None = None) -> None:
        self.solutions, self.rule = solutions, rule

    def generate(self, requests: Sequence[Request], *_: object) -> list[list[Rollout]]:
        texts = [self.respond(tokenizer.decode(request.prompt)) for request in requests]
        rollouts = [Rollout([], tokenizer.encode(text), np.zeros(0, np.float32), "stop") for text in texts]
        return [[rollout] for rollout in rollouts]

    def respond(self, prompt: str) -> str:
        question, _, rest = prompt.removeprefix("<bos>").partition("\n")
        if rest.startswith("wrong:"):
            reflection = parse_reflection(reflect(self.solutions[question], rest.split("\n")[0][6:]) or "")
            assert reflection is not None
            return reflection._replace(heuristic=self.rule or reflection.heuristic).text + "<eos>"
        if rest.startswith("hint "):
            return render(self.solutions[question], "worked", Random(0)) + "<eos>"
        return "Answer:x<eos>"


@pytest.mark.parametrize("rule", [None, "many eggs"])
def test_the_report_measures_truth_and_help(rule: str | None) -> None:
    problems = problem_set("validation", 40, levels=(2, 3, 4, 5))
    oracle = Oracle({p.question: solution_of(p) for p in problems}, rule)
    report = experience(cast(Engine, oracle), tokenizer, 40, Sampling(stop_ids=(tokenizer.eos_id,)), False)
    told = float(rule is None)
    truth = {"read": 1.0, "bifurcation": 1.0, "critique": 1.0, "heuristic": told, "true": told}
    assert report["reflections"] == {"all": truth, "wrong_with_steps": truth}
    assert report["reflections_from_wrong_only"] == report["reflections"]
    assert (report["accuracy_hinted"], report["accuracy_worked_without_hint"]) == (1.0, 0.0)
