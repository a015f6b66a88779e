"""The engine samples what the weights say, and a rollout depends on weights, prompt and key alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from small_models import VOCABULARY, in_transformers, packed_logits, random_sequences, small_model

from reasonlab.config import LearnerConfig
from reasonlab.keys import key
from reasonlab.methods.group import example
from reasonlab.model.transformer import Transformer
from reasonlab.rollout import decoder as decoder_module
from reasonlab.rollout import engine as engine_module
from reasonlab.rollout.decoder import Admission, Decoder, Prefilled, Report, row_bucket
from reasonlab.rollout.engine import Engine, repeats
from reasonlab.rollout.operations import RUNNING
from reasonlab.rollout.types import Finish, Request, Rollout, Sampling
from reasonlab.train.learner import Learner

PROMPT_LENGTHS = [5, 1, 17, 9, 2, 9, 30]
GROUP_SIZES = [3, 1, 5, 2, 4, 1, 3]
FREE = Sampling(max_tokens=40)


def requests_of(lengths: Sequence[int], sizes: Sequence[int], seed: int = 0) -> list[Request]:
    prompts = random_sequences(list(lengths), seed)
    return [
        Request(prompt.tolist(), [key("test rollout", seed, i, j) for j in range(size)])
        for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]


REQUESTS = requests_of(PROMPT_LENGTHS, GROUP_SIZES)
SAMPLES = sum(GROUP_SIZES)


def assert_same(
    got: Sequence[Sequence[Rollout]], expected: Sequence[Sequence[Rollout]], tolerance: float = 1e-6
) -> None:
    assert [[r.ids for r in group] for group in got] == [[r.ids for r in group] for group in expected]
    for a, b in zip(flat(got), flat(expected), strict=True):
        assert (a.prompt, a.finish) == (b.prompt, b.finish)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=tolerance)


def flat(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def letters(ids: Sequence[int]) -> str:
    """A tokenizer's decoder: one letter for each id."""
    return "".join(chr(ord("A") + i) for i in ids)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(seed=3)


@pytest.fixture(scope="module")
def reference(model: Transformer) -> list[list[Rollout]]:
    """All samples in one batch, to their full length."""
    return Engine(model).generate(REQUESTS, FREE)


# --- what is drawn ---------------------------------------------------------------------------------------------------


def test_the_engine_draws_from_the_model(model: Transformer) -> None:
    prompt = random_sequences([6], seed=9)[0]
    request = Request(prompt.tolist(), [key("frequency", i) for i in range(6000)])
    rollouts = flat(Engine(model).generate([request], Sampling(max_tokens=1)))
    probabilities = packed_logits(model, [prompt])[0][-1].double().softmax(-1).numpy()
    assert (probabilities * len(rollouts) > 5).all()  # a chi-square cell needs a few counts
    counts = np.bincount([r.ids[0] for r in rollouts], minlength=len(probabilities))
    assert stats.chisquare(counts, probabilities * len(rollouts)).pvalue > 1e-3


@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_greedy_decoding_equals_transformers(tied: bool, tmp_path: Path) -> None:
    model = small_model(seed=11, tied=tied)
    theirs = in_transformers(model, tmp_path)
    prompts = random_sequences([1, 6, 23, 50], seed=4)
    requests = [Request(prompt.tolist(), [0]) for prompt in prompts]
    got = Engine(model).generate(requests, Sampling(temperature=0, max_tokens=120, stop_ids=(2,)))
    for prompt, (rollout,) in zip(prompts, got, strict=True):
        attention = torch.ones(1, len(prompt), dtype=torch.int64)
        out = theirs.generate(prompt[None], attention_mask=attention, do_sample=False, max_new_tokens=120)
        assert rollout.ids == out[0, len(prompt) :].tolist()
        assert rollout.finish == ("stop" if rollout.ids[-1] == 2 else "length")


# --- batch invariance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_rows_and_workers_do_not_change_a_rollout(
    rows: int, workers: int, model: Transformer, reference: list[list[Rollout]]
) -> None:
    assert_same(Engine(model, rows=rows, workers=workers).generate(REQUESTS, FREE), reference)


def test_the_order_of_requests_does_not_change_a_rollout(model: Transformer, reference: list[list[Rollout]]) -> None:
    order = [4, 0, 6, 2, 5, 1, 3]
    got = Engine(model, rows=4).generate([REQUESTS[i] for i in order], FREE)
    assert_same(got, [reference[i] for i in order])


def test_the_size_of_a_group_does_not_change_a_rollout(model: Transformer, reference: list[list[Rollout]]) -> None:
    single = [Request(request.prompt, [seed]) for request in REQUESTS for seed in request.keys]
    assert_same(Engine(model, rows=5).generate(single, FREE), [[rollout] for rollout in flat(reference)])
    whole = requests_of(PROMPT_LENGTHS, [9] * len(PROMPT_LENGTHS))
    got = Engine(model).generate(whole, FREE)
    assert_same([group[:n] for group, n in zip(got, GROUP_SIZES, strict=True)], reference)


def test_a_rollout_can_be_made_again_alone(model: Transformer, reference: list[list[Rollout]]) -> None:
    for request, group in zip(REQUESTS, reference, strict=True):
        for seed, rollout in zip(request.keys, group, strict=True):
            assert_same(Engine(model).generate([Request(request.prompt, [seed])], FREE), [[rollout]])


def test_prefill_in_several_waves(
    model: Transformer, reference: list[list[Rollout]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decoder_module.WAVE_TOKENS, "cpu", 12)
    assert_same(Engine(model, rows=3).generate(REQUESTS, FREE), reference)


def test_one_engine_serves_different_settings_one_after_the_other(
    model: Transformer, reference: list[list[Rollout]]
) -> None:
    engine = Engine(model, rows=4, workers=2)
    engine.generate(REQUESTS[:2], Sampling(max_tokens=150, temperature=0.5))
    assert_same(engine.generate(REQUESTS, FREE), reference)
    engine.generate(requests_of([40], [7], seed=1), FREE)
    assert_same(engine.generate(REQUESTS, FREE), reference)


def test_the_engine_sees_new_weights_at_once() -> None:
    model = small_model(seed=3)
    engine = Engine(model)
    before = engine.generate(REQUESTS, FREE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    engine.version = 4
    after = engine.generate(REQUESTS, FREE)
    assert [r.ids for r in flat(after)] != [r.ids for r in flat(before)]
    assert_same(after, Engine(model).generate(REQUESTS, FREE))
    assert all((r.versions == 4).all() and len(r.versions) == len(r.ids) for r in flat(after))


# --- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_logprobs_equal_learner_logprobs(tied: bool, temperature: float) -> None:
    model = small_model(seed=5, tied=tied)
    sampling = Sampling(temperature=temperature, max_tokens=100, stop_ids=(2,))
    rollouts = flat(Engine(model, rows=6).generate(REQUESTS, sampling))
    learner = Learner(model, LearnerConfig(token_budget=256), temperature=temperature)
    learned = learner.logprobs([example(rollout, 0.0) for rollout in rollouts])
    for rollout, logprobs in zip(rollouts, learned, strict=True):
        np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "qwen3", "qk_norm": True, "kv_heads": 1},
        {"architecture": "qwen2", "qkv_bias": True, "kv_heads": 4},
        {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
    ],
    ids=["qwen3", "qwen2", "yarn"],
)
def test_decoding_knows_every_family(changes: dict[str, Any]) -> None:
    model = small_model(seed=6, **changes)
    rollouts = flat(Engine(model, rows=4).generate(REQUESTS[:4], FREE))
    learned = Learner(model, LearnerConfig()).logprobs([example(rollout, 0.0) for rollout in rollouts])
    for rollout, logprobs in zip(rollouts, learned, strict=True):
        np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-5, rtol=0)


# --- how a rollout ends ---------------------------------------------------------------------------------------------


def test_without_a_stop_every_rollout_has_the_full_length(reference: list[list[Rollout]]) -> None:
    assert {(len(r.ids), len(r.logprobs), r.finish) for r in flat(reference)} == {(40, 40, "length")}


@pytest.mark.parametrize("max_tokens", [1, 7, 39])
def test_max_tokens_cuts_and_changes_nothing_before(
    max_tokens: int, model: Transformer, reference: list[list[Rollout]]
) -> None:
    got = Engine(model).generate(REQUESTS, Sampling(max_tokens=max_tokens))
    assert_same(got, [[cut(r, max_tokens, "length") for r in group] for group in reference])


def cut(rollout: Rollout, count: int | None, finish: Finish) -> Rollout:
    if count is None:
        return rollout
    return replace(rollout, ids=rollout.ids[:count], logprobs=rollout.logprobs[:count], finish=finish)


def first(rollout: Rollout, ended: set[int]) -> int | None:
    return next((i + 1 for i, token in enumerate(rollout.ids) if token in ended), None)


@pytest.mark.parametrize("stop_ids", [(2,), (7, 19), tuple(range(0, VOCABULARY, 2))])
@pytest.mark.parametrize("rows", [2, 256])
def test_a_stop_id_ends_a_rollout_and_belongs_to_it(
    stop_ids: tuple[int, ...], rows: int, model: Transformer, reference: list[list[Rollout]]
) -> None:
    got = Engine(model, rows=rows).generate(REQUESTS, replace(FREE, stop_ids=stop_ids))
    expected = [[cut(r, first(r, set(stop_ids)), "stop") for r in group] for group in reference]
    assert "stop" in {r.finish for r in flat(expected)}
    assert_same(got, expected)


def test_a_stop_id_as_the_last_allowed_token_is_a_stop(model: Transformer, reference: list[list[Rollout]]) -> None:
    last = reference[0][0].ids[9]
    assert first(reference[0][0], {last}) == 10
    request = Request(REQUESTS[0].prompt, REQUESTS[0].keys[:1])
    got = Engine(model).generate([request], Sampling(max_tokens=10, stop_ids=(last,)))
    assert_same(got, [[cut(reference[0][0], 10, "stop")]])


def first_with(rollout: Rollout, stops: Sequence[str]) -> int | None:
    counts = range(1, len(rollout.ids) + 1)
    return next((n for n in counts if any(s in letters(rollout.ids[:n]) for s in stops)), None)


@pytest.mark.parametrize(("start", "end"), [(3, 4), (10, 13), (2, 38)], ids=["a token", "three tokens", "36 tokens"])
def test_a_stop_string_ends_a_rollout_at_the_token_that_completes_it(
    start: int, end: int, model: Transformer, reference: list[list[Rollout]]
) -> None:
    stops = (letters(reference[2][1].ids[start:end]), letters(reference[4][0].ids[end - 1 : end + 1]))
    sampling = replace(FREE, stop_strings=stops)
    got = Engine(model, rows=6, decode_text=letters).generate(REQUESTS, sampling)
    expected = [[cut(r, first_with(r, stops), "stop") for r in group] for group in reference]
    assert expected[2][1].finish == "stop"
    assert_same(got, expected)


def test_a_stop_string_is_not_sought_in_the_prompt(model: Transformer, reference: list[list[Rollout]]) -> None:
    request = Request(REQUESTS[2].prompt, REQUESTS[2].keys)
    across = letters([request.prompt[-1], reference[2][0].ids[0]])
    got = Engine(model, decode_text=letters).generate([request], replace(FREE, stop_strings=(across,)))
    assert_same(got, [[cut(r, first_with(r, (across,)), "stop") for r in reference[2]]])
    assert got[0][0].finish == "length"


def test_a_token_may_complete_several_characters(model: Transformer, reference: list[list[Rollout]]) -> None:
    def words(ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)

    inside = f"{reference[0][0].ids[4]}><"  # is complete only when the next token begins
    got = Engine(model, decode_text=words).generate([REQUESTS[0]], replace(FREE, stop_strings=(inside,)))
    texts = [words(r.ids) for r in got[0]]
    assert any(inside in text for text in texts)
    for rollout, text in zip(got[0], texts, strict=True):
        assert (rollout.finish == "stop") == (inside in text)
        assert inside not in words(rollout.ids[:-1])


def test_stop_strings_without_a_decoder_are_an_error(model: Transformer) -> None:
    with pytest.raises(ValueError, match="decode_text"):
        Engine(model).generate(REQUESTS, replace(FREE, stop_strings=("x",)))


# --- repetition -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(4, 6), st.integers(0, 4))
def test_four_equal_blocks_are_a_repetition(block: list[int], times: int, more: int) -> None:
    ids = (block * (times + 1))[: len(block) * times + min(more, len(block))]
    assert repeats(np.array(ids))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24))
def test_repeats_is_what_it_says(ids: list[int]) -> None:
    blocks = range(1, len(ids) // 4 + 1)
    assert repeats(np.array(ids)) == any((ids[:p] * len(ids))[: len(ids)] == ids for p in blocks)


@pytest.mark.parametrize("window", [16, 20, 32])
def test_a_looping_rollout_is_cut(window: int) -> None:
    model = small_model(seed=8)
    greedy = Sampling(temperature=0, max_tokens=100)
    free = Engine(model).generate(REQUESTS, greedy)

    def loop_found(rollout: Rollout) -> int | None:
        ids = np.array(rollout.ids)
        checks = range(16, len(ids) + 1, 16)
        return next((n for n in checks if n >= window and repeats(ids[n - window : n])), None)

    expected = [[cut(r, loop_found(r), "repetition") for r in group] for group in free]
    assert {"repetition"} <= {r.finish for r in flat(expected)}
    assert min(len(r.ids) for r in flat(expected)) < 100
    assert_same(Engine(model, rows=4).generate(REQUESTS, replace(greedy, repetition_window=window)), expected)


def test_lively_rollouts_are_not_cut(model: Transformer, reference: list[list[Rollout]]) -> None:
    assert_same(Engine(model).generate(REQUESTS, replace(FREE, repetition_window=16)), reference)


# --- as on CUDA ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "ahead"), [(1, 0), (5, 2), (8, 2), (40, 7)])
def test_looking_less_often_and_later_changes_nothing(
    interval: int, ahead: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the host sees the last tokens of each row as they were some steps ago."""
    stops = ("B", "CD")
    sampling = Sampling(temperature=0.1, max_tokens=60, stop_ids=(3,), stop_strings=stops, repetition_window=16)
    expected = Engine(model, rows=4, decode_text=letters).generate(REQUESTS, sampling)
    assert {r.finish for r in flat(expected)} == {"stop", "length", "repetition"}
    reports: dict[Decoder, Report] = {}

    def ask(self: Decoder) -> None:
        numbers = (self.state.counts[:, None] + torch.arange(-self.tail, 0)).clamp(min=0)
        tail = self.state.ids.gather(1, numbers).numpy()
        counts, codes = (x.numpy().copy() for x in (self.state.counts, self.state.finish))
        reports[self] = Report(counts, codes, tail, counts - self.tail)

    monkeypatch.setattr(Decoder, "ask", ask)
    monkeypatch.setattr(Decoder, "report", lambda self: reports[self])
    monkeypatch.setitem(engine_module.CHECK_INTERVAL, "cpu", interval)
    monkeypatch.setitem(engine_module.STEPS_AHEAD, "cpu", ahead)
    got = Engine(model, rows=4, decode_text=letters).generate(REQUESTS, sampling)
    assert_same(got, expected, tolerance=2e-5)  # a low temperature magnifies what rounding does to logits


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_a_bucket_of_rows_has_room_and_little_more(n: int, most: int) -> None:
    n = min(n, most)
    bucket = row_bucket(n, most)
    assert n <= bucket <= most
    assert bucket < 2 * n
    assert row_bucket(bucket, most) == bucket


def test_a_prefilled_context_is_what_steps_would_have_written(model: Transformer) -> None:
    """In every layer, the last one too, and for every sample of a group."""
    contexts = [sequence.tolist() for sequence in random_sequences([7, 2, 12, 1], seed=5)]
    samples = (3, 1, 4, 1)
    one, other = (Decoder(model, 9, 64, FREE) for _ in range(2))
    with torch.inference_mode():
        wave = one.prefill(contexts)
        admissions, row, start = [], 0, 0
        for context, count in zip(contexts, samples, strict=True):
            prefilled = Prefilled(wave, start, start + len(context) - 1)
            admissions.append(Admission(row, context, range(row, row + count), prefilled))
            row, start = row + count, prefilled.end
        one.admit(admissions)
        for position in range(11):
            other.state.positions.fill_(position)
            fed = [context[min(position, len(context) - 1)] for context in contexts]
            other.state.tokens.copy_(torch.tensor(fed).repeat_interleave(torch.tensor(samples)))
            other._step(9, 64)
    for new in admissions:
        rows, length = slice(new.first_row, new.first_row + len(new.seeds)), len(new.context) - 1
        for mine, theirs in zip(one.cache, other.cache, strict=True):
            torch.testing.assert_close(mine[:, rows, :, :length], theirs[:, rows, :, :length])
            assert not mine[:, rows, :, length:].any()
        assert one.state.tokens[rows].tolist() == [new.context[-1]] * len(new.seeds)
        assert one.state.positions[rows].tolist() == [length] * len(new.seeds)
    assert one.state.seeds.tolist() == one.state.leaders.tolist() == list(range(9))
    assert (one.state.finish == RUNNING).all()


def test_settings_that_take_turns_keep_their_buffers(model: Transformer) -> None:
    engine = Engine(model, rows=8)
    settings = [FREE, replace(FREE, temperature=0.5), replace(FREE, max_tokens=20)]
    for sampling in settings:
        engine.generate(REQUESTS, sampling)
    before = dict(engine._decoders)
    for sampling in settings:
        engine.generate(REQUESTS[:2], sampling)
    assert set(engine._decoders.values()) == set(before.values())
    assert len({decoder.cache.keys.data_ptr() for decoder in before.values()}) == 1
    for seed in range(6):
        engine.generate(REQUESTS[:1], replace(FREE, temperature=1 + seed))
    assert len(engine._decoders) == engine_module.MOST_DECODERS
    engine.generate(REQUESTS, replace(FREE, max_tokens=400))  # more memory: nothing of the old is kept
    assert len(engine._decoders) == 1


def test_an_interrupted_call_leaves_nothing_behind(model: Transformer, reference: list[list[Rollout]]) -> None:
    engine = Engine(model, rows=6)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(REQUESTS, replace(FREE, stop_ids=(2, 5, 9)), progress=interrupt)
    (decoder,) = engine._decoders.values()
    assert (decoder.state.finish == RUNNING).any()
    engine.generate(REQUESTS[:1], replace(FREE, stop_ids=(2, 5, 9)))
    assert not (decoder.state.finish == RUNNING).any()
    assert_same(engine.generate(REQUESTS, FREE), reference)


# --- continuous batching --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_few_rows_serve_many_ragged_samples_once_and_in_order(workers: int, model: Transformer) -> None:
    requests = requests_of([3, 1, 8, 2, 5, 21, 4, 13], [7, 2, 9, 1, 12, 3, 8, 6], seed=2)
    sampling = Sampling(max_tokens=60, stop_ids=tuple(range(0, VOCABULARY, 6)))
    expected = [
        [Engine(model).generate([Request(r.prompt, [seed])], sampling)[0][0] for seed in r.keys] for r in requests
    ]
    finished: list[int] = []
    got = Engine(model, rows=3, workers=workers).generate(requests, sampling, progress=finished.append)
    assert_same(got, expected)
    assert sum(finished) == 48
    assert len({len(r.ids) for r in flat(got)}) > 10


@pytest.mark.parametrize("rows", [1, 5, 32])
def test_leaders_hold_what_their_followers_share(
    rows: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read the context of a group in the row of one of it: the rows of others must stay the same as it."""
    followers: list[int] = []  # in every step
    step = Decoder.step

    def watched(decoder: Decoder, n: int, columns: int) -> None:
        state = decoder.state.first(n)
        followers.append(int((state.leaders != torch.arange(n)).sum()))
        for row, (leader, shared) in enumerate(zip(state.leaders.tolist(), state.shared.tolist(), strict=True)):
            assert leader < n
            for cached in decoder.cache:
                assert torch.equal(cached[:, row, :, :shared], cached[:, leader, :, :shared])
        step(decoder, n, columns)

    monkeypatch.setattr(Decoder, "step", watched)
    stopping = replace(FREE, stop_ids=tuple(range(0, VOCABULARY, 8)))  # rows end at any time, and others move up
    started = Engine(model, rows).generate(REQUESTS, replace(stopping, segment_tokens=3))
    again = [replace(request, started=group) for request, group in zip(REQUESTS, started, strict=True)]
    Engine(model, rows).generate(again, stopping)
    assert (followers[0] > 0, any(followers)) == ((rows > 1,) * 2)  # from the first step on


def test_decoding_runs_past_one_bucket_of_columns() -> None:
    model = small_model(seed=12)
    requests = requests_of([50, 1, 64, 65], [2, 2, 1, 2], seed=3)
    rollouts = flat(Engine(model, rows=3).generate(requests, Sampling(max_tokens=200)))
    assert {len(r.ids) for r in rollouts} == {200}
    learned = Learner(model, LearnerConfig()).logprobs([example(rollout, 0.0) for rollout in rollouts])
    for rollout, logprobs in zip(rollouts, learned, strict=True):
        np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-5, rtol=0)


def test_prompts_of_one_token(model: Transformer) -> None:
    requests = requests_of([1, 1, 1], [2, 3, 1])
    got = Engine(model, rows=2).generate(requests, FREE)
    assert [[len(r.ids) for r in group] for group in got] == [[40] * 2, [40] * 3, [40]]
    learned = Learner(model, LearnerConfig()).logprobs([example(rollout, 0.0) for rollout in flat(got)])
    for rollout, logprobs in zip(flat(got), learned, strict=True):
        np.testing.assert_allclose(rollout.logprobs, logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_asked_nothing_given(workers: int, model: Transformer, reference: list[list[Rollout]]) -> None:
    engine = Engine(model, workers=workers)
    assert engine.generate([], FREE) == []
    assert engine.generate([Request([1, 2], []), Request([3], [])], FREE) == [[], []]
    got = engine.generate([Request([1, 2], []), REQUESTS[0], Request([3], [])], FREE)
    assert_same(got, [[], reference[0], []])
