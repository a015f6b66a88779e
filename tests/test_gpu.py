"""On a CUDA device: captured graphs compute what the eager step computes, and the whole loop runs in bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_loop import Silent, config

from reasonlab.config import LearnerConfig
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.group import example
from reasonlab.model.checkpoint import load_model
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.model.transformer import Transformer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.decoder import LEAST_WAVE_TOKENS, WAVE_TOKENS, Decoder
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.operations import RUNNING, Rows, TorchOperations
from reasonlab.rollout.types import Request, Rollout, Sampling
from reasonlab.train.learner import Learner
from reasonlab.train.loop import start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENIZER = TinyTokenizer.load()


def requests(prompts: int, samples: int) -> list[Request]:
    return [
        Request(TOKENIZER.encode(prompt_text(p.question)), [key("gpu", p.id, i) for i in range(samples)])
        for p in problem_set("train", prompts, levels=(2, 3, 4, 5))
    ]


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def on_gpu(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_model(resolve_model("tiny-0.3m")).to(prepare("cuda"), dtype)


@pytest.mark.parametrize("rows", [5, 64, 512])
def test_greedy_decoding_equals_the_cpu(rows: int) -> None:
    sampling = Sampling(temperature=0, max_tokens=100, stop_ids=(TOKENIZER.eos_id,), repetition_window=32)
    work = requests(24, 2)
    cpu = flat(Engine(load_model(resolve_model("tiny-0.3m")), 64).generate(work, sampling))
    gpu = flat(Engine(on_gpu(), rows).generate(work, sampling))  # type: ignore[arg-type]
    same = [a.ids == b.ids and a.finish == b.finish for a, b in zip(cpu, gpu, strict=True)]
    assert np.mean(same) > 0.95, "only near ties may fall differently"


def test_captured_graph_equals_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(max_tokens=100, stop_ids=(TOKENIZER.eos_id,))
    work = requests(16, 8)
    captured = flat(Engine(on_gpu(), 32).generate(work, sampling))  # type: ignore[arg-type]
    monkeypatch.setattr(Decoder, "step", Decoder._step)
    eager = flat(Engine(on_gpu(), 32).generate(work, sampling))  # type: ignore[arg-type]
    same = [a.ids == b.ids for a, b in zip(captured, eager, strict=True)]
    assert np.mean(same) > 0.95
    for a, b in zip(captured, eager, strict=True):
        if a.ids == b.ids:
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)


REAL = {  # two layers of each
    "smollm2": ModelConfig("llama", 49152, 576, 1536, 2, 9, 3, 64),
    "qwen2.5": ModelConfig("qwen2", 151936, 896, 4864, 2, 14, 2, 64, qkv_bias=True),
    "qwen3": ModelConfig("qwen3", 151936, 1024, 3072, 2, 16, 8, 128, qk_norm=True),
}


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("prompts", [3, 200], ids=["few long rows", "many rows"])
@pytest.mark.parametrize("shape", REAL)
def test_kernels_on_real_shapes(shape: str, prompts: int, dtype: torch.dtype, mean: float) -> None:
    """Logprobs of what was drawn are those of a forward pass in fp32 with the same (rounded) weights."""
    model = Transformer(REAL[shape])
    model.initialise(0)
    model = model.to(prepare("cuda"), dtype)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1500 if prompts == 3 else 90, (prompts,), generator=generator).tolist()
    contexts = [torch.randint(0, 49152, (n,), generator=generator).tolist() for n in lengths]
    work = [Request(context, [key("real", i)]) for i, context in enumerate(contexts)]
    rollouts = flat(Engine(model, 128).generate(work, Sampling(max_tokens=40)))
    assert {len(rollout.ids) for rollout in rollouts} == {40}
    exact = Learner(model.float(), LearnerConfig(bfloat16=False)).logprobs([example(r, 0.0) for r in rollouts])
    differences = np.concatenate([np.abs(a - b.logprobs) for a, b in zip(exact, rollouts, strict=True)])
    print(f"{shape}, {prompts} prompts, {dtype}: mean {differences.mean():.2e}, max {differences.max():.2e}")
    assert differences.mean() < mean
    assert differences.max() < 30 * mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spread", [3.0, 6.0])
def test_top_p_over_a_large_vocabulary(spread: float, dtype: torch.dtype) -> None:
    """The tokens that sorting gives, but where the last bit of a sum decides."""
    pytest.importorskip("triton", reason="needs Triton")
    from reasonlab.rollout.kernels import Kernels

    device, sampling = prepare("cuda"), Sampling(temperature=0.6, top_p=0.95, max_tokens=4)
    logits = (torch.randn(512, 151936, device=device) * spread).to(dtype)
    sorted_, searched = (Rows.empty(512, 4, device) for _ in range(2))
    for rows in (sorted_, searched):
        rows.seeds.copy_(torch.arange(512) * 7919)
        rows.limits.fill_(4)
        rows.finish.fill_(RUNNING)
    stop_ids = torch.tensor([], dtype=torch.int64, device=device)
    TorchOperations().draw(logits, sorted_, stop_ids, sampling)
    Kernels(on_gpu(), 1).draw(logits, searched, stop_ids, sampling)  # type: ignore[arg-type]
    same = sorted_.tokens == searched.tokens
    assert same.float().mean() > 0.97
    torch.testing.assert_close(searched.logprobs[same], sorted_.logprobs[same], atol=1e-3, rtol=0)


def test_a_wave_fits_into_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(on_gpu(), 4, 64, Sampling(max_tokens=4))  # type: ignore[arg-type]
    assert decoder.wave_tokens() == WAVE_TOKENS["cuda"]
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 27, 1 << 37))
    assert LEAST_WAVE_TOKENS <= decoder.wave_tokens() < WAVE_TOKENS["cuda"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 37))
    assert decoder.wave_tokens() == LEAST_WAVE_TOKENS


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_engine_logprobs_are_the_learners(dtype: torch.dtype, mean: float) -> None:
    rollouts = flat(Engine(on_gpu(dtype), 256).generate(requests(32, 8), Sampling(max_tokens=100, stop_ids=(2,))))  # type: ignore[arg-type]
    learner = Learner(on_gpu(), LearnerConfig(bfloat16=dtype == torch.bfloat16))  # type: ignore[arg-type]
    mine = learner.logprobs([example(rollout, 0.0) for rollout in rollouts])
    differences = np.concatenate([np.abs(a - b.logprobs) for a, b in zip(mine, rollouts, strict=True)])
    print(f"{dtype}: mean {differences.mean():.2e}, max {differences.max():.2e}")
    assert differences.mean() < mean


def test_graphs_follow_the_weights() -> None:
    """A captured graph reads the weights where they lie: new weights, new rollouts, no new capture."""
    model = on_gpu()
    engine = Engine(model, 64)  # type: ignore[arg-type]
    sampling = Sampling(temperature=0, max_tokens=40, stop_ids=(2,))
    before = flat(engine.generate(requests(8, 1), sampling))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    changed = flat(engine.generate(requests(8, 1), sampling))
    fresh = flat(Engine(model, 64).generate(requests(8, 1), sampling))  # type: ignore[arg-type]
    assert [r.ids for r in changed] == [r.ids for r in fresh]
    assert [r.ids for r in changed] != [r.ids for r in before]


@pytest.mark.parametrize("method", [{"type": "mirror_descent"}, {"type": "grpo", "kl": 0.01}], ids=["mirror", "grpo"])
def test_training_runs_in_bf16(tmp_path: Path, method: dict[str, object]) -> None:
    observer = Silent()
    learner = {"lr": 1e-4, "inner_steps": 2}
    outcome = start(config(device="cuda", method=method, learner=learner), tmp_path / "run", [], observer).run()
    assert outcome.status == "finished"
    assert all(metrics["train/logprob_diff/max"] < 0.5 for metrics in observer.iterations)
    load_model(tmp_path / "run/checkpoints/final")
