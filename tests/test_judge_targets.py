"""Targets of a trajectory-aware judge: closed forms by hand, encoders, negatives, and templates that others follow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, completion, serving
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from reasonlab.errors import UserError
from reasonlab.evaluate.responder import EndpointResponder, EngineResponder
from reasonlab.grading.grade import Grade, grade
from reasonlab.grading.verifier import grade_text
from reasonlab.judges.encoders import HashedNgrams, TransformersEncoder
from reasonlab.judges.exact_labels import exact_labels
from reasonlab.judges.labels import StepLabels
from reasonlab.judges.targets import (
    alignment,
    coherence,
    fused,
    step_targets,
    thought_and_response,
    tiny_trajectories,
    worked_reference,
)
from reasonlab.judges.templates import (
    TemplateReward,
    extract_templates,
    follow_operations,
    language_guide,
    template_rewards,
    tiny_guide,
    tiny_template,
)
from reasonlab.judges.types import Candidate
from reasonlab.model import tiny_tokenizer
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.text_format import TinyFormat
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.families import FAMILIES, render
from reasonlab.problems.problem import Problem
from reasonlab.problems.reflections import hinted_prompt, spoiled
from reasonlab.problems.tiny_world import Drawn, draw
from reasonlab.rollout.endpoint import Endpoint
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling

E1, E2, E3 = np.eye(3)
HALFWAY = (E1 + E2) / math.sqrt(2)


def candidate(drawn: Drawn, text: str) -> Candidate:
    p = drawn.problem
    return Candidate(p.id, p.question, text, p.answer, None, p.family, p.level)


# --- closed forms ------------------------------------------------------------------------------------------------


def test_alignment_is_the_nearest_step_of_the_response() -> None:
    thought = np.stack([E1, HALFWAY, E3, -E2])
    response = np.stack([E1, E2])
    assert alignment(thought, response) == pytest.approx([1.0, math.sqrt(0.5), 0.0, 0.0])


def test_coherence_is_the_chance_of_the_true_next_step() -> None:
    """By hand: cosine 1 with the true step, 0 with two negatives, temperature 1: e / (e + 2)."""
    before, negatives = np.stack([E1, E1]), np.stack([E2, E3])
    found = coherence(before, np.stack([E1, E2]), negatives, tau=1.0)
    assert found == pytest.approx([math.e / (math.e + 2), 1 / 3])
    assert coherence(before, np.stack([E1, E2]), negatives, tau=0.5)[0] == pytest.approx(math.e**2 / (math.e**2 + 2))
    published = math.log(math.e / (math.e + 2))
    assert math.exp(published) == pytest.approx(found[0]), "the published value is its logarithm"


def test_coherence_survives_small_temperatures() -> None:
    found = coherence(np.stack([E1, E1]), np.stack([E1, E2]), np.stack([E2, E1]), tau=1e-4)
    assert found == pytest.approx([0.5, 0.0])
    with pytest.raises(ValueError, match="positive"):
        coherence(E1[None], E1[None], E2[None], tau=0.0)


def test_fusion_by_hand() -> None:
    """softmax(0, ln 2, ln 3) = (1, 2, 3) / 6."""
    found = fused(np.zeros(1), np.array([math.log(2)]), np.array([math.log(3)]))
    assert found == pytest.approx([(2 * math.log(2) + 3 * math.log(3)) / 6])


UNIT = arrays.arrays(np.float64, (3, 5), elements=st.floats(0, 1))


@given(UNIT)
def test_fusion_lies_between_mean_and_maximum(opinions: Any) -> None:
    found = fused(*opinions)
    assert (found <= opinions.max(axis=0) + 1e-12).all()
    assert (found >= opinions.mean(axis=0) - 1e-12).all(), "the highest opinion weighs most"
    assert fused(*opinions[::-1]) == pytest.approx(found)


@given(UNIT, st.integers(0, 2))
def test_negatives_only_take_away(rows: Any, tau: int) -> None:
    few = coherence(rows, rows, rows[:1], 10.0**-tau)
    more = coherence(rows, rows, rows, 10.0**-tau)
    assert ((more <= few + 1e-12) & (few <= 1) & (more >= 0)).all()


# --- encoders ----------------------------------------------------------------------------------------------------


def test_hashed_ngrams_are_unit_vectors_that_see_what_texts_share() -> None:
    encoder = HashedNgrams()
    texts = ["12*7=84", "12*7=85", "gcd of nothing", "", "12*7=84"]
    vectors = encoder.encode(texts)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(5))
    assert (vectors @ vectors.T >= 0).all()
    assert (vectors[0] == vectors[4]).all()
    assert vectors[0] @ vectors[1] > 0.6 > vectors[0] @ vectors[2]
    assert (encoder.encode(texts[:1])[0] == vectors[0]).all(), "the company does not matter"
    assert encoder.encode([" A  b\n"])[0] == pytest.approx(encoder.encode(["a b"])[0])


def test_hashed_ngrams_are_the_same_on_every_machine() -> None:
    vector = HashedNgrams(8, (1,)).encode(["aab"])[0]  # start, a, a, b, end
    assert np.flatnonzero(vector).tolist() == sorted(
        {crc % 8 for crc in (0x3C0C8EA1, 0xE8B7BE43, 0x71BEEFF9, 0x4B0BBE37)}
    )


def test_a_transformers_encoder_reads_long_texts_in_pieces(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    tiny_tokenizer.save(tmp_path)
    size = TinyTokenizer.load().vocab_size
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=size, max_position_embeddings=8, **shape)).save_pretrained(tmp_path)
    encoder = TransformersEncoder(tmp_path, batch=3)
    texts = ["12*7=84", "1", "12345678", "1234567812345678", "5+5=10;10+10=20", ""]
    vectors = encoder.encode(texts)
    assert np.linalg.norm(vectors, axis=1)[:5] == pytest.approx(np.ones(5))
    assert vectors[2] == pytest.approx(vectors[3]), "the same piece twice has the same mean"
    assert np.concatenate([encoder.encode([text]) for text in texts]) == pytest.approx(vectors, abs=1e-6)
    with pytest.raises(UserError, match="no encoder"):
        TransformersEncoder(tmp_path / "nowhere")


# --- targets of whole candidates ---------------------------------------------------------------------------------


def pool() -> list[Candidate]:
    drawn = [draw(family, 3, "train", index) for family in FAMILIES for index in range(2)]
    right = [candidate(one, render(one.solution, "checked", Random(i), 0.2)) for i, one in enumerate(drawn)]
    return right + [candidate(one, spoiled(one, Random(i))) for i, one in enumerate(drawn)]


def targets_of(candidates: list[Candidate], **options: Any) -> list[Any]:
    quality = [exact_labels(one) for one in candidates]
    references = [worked_reference(one) for one in candidates]
    return step_targets(candidates, quality, HashedNgrams(), "tiny", references, **options)


def test_targets_are_the_formulas_applied_to_each_step() -> None:
    candidates = pool()
    targets = targets_of(candidates, negatives=4)
    encoder = HashedNgrams()
    one, target = candidates[0], targets[0]
    thought, response = thought_and_response(one, "tiny")
    assert response == [f"Answer:{one.answer}"]
    for place, step in enumerate(thought):
        cosines = encoder.encode(worked_reference(one)) @ encoder.encode([step])[0]
        assert target.alignment[place] == pytest.approx(cosines.max())
        assert target.fused[place] == pytest.approx(
            fused(*(np.array([x[place]]) for x in (target.alignment, target.quality, target.coherence)))[0]
        )
    assert np.isnan(target.alignment[-1])
    assert target.fused[-1] == target.quality[-1] == 1.0
    assert target.labelled(one, 0.5).steps == tuple(target.fused)


def test_targets_lie_in_the_unit_interval_and_prefer_right_steps() -> None:
    candidates = pool()
    found = targets_of(candidates)
    values, quality = (np.concatenate([getattr(one, name) for one in found]) for name in ("fused", "quality"))
    assert ((values >= 0) & (values <= 1)).all()
    assert values[quality == 1].mean() > values[quality == 0].mean() + 0.1


def test_targets_do_not_depend_on_the_order_of_the_pool() -> None:
    candidates = pool()
    for one, other in zip(targets_of(candidates), targets_of(candidates[::-1])[::-1], strict=True):
        assert one.fused == pytest.approx(other.fused, abs=1e-12)
    assert targets_of(candidates, seed=1)[0].coherence != pytest.approx(targets_of(candidates)[0].coherence)


def test_the_first_step_follows_the_question() -> None:
    one = Candidate("a", "alpha", "<think>alpha;beta</think>Answer:1")
    other = Candidate("b", "omega", "<think>gamma;delta</think>Answer:1")
    labels = [StepLabels((1.0, 1.0, 1.0), -1)] * 2
    first = step_targets([one, other], labels, HashedNgrams(), "tiny", tau=0.05, negatives=2)[0]
    assert first.coherence[0] > 0.99 > first.coherence[1]


def test_negatives_are_steps_of_other_problems_that_do_not_occur_here() -> None:
    """With "same" among the negatives, the second step of the first thought could not be certain."""
    one = Candidate("a", "?", "<think>same;same</think>Answer:1")
    others = [Candidate(f"b{i}", "?", f"<think>same;other{i}</think>Answer:1") for i in range(4)]
    labels = [StepLabels((1.0, 1.0, 1.0), -1)] * 5
    found = step_targets([one, *others], labels, HashedNgrams(), "tiny", tau=0.01, negatives=3)
    assert found[0].coherence[1] > 0.99
    with pytest.raises(UserError, match="4 steps of other problems are too few negatives for a"):
        step_targets([one, *others], labels, HashedNgrams(), "tiny", negatives=5)


def test_what_cannot_be_aligned_is_refused_by_name() -> None:
    unfinished = Candidate("p7", "?", "<think>one\n\ntwo")
    with pytest.raises(UserError, match="p7 says nothing after its thought"):
        step_targets([unfinished], [StepLabels((1.0, 1.0), -1)], HashedNgrams())
    with pytest.raises(UserError, match="p7 has 2 steps and 1 labels"):
        step_targets([unfinished], [StepLabels((1.0,), -1)], HashedNgrams())


def test_trajectories_join_targets_and_rewards_and_check_the_pool_before_anybody_follows() -> None:
    candidates = pool()
    rewards = [TemplateReward(i % 4, 3 if i % 4 else 0) for i in range(len(candidates))]
    labelled = tiny_trajectories(candidates, lambda _: rewards, seed=1)
    assert [one.steps for one in labelled] == [tuple(one.fused) for one in targets_of(candidates, seed=1)]
    assert [one.final for one in labelled[:4]] == [None, 1 / 3, 2 / 3, 1.0]
    for few, complaint in (
        (candidates[:2], "too few negatives"),
        ([Candidate("p", "?", "1")], "no problem of the tiny"),
    ):
        with pytest.raises(UserError, match=complaint):
            tiny_trajectories(few, lambda _: pytest.fail("it should have been refused before"))


# --- templates ---------------------------------------------------------------------------------------------------


def test_a_tiny_template_is_the_operations_without_numbers() -> None:
    one = Candidate(
        "p", "12*12=?", "<think>12*10=121 check 121%10=1 no;12*10=120 check 120/10=12 ok;120+24=144</think>Answer:144"
    )
    assert tiny_template(one) == "rule * +"
    assert tiny_template(Candidate("p", "1+1=?", "Answer:2")) == ""
    assert TinyFormat(TinyTokenizer.load()).prompt(tiny_guide("1+1=?", "rule +")).ids == (
        TinyTokenizer.load().encode(hinted_prompt("1+1=?", "rule +"))
    )
    assert tiny_guide("1+1=?", "") == "1+1=?"


def test_templates_of_right_and_spoiled_responses_differ_where_operations_do() -> None:
    for family in FAMILIES:
        drawn = draw(family, 3, "train", 0)
        template = tiny_template(candidate(drawn, render(drawn.solution, "checked", Random(0), 1.0)))
        assert template.split()[1:] == [step.op for step in drawn.solution.steps]


def test_the_reward_is_the_share_of_right_answers() -> None:
    tokenizer = TinyTokenizer.load()
    engine = Engine(load_model(resolve_model("tiny-0.3m")), rows=32)
    responder = EngineResponder(engine, TinyFormat(tokenizer))
    drawn = [draw("sum", 1, "train", index) for index in range(3)]
    candidates = [candidate(one, render(one.solution, "worked", Random(0))) for one in drawn]
    candidates.append(candidates[0])
    templates = [*map(tiny_template, candidates[:2]), None, tiny_template(candidates[0])]
    asked: list[int] = []

    def rewards(pool: list[Candidate], **options: Any) -> list[TemplateReward | None]:
        sampling = Sampling(max_tokens=64, stop_ids=(tokenizer.eos_id,))
        return template_rewards(pool, templates, responder, tiny_guide, grade, sampling, samples=5, **options)

    found = rewards(candidates, progress=asked.append)
    assert sum(asked) == 10, "equal templates of a problem share their answers"
    assert found[0] == found[3]
    assert found[2] is None
    assert all(one is None or (one.graded == 5 and one.share == one.right / 5) for one in found)
    assert rewards(candidates) == found
    assert TemplateReward(0, 0).share is None


def test_a_policy_that_is_made_to_follow_a_template_arrives_by_the_right_operations_only() -> None:
    tokenizer = TinyTokenizer.load()
    engine = Engine(load_model(resolve_model("tiny-1m")), rows=64)
    drawn = [draw(family, 2, "train", index) for family in ("sum", "linear", "word") for index in range(4)]
    candidates = [candidate(one, render(one.solution, "worked", Random(0))) for one in drawn]
    right = [tiny_template(one) for one in candidates]
    swapped = [one.translate(str.maketrans("+-*/", "*/+-")) for one in right]
    texts: list[tuple[str, str]] = []

    def seen(problem: Problem, text: str) -> Grade:
        texts.append((problem.id, text))
        return grade(problem, text)

    def rewards(pool: list[Candidate], templates: list[str]) -> list[TemplateReward | None]:
        return follow_operations(pool, templates, engine, tokenizer, seen, Sampling(max_tokens=48), samples=4)

    def mean(found: list[TemplateReward | None]) -> float:
        return float(np.mean([one.share for one in found if one and one.share is not None]))

    found = rewards(candidates, right)
    wanted = {one.problem: template for one, template in zip(candidates, right, strict=True)}
    assert len(texts) > 40
    assert [
        (text, wanted[name]) for name, text in texts if tiny_template(Candidate(name, "?", text)) != wanted[name]
    ] == []
    assert mean(found) > 0.6
    assert mean(rewards(candidates, swapped)) < 0.1
    assert rewards(candidates[::-1], right[::-1])[::-1] == found, "the company does not matter"


def test_a_template_that_nobody_can_finish_is_worth_nothing() -> None:
    tokenizer = TinyTokenizer.load()
    engine = Engine(load_model(resolve_model("tiny-0.3m")), rows=32)
    one = candidate(draw("sum", 1, "train", 0), "Answer:1")
    endless = "rule" + " +" * 200
    found = follow_operations([one, one], [endless, None], engine, tokenizer, grade, Sampling(max_tokens=48), samples=2)
    assert found == [TemplateReward(0, 2), None]


def test_templates_of_a_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def rule(prompt: str, attempt: int, body: dict[str, Any]) -> Any:
        if "<strategy>" in prompt:
            assert "1. add {question}" in prompt
            return completion("\\boxed{4}" if body["seed"] % 2 else "\\boxed{5}")
        if "cut" in prompt:
            return completion("1. never", finish="length")
        return (400, {}, "no") if "refused" in prompt else completion("<think>hm</think>1. add {question}\n")

    texts = ("fine", "cut", "refused")
    candidates = [Candidate(text, f"2+2 {text}", f"it is 4, {text}", "4") for text in texts]
    with serving(ChatServer(rule)) as server:
        endpoint = Endpoint(server.url, "served", first_wait=0.01, timeout=5.0, attempts=1)
        templates = extract_templates(candidates, endpoint)
        assert templates == ["1. add {question}", None, None]

        def grader(problem: Problem, text: str) -> Grade:
            return grade_text(text, problem.answer)

        found = template_rewards(
            candidates, templates, EndpointResponder(endpoint), language_guide, grader, Sampling(), samples=6
        )
    seeds = [body["seed"] for body in server.bodies if "<strategy>" in json.dumps(body)]
    assert found[1:] == [None, None]
    assert found[0] == TemplateReward(sum(seed % 2 for seed in seeds), 6)
