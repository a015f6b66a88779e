"""A response made in segments is the response made at once; what is not done waits, is saved, and goes on.

Most models here compute in double precision: cached keys come from prefill in one case and from decoding in the other,
and in single precision a draw that falls next to the border between two tokens could fall differently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCABULARY, packed_logits, random_sequences, small_model

from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.model.transformer import Transformer
from reasonlab.problems.problem import Problem
from reasonlab.rollout import engine as engine_module
from reasonlab.rollout.decoder import Decoder
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.partial import PartialRollouts
from reasonlab.rollout.types import Request, Rollout, Sampling

Groups = Sequence[Sequence[Rollout]]

FREE = Sampling(max_tokens=40)
STOP_IDS = tuple(range(0, VOCABULARY, 8))


def letters(ids: Sequence[int]) -> str:
    """A tokenizer's decoder: one letter for each id."""
    return "".join(chr(ord("A") + i) for i in ids)


def requests_of(lengths: Sequence[int], sizes: Sequence[int], seed: int = 0) -> list[Request]:
    prompts = random_sequences(list(lengths), seed)
    return [
        Request(prompt.tolist(), [key("partial", seed, i, j) for j in range(size)])
        for i, (prompt, size) in enumerate(zip(prompts, sizes, strict=True))
    ]


REQUESTS = requests_of([5, 1, 17, 2], [3, 2, 4, 1])
SAMPLES = 10


def problems_with(requests: Sequence[Request]) -> list[tuple[Problem, Request]]:
    return [
        (Problem(f"test/{i}", f"What is {i}?\n“é”", str(i), "sum", level=i), request)
        for i, request in enumerate(requests)
    ]


def flat(groups: Groups) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def go_on(requests: Sequence[Request], groups: Groups) -> list[Request]:
    return [replace(request, started=group) for request, group in zip(requests, groups, strict=True)]


def in_segments(engine: Engine, requests: Sequence[Request], sampling: Sampling, sizes: Sequence[int] = ()) -> Groups:
    """Call after call until all is done; with `sizes`, the segments of the calls have these sizes in turn."""
    groups: Groups = [[] for _ in requests]
    for call in range(1000):
        size = sizes[call % len(sizes)] if sizes else sampling.segment_tokens
        groups = engine.generate(go_on(requests, groups), replace(sampling, segment_tokens=size))
        if all(r.finish != "unfinished" for r in flat(groups)):
            return groups
    raise AssertionError("it never ends")


def assert_same(got: Groups, expected: Groups) -> None:
    assert [[r.ids for r in group] for group in got] == [[r.ids for r in group] for group in expected]
    for a, b in zip(flat(got), flat(expected), strict=True):
        assert (a.prompt, a.finish) == (b.prompt, b.finish)
        assert a.logprobs.dtype == np.float32
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
        assert len(a.versions) == len(a.ids)


def assert_same_bits(got: Groups, expected: Groups) -> None:
    assert_same(got, expected)
    for a, b in zip(flat(got), flat(expected), strict=True):
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert a.versions.dtype == b.versions.dtype
        assert a.versions.tolist() == b.versions.tolist()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return small_model(seed=3).double()


@pytest.fixture(scope="module")
def looping() -> Transformer:
    """A model whose likeliest tokens run into a loop."""
    return small_model(seed=8).double()


# --- the same response ----------------------------------------------------------------------------------------------

WAYS_TO_END = {
    "length": FREE,
    "stop ids": replace(FREE, stop_ids=STOP_IDS),
    "stop strings": replace(FREE, stop_strings=("SQ", "KOI", "H")),
    "repetition": Sampling(temperature=0, max_tokens=100, repetition_window=20),
    "all": Sampling(0.5, max_tokens=70, stop_ids=STOP_IDS[:2], stop_strings=("AB", "ZZ"), repetition_window=16),
}


@pytest.mark.parametrize("segment", [1, 7, 16, 39, 40, 1000])
@pytest.mark.parametrize("name", WAYS_TO_END)
def test_segments_make_the_same_response(name: str, segment: int, model: Transformer, looping: Transformer) -> None:
    weights = looping if name == "repetition" else model
    sampling = WAYS_TO_END[name]
    expected = Engine(weights, decode_text=letters).generate(REQUESTS, sampling)
    if name in ("stop ids", "stop strings", "repetition"):
        assert name.split()[0] in {r.finish for r in flat(expected)}
        assert len({len(r.ids) for r in flat(expected)}) > 2
    engine = Engine(weights, rows=4, decode_text=letters)
    assert_same(in_segments(engine, REQUESTS, replace(sampling, segment_tokens=segment)), expected)


@pytest.mark.parametrize("segment", [5, 16])
def test_in_single_precision_too(segment: int) -> None:
    engine = Engine(small_model(seed=3), decode_text=letters)
    sampling = WAYS_TO_END["stop strings"]
    got = in_segments(engine, REQUESTS, replace(sampling, segment_tokens=segment))
    assert_same(got, engine.generate(REQUESTS, sampling))


@pytest.mark.parametrize("end", [3, 4, 5, 8, 9])
def test_a_stop_string_across_the_border_of_segments(end: int, model: Transformer) -> None:
    """Segments of four tokens; the string ends before, at and after a border."""
    request = [Request(REQUESTS[2].prompt, REQUESTS[2].keys[:1])]
    whole = flat(Engine(model).generate(request, FREE))[0]
    stop = letters(whole.ids[end - 3 : end])
    assert letters(whole.ids).index(stop) == end - 3
    sampling = replace(FREE, stop_strings=(stop,), segment_tokens=4)
    (rollout,) = flat(in_segments(Engine(model, decode_text=letters), request, sampling))
    assert (rollout.ids, rollout.finish) == (whole.ids[:end], "stop")


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    segments=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    max_tokens=st.integers(1, 45),
    stops=st.sampled_from([(), STOP_IDS[:1], STOP_IDS]),
    strings=st.sampled_from([(), ("SQ", "KO")]),
    window=st.sampled_from([0, 16]),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    rows=st.integers(1, 6),
    workers=st.integers(1, 2),
    interval=st.sampled_from([1, 8]),
    seed=st.integers(0, 5),
)
def test_any_segments_make_the_same_response(
    lengths: list[int],
    sizes: list[int],
    segments: list[int],
    max_tokens: int,
    stops: tuple[int, ...],
    strings: tuple[str, ...],
    window: int,
    temperature: float,
    rows: int,
    workers: int,
    interval: int,
    seed: int,
) -> None:
    weights = small_model(seed=seed).double()
    requests = requests_of(lengths, sizes[: len(lengths)], seed)
    sampling = Sampling(
        temperature, max_tokens=max_tokens, stop_ids=stops, stop_strings=strings, repetition_window=window
    )
    expected = Engine(weights, decode_text=letters).generate(requests, sampling)
    with pytest.MonkeyPatch.context() as patch:  # as on CUDA, where rows run on for a few steps after their end
        patch.setitem(engine_module.CHECK_INTERVAL, "cpu", interval)
        got = in_segments(Engine(weights, rows, workers, letters), requests, sampling, segments)
    assert_same(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("segment", [3, 16])
def test_segments_make_the_same_response_on_cuda(segment: int) -> None:
    """Captured graphs, and rows that are looked at every eighth step."""
    weights = small_model(seed=3).to(prepare("cuda"))
    sampling = Sampling(0.5, max_tokens=70, stop_ids=STOP_IDS[:2], stop_strings=("AB", "ZZ"), repetition_window=16)
    requests = requests_of([5, 1, 17, 2, 70], [3, 2, 4, 1, 6])
    engine = Engine(weights, rows=8, decode_text=letters)
    expected = flat(engine.generate(requests, sampling))
    got = flat(in_segments(engine, requests, replace(sampling, segment_tokens=segment)))
    same = [(a.ids, a.finish) == (b.ids, b.finish) for a, b in zip(got, expected, strict=True)]
    assert np.mean(same) > 0.9, "only near ties may fall differently"
    for a, b in zip(got, expected, strict=True):
        if a.ids == b.ids:
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)


# --- one call --------------------------------------------------------------------------------------------------------


def test_a_segment_is_so_many_new_tokens_and_max_tokens_counts_all(model: Transformer) -> None:
    engine, groups = Engine(model), [[] for _ in REQUESTS]
    for length, finish in ((16, "unfinished"), (32, "unfinished"), (40, "length")):
        groups = engine.generate(go_on(REQUESTS, groups), replace(FREE, segment_tokens=16))
        assert {(len(r.ids), len(r.logprobs), r.finish) for r in flat(groups)} == {(length, length, finish)}
    assert [group[0].prompt for group in groups] == [request.prompt for request in REQUESTS]


def test_a_segment_that_ends_with_the_response_is_not_unfinished(model: Transformer) -> None:
    got = Engine(model).generate(REQUESTS, replace(FREE, segment_tokens=40))
    assert {r.finish for r in flat(got)} == {"length"}
    ids = got[0][0].ids
    count = ids.index(ids[9]) + 1
    request = Request(REQUESTS[0].prompt, REQUESTS[0].keys[:1])
    got = Engine(model).generate([request], replace(FREE, segment_tokens=count, stop_ids=(ids[9],)))
    assert (got[0][0].ids, got[0][0].finish) == (ids[:count], "stop")


def test_new_tokens_come_from_the_new_weights_and_old_ones_stay() -> None:
    weights = small_model(seed=3)
    engine, sampling = Engine(weights), replace(FREE, segment_tokens=15)
    engine.version = 6
    before = engine.generate(REQUESTS, sampling)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.mul_(0.9)
    engine.version = 7
    after = engine.generate(go_on(REQUESTS, before), sampling)
    for old, new in zip(flat(before), flat(after), strict=True):
        assert new.ids[:15] == old.ids
        assert new.logprobs[:15].tobytes() == old.logprobs.tobytes()
        assert new.versions.tolist() == [6] * 15 + [7] * 15
        assert new.versions.dtype == np.int32
        assert len(old.ids) == 15  # what was passed in is as it was
        logits = packed_logits(weights, [torch.tensor(new.prompt + new.ids)])[0][-16:-1]
        expected = logits.log_softmax(-1)[torch.arange(15), torch.tensor(new.ids[15:])]
        np.testing.assert_allclose(new.logprobs[15:], expected, atol=1e-5, rtol=0)


def test_a_request_may_mix_finished_unfinished_and_new_samples(model: Transformer) -> None:
    request = requests_of([7], [5], seed=4)[0]
    engine = Engine(model, rows=2)
    (expected,) = engine.generate([request], FREE)
    (parts,) = engine.generate([request], replace(FREE, segment_tokens=11))
    started = [None, parts[1], expected[2], parts[3], None]
    counted: list[int] = []
    (got,) = engine.generate([replace(request, started=started)], FREE, counted.append)
    assert_same([got], [expected])
    assert got[2] is expected[2]
    assert sum(counted) == 4
    (again,) = engine.generate([replace(request, started=got)], FREE, counted.append)
    assert [a is b for a, b in zip(again, got, strict=True)] == [True] * 5
    assert sum(counted) == 4


def test_new_samples_share_a_prefill_and_continued_ones_bring_their_tokens(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requests_of([7], [4], seed=4)[0]
    engine = Engine(model)
    (parts,) = engine.generate([request], replace(FREE, segment_tokens=11))
    prefilled: list[list[int]] = []
    original = Decoder.prefill

    def spy(self: Decoder, contexts: Sequence[Sequence[int]]) -> Any:
        prefilled.extend(list(context) for context in contexts)
        return original(self, contexts)

    monkeypatch.setattr(Decoder, "prefill", spy)
    engine.generate([replace(request, started=[None, parts[1], None, parts[3]])], FREE)
    prompt = list(request.prompt)
    assert sorted(prefilled) == sorted([prompt, prompt + parts[1].ids, prompt + parts[3].ids])


def test_progress_counts_what_is_finished(model: Transformer) -> None:
    engine, counted = Engine(model), [0]
    sampling = replace(FREE, stop_ids=STOP_IDS, segment_tokens=6)
    groups = engine.generate(REQUESTS, sampling, counted.append)
    finished = sum(r.finish != "unfinished" for r in flat(groups))
    assert 0 < finished < SAMPLES
    assert sum(counted) == finished
    engine.generate(go_on(REQUESTS, groups), replace(sampling, segment_tokens=0), counted.append)
    assert sum(counted) == SAMPLES
    assert 0 not in counted[1:]


def test_what_cannot_be_continued_is_an_error(model: Transformer) -> None:
    engine, sampling = Engine(model), replace(FREE, segment_tokens=10)
    parts = engine.generate(REQUESTS, sampling)
    with pytest.raises(ValueError, match="2 started rollouts for 3 keys"):
        engine.generate([replace(REQUESTS[0], started=parts[0][:2])], sampling)
    with pytest.raises(ValueError, match="another prompt"):
        engine.generate([replace(REQUESTS[0], started=parts[2][:3])], sampling)
    with pytest.raises(ValueError, match="10 of 10 tokens"):
        engine.generate(go_on(REQUESTS, parts), Sampling(max_tokens=10))


# --- the buffer ------------------------------------------------------------------------------------------------------

RAGGED = Sampling(max_tokens=60, stop_ids=STOP_IDS, segment_tokens=9)
STREAM = [problems_with(requests_of([3, 9, 1, 5], [3, 1, 2, 4], seed)) for seed in (10, 11, 12)]


def run(
    buffer: PartialRollouts, engine: Engine, passes: Sequence[int], sampling: Sampling = RAGGED
) -> list[list[tuple[Problem, list[Rollout]]]]:
    """What each pass hands out; passes beyond the stream bring nothing new."""
    dispatched = []
    for number in passes:
        engine.version = number
        dispatched.append(buffer.generate(engine, STREAM[number] if number < len(STREAM) else [], sampling))
    return dispatched


def test_the_buffer_hands_out_every_group_once_and_whole(model: Transformer) -> None:
    buffer = PartialRollouts()
    dispatched = run(buffer, Engine(model, rows=5), range(8))
    assert (buffer.pending_groups, buffer.pending_rollouts) == (0, 0)
    handed_out = {(p.id, tuple(g[0].prompt)): g for out in dispatched for p, g in out}
    assert len(handed_out) == sum(len(out) for out in dispatched) == 12
    for group in (group for batch in STREAM for group in batch):
        problem, request = group
        expected = Engine(model).generate([request], replace(RAGGED, segment_tokens=0))
        assert_same([handed_out[problem.id, tuple(request.prompt)]], expected)


def test_groups_wait_for_all_members_and_leave_oldest_first(model: Transformer) -> None:
    buffer, engine = PartialRollouts(), Engine(model)
    begun = {tuple(request.prompt): n for n, batch in enumerate(STREAM) for _, request in batch}
    late = 0
    for number in range(6):
        (out,) = run(buffer, engine, [number])
        starts = [begun[tuple(group[0].prompt)] for _, group in out]
        assert starts == sorted(starts)
        late += sum(start < number for start in starts)
        for _, group in out:
            assert "unfinished" not in {r.finish for r in group}
            assert (
                max(r.versions.max() for r in group) == number
            )  # a group leaves in the pass that ends its last member
    assert late > 0


def test_the_counts_are_those_of_the_engine(model: Transformer) -> None:
    buffer, counted = PartialRollouts(), [0]
    out = buffer.generate(Engine(model), STREAM[0], RAGGED, counted.append)
    expected = Engine(model).generate([request for _, request in STREAM[0]], RAGGED)
    assert buffer.pending_groups == sum(any(r.finish == "unfinished" for r in g) for g in expected) > 0
    assert buffer.pending_rollouts == sum(r.finish == "unfinished" for r in flat(expected)) > buffer.pending_groups
    assert len(out) == len(STREAM[0]) - buffer.pending_groups
    assert sum(counted) == 10 - buffer.pending_rollouts


def test_without_segments_a_pass_is_the_engine(model: Transformer) -> None:
    buffer, counted, expected_counts = PartialRollouts(), [0], [0]
    sampling = replace(RAGGED, segment_tokens=0)
    out = buffer.generate(Engine(model, rows=3), STREAM[0], sampling, counted.append)
    expected = Engine(model, rows=3).generate([request for _, request in STREAM[0]], sampling, expected_counts.append)
    assert [problem for problem, _ in out] == [problem for problem, _ in STREAM[0]]
    assert_same_bits([group for _, group in out], expected)
    assert counted == expected_counts
    assert buffer.pending_groups == 0
    assert buffer.generate(Engine(model), [], sampling) == []


def test_a_pass_without_limit_empties_the_buffer(model: Transformer) -> None:
    buffer, engine = PartialRollouts(), Engine(model)
    (first,) = run(buffer, engine, [0])
    rest = buffer.generate(engine, [], replace(RAGGED, segment_tokens=0))
    assert buffer.pending_groups == 0
    assert sorted(p.id for p, _ in first + rest) == sorted(p.id for p, _ in STREAM[0])


def test_a_pass_that_fails_leaves_the_buffer_as_it_was(model: Transformer) -> None:
    buffer, engine = PartialRollouts(), Engine(model)
    run(buffer, engine, [0])
    before = buffer.state()

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        buffer.generate(engine, STREAM[1], RAGGED, interrupt)
    assert buffer.state() == before


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_after", [1, 2, 4])
def test_saved_and_restored_the_passes_go_on_bit_for_bit(saved_after: int) -> None:
    weights = small_model(seed=3)
    whole = run(PartialRollouts(), Engine(weights, rows=4), range(8))
    buffer = PartialRollouts()
    first = run(buffer, Engine(weights, rows=4), range(saved_after))
    saved = json.dumps(buffer.state())
    assert buffer.pending_rollouts > 0
    restored = PartialRollouts()
    restored.restore(json.loads(saved))
    assert restored.state() == buffer.state()
    assert (restored.pending_groups, restored.pending_rollouts) == (buffer.pending_groups, buffer.pending_rollouts)
    rest = run(restored, Engine(weights, rows=4), range(saved_after, 8))
    for got, expected in zip(first + rest, whole, strict=True):
        assert [problem for problem, _ in got] == [problem for problem, _ in expected]
        assert_same_bits([group for _, group in got], [group for _, group in expected])


def test_restoring_replaces_what_was_there(model: Transformer) -> None:
    buffer = PartialRollouts()
    run(buffer, Engine(model), [0])
    buffer.restore(PartialRollouts().state())
    assert (buffer.pending_groups, buffer.pending_rollouts) == (0, 0)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8), st.integers(0, 2**63 - 1))
def test_the_state_is_exact(logprobs: list[float], seed: int) -> None:
    """Any float32, any key, every field of a problem, finished members beside unfinished ones."""
    count = len(logprobs)
    values = np.array(logprobs, np.float32)
    versions = np.arange(count, dtype=np.int32)
    rollouts = [
        Rollout([1, 2], list(range(count)), values, "unfinished", versions),
        Rollout([1, 2], list(range(count)), values[::-1].copy(), "stop", versions[::-1].copy()),
    ]
    problem = Problem("id/“\n", "question", "answer", "family", 5)
    assert all(getattr(problem, field.name) for field in fields(Problem))
    captured: list[Request] = []

    class Stub(Engine):
        def __init__(self) -> None:
            pass

        def generate(self, requests: Sequence[Request], *_: Any) -> list[list[Rollout]]:
            captured.extend(requests)
            return [rollouts for _ in requests]

    buffer, restored = PartialRollouts(), PartialRollouts()
    buffer.generate(Stub(), [(problem, Request([1, 2], [seed, 7]))], RAGGED)
    restored.restore(json.loads(json.dumps(buffer.state())))
    assert restored.pending_rollouts == 1
    rollouts[0] = replace(rollouts[0], finish="length")
    assert restored.generate(Stub(), [], RAGGED)[0][0] == problem
    request = captured[-1]
    assert (request.prompt, request.keys) == ([1, 2], [seed, 7])
    for got, wanted in zip(request.started, [replace(rollouts[0], finish="unfinished"), rollouts[1]], strict=True):
        assert got is not None
        assert (got.prompt, got.ids, got.finish) == (wanted.prompt, wanted.ids, wanted.finish)
        assert got.logprobs.dtype == np.float32
        assert got.logprobs.tobytes() == wanted.logprobs.tobytes()
        assert got.versions.dtype == np.int32
        assert got.versions.tolist() == wanted.versions.tolist()
