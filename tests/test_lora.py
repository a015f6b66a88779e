"""LoRA computes and learns what peft computes and learns, and its files travel both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import in_transformers, packed_logits, random_sequences, small_model

from reasonlab.cli import main
from reasonlab.config import LearnerConfig
from reasonlab.errors import UserError
from reasonlab.methods.sft import sft_loss
from reasonlab.model.accumulate import Linear
from reasonlab.model.attention import PackedCausal
from reasonlab.model.checkpoint import load_model, save_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.lora import (
    TARGETS,
    adapter_base,
    add_lora,
    has_lora,
    load_adapter,
    lora_parameters,
    merged,
    refresh_merged,
    save_adapter,
)
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.train.batch import Example
from reasonlab.train.learner import Learner

SOME = ("q_proj", "v_proj", "up_proj")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tied": True},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True, "tied": False},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
}
SEQUENCES = random_sequences([7, 19, 3])


def shaken(model: Transformer, seed: int = 1) -> Transformer:
    """Adapters that matter: as if they had been trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(model):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def adapted(targets: tuple[str, ...] = TARGETS, rank: int = 4, alpha: float = 6, **shape: Any) -> Transformer:
    model = small_model(**shape)
    add_lora(model, rank, alpha, targets)
    return shaken(model)


def loss_of(logits: list[torch.Tensor]) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits[0].shape[-1])
    return torch.stack([(part.log_softmax(-1) * weights).sum() for part in logits]).sum()


def our_loss(model: Transformer) -> torch.Tensor:
    attend = PackedCausal([len(s) for s in SEQUENCES])
    flat = model(torch.cat(SEQUENCES), attend.positions, attend) @ model.head_weight.T
    return loss_of(list(flat.split([len(s) for s in SEQUENCES])))


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


# --- parity with peft -----------------------------------------------------------------------------------------------


def in_peft(model: Transformer, directory: Path) -> Any:
    """The base model in transformers with our adapter, loaded by peft as one that is trained further."""
    peft = pytest.importorskip("peft", reason="the peft package is not installed")
    plain = Transformer(model.config)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "lora_" not in name})
    theirs = in_transformers(plain, directory / "base")
    (directory / "adapter").mkdir()
    save_adapter(model, directory / "adapter", base=str(directory / "base"))
    return peft.PeftModel.from_pretrained(theirs, directory / "adapter", is_trainable=True).eval()


@pytest.mark.parity
@pytest.mark.parametrize("targets", [TARGETS, SOME], ids=["all", "some"])
@pytest.mark.parametrize("shape", SHAPES)
def test_peft_reads_our_adapter_and_agrees_on_logits_and_gradients(
    shape: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = adapted(targets, **SHAPES[shape])
    theirs = in_peft(model, tmp_path)
    expected = [theirs(s[None]).logits[0] for s in SEQUENCES]
    assert_close(packed_logits(model, SEQUENCES), [part.detach() for part in expected])
    loss_of(expected).backward()
    our_loss(model).backward()
    gradients = {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    (tmp_path / "gradients").mkdir()
    with torch.no_grad():  # by way of the files, which know which part is which
        for parameter in lora_parameters(model):
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    save_adapter(model, tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    assert set(ours) == set(gradients)
    for name, value in ours.items():
        assert value.abs().max() > 0
        torch.testing.assert_close(value, gradients[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_adapter_that_peft_saved_loads_and_comes_back_unchanged(shape: str, rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the peft package is not installed")
    base = small_model(**SHAPES[shape])
    theirs = in_transformers(base, tmp_path / "base")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(SOME), use_rslora=rslora, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(theirs, config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path / "adapter")
    load_adapter(base, tmp_path / "adapter")
    with torch.no_grad():
        expected = [theirs(s[None]).logits[0] for s in SEQUENCES]
    assert_close(packed_logits(base, SEQUENCES), expected)
    (tmp_path / "again").mkdir()
    save_adapter(base, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert adapter_base(tmp_path / "adapter") == str(tmp_path / "base")


# --- training and merging -------------------------------------------------------------------------------------------


def test_a_fresh_adapter_changes_nothing_and_its_start_depends_on_the_seed_alone() -> None:
    plain, starts = small_model(), []
    for seed in (1, 1, 2):
        model = small_model()
        add_lora(model, 4, 8, SOME, seed)
        assert_equal_logits(model, plain)
        starts.append(torch.cat([parameter.detach().flatten() for parameter in lora_parameters(model)]))
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert 0 < starts[0].abs().max() <= 24**-0.5


def assert_equal_logits(one: Transformer, other: Transformer) -> None:
    for a, b in zip(packed_logits(one, SEQUENCES), packed_logits(other, SEQUENCES), strict=True):
        assert torch.equal(a, b)


def test_only_adapters_learn_and_carry_optimizer_state() -> None:
    model = adapted(qkv_bias=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = lora_parameters(model)
    assert [p for p in model.parameters() if p.requires_grad] == trained
    assert len(trained) == 2 * len(TARGETS) * model.config.layers
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = -our_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name)
        assert (parameter.grad is None) != ("lora_" in name)
    assert len(optimizer.state) == len(trained)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_learner_updates_adapters_alone_however_the_batch_is_cut(recompute: bool) -> None:
    rng = np.random.default_rng(0)
    examples = [
        Example(ids[:4], ids[4:], np.zeros(len(ids) - 4, np.float32), np.ones(len(ids) - 4, bool), advantage=1.0)
        for ids in (rng.integers(0, 32, length) for length in (9, 14, 6, 11))
    ]
    finished = []
    for budget, workers in ((10_000, 1), (12, 2)):
        model = adapted()
        learner = Learner(model, LearnerConfig(lr=0.01, eps=1e-3, token_budget=budget, recompute=recompute), workers)
        assert learner.parameters == [p for p in model.parameters() if p.requires_grad]
        assert len(learner.parameters) == len(lora_parameters(model))
        losses = [learner.step(examples, sft_loss).loss for _ in range(3)]
        assert losses[2] < losses[0]
        plain = dict(small_model().named_parameters())
        assert all(torch.equal(p, plain[n]) for n, p in model.named_parameters() if "lora_" not in n)
        finished.append(lora_parameters(model))
    for one, other in zip(*finished, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(finished[0], lora_parameters(adapted()), strict=True))


@pytest.mark.parametrize("targets", [TARGETS, SOME, ("down_proj",)], ids=["all", "some", "one"])
def test_merged_weights_compute_the_same(targets: tuple[str, ...]) -> None:
    model = adapted(targets, qkv_bias=True, tied=False)
    plain = merged(model)
    assert not has_lora(plain)
    assert type(plain.blocks[0].attention.qkv) is Linear
    assert_close(packed_logits(plain, SEQUENCES), packed_logits(model, SEQUENCES))
    assert plain.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()  # frozen: shared
    shaken(model, seed=2)
    stale = packed_logits(plain, SEQUENCES)
    refresh_merged(plain, model)
    assert_close(packed_logits(plain, SEQUENCES), packed_logits(model, SEQUENCES))
    assert (stale[0] - packed_logits(plain, SEQUENCES)[0]).abs().max() > 1e-3


def test_a_half_precision_engine_copy_is_rounded_once() -> None:
    model = adapted()
    plain = merged(model, torch.bfloat16)
    assert {parameter.dtype for parameter in plain.parameters()} == {torch.bfloat16}
    exact = merged(model)
    for a, b in zip(plain.parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16())
    shaken(model, seed=2)
    refresh_merged(plain, model)
    assert torch.equal(plain.blocks[0].attention.qkv.weight, merged(model).blocks[0].attention.qkv.weight.bfloat16())


def test_the_engine_samples_alike_with_adapters_and_with_merged_weights() -> None:
    model = adapted()
    requests = [Request([1, 5, 9], [11, 12]), Request([1, 7], [13])]
    sampling = Sampling(temperature=0.7, max_tokens=12, stop_ids=(2,))
    beside, inside = (Engine(m, rows=4).generate(requests, sampling) for m in (model, merged(model)))
    for one, other in zip(beside, inside, strict=True):
        assert [rollout.ids for rollout in one] == [rollout.ids for rollout in other]


def test_saving_a_model_writes_what_it_computes(tmp_path: Path) -> None:
    model = adapted()
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert_close(packed_logits(loaded, SEQUENCES), packed_logits(model, SEQUENCES))
    assert not any("lora" in name for name in load_file(tmp_path / "model.safetensors"))


def test_an_adapter_continues_where_it_was_saved(tmp_path: Path) -> None:
    model = adapted(SOME, alpha=2.5)
    save_adapter(model, tmp_path)
    again = small_model()
    add_lora(again, 4, 9, SOME, seed=5)
    load_adapter(again, tmp_path)
    assert_equal_logits(again, model)
    assert all(torch.equal(a, b) for a, b in zip(lora_parameters(again), lora_parameters(model), strict=True))


def test_apply_writes_a_plain_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = load_model(resolve_model("tiny-0.3m"))
    add_lora(base, 2, 4)
    shaken(base)
    (tmp_path / "adapter").mkdir()
    save_adapter(base, tmp_path / "adapter", base="tiny-0.3m")
    words = ["models", "apply", str(tmp_path / "adapter"), "--to", str(tmp_path / "tuned")]
    assert main(words) == 0
    assert_close(packed_logits(load_model(tmp_path / "tuned"), SEQUENCES), packed_logits(base, SEQUENCES))
    assert (tmp_path / "tuned" / "tokenizer.json").is_file()
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "tuned"]
    assert main([*words[:-1], str(tmp_path / "again"), "--base", "tiny-0.3m"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "other"), "--base", str(tmp_path / "tuned")]) == 0
    assert "was trained on tiny-0.3m, not on" in capsys.readouterr().err


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [[], ["--base", "tiny-0.3m"]])
def test_apply_names_the_adapter_that_lies_below(
    base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(directory: Path) -> str:
        assert main(["models", "apply", str(directory), "--to", str(tmp_path / "tuned"), *base]) == 2
        return capsys.readouterr().err

    run = tmp_path / "run"
    for step in ("step-000010", "step-000020", "final"):
        adapter = run / "checkpoints" / step / "adapter"
        adapter.parent.mkdir(parents=True)
        assert "Give a directory that peft saved" in told(adapter.parent)
        adapter.mkdir()
        save_adapter(adapted(SOME), adapter)
        assert f"One lies below it: {adapter}" in told(run), "the newest one"
        assert f"One lies below it: {adapter}" in told(adapter.parent)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((4, 8, ("lm_head",)), "no target lm_head"),
        ((4, 8, ()), "no target at all"),
        ((0, 8, SOME), "rank 0"),
        ((4, 0, SOME), "alpha 0"),
    ],
)
def test_adapters_that_cannot_be_are_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        add_lora(small_model(), *arguments)


def test_adapters_do_not_pile_up() -> None:
    with pytest.raises(UserError, match="adapters already"):
        add_lora(adapted(), 4, 8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_adapter(adapted(SOME), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"a_new_idea": 3}, "a_new_idea"),
        ({"r": "many"}, "not an adapter's config"),
    ],
)
def test_arithmetic_that_is_not_ours_is_refused_by_name(change: dict[str, Any], told: str, saved: Path) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=told):
        load_adapter(small_model(), saved)


def test_an_adapter_of_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="does not fit the model"):
        load_adapter(small_model(hidden_size=32), saved)
    with pytest.raises(UserError, match=r"does not fit the model .*layers\.2"):
        load_adapter(small_model(layers=3), saved)


def test_an_adapter_on_some_layers_only_is_refused(saved: Path) -> None:
    tensors = load_file(saved / "adapter_model.safetensors")
    kept = {name: value for name, value in tensors.items() if "layers.1." not in name}
    save_file(kept, saved / "adapter_model.safetensors")
    with pytest.raises(UserError, match="all layers must have the same targets"):
        load_adapter(small_model(), saved)


def test_a_directory_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no adapter_config\.json"):
        load_adapter(small_model(), tmp_path)
    with pytest.raises(UserError, match="no adapters to save"):
        save_adapter(small_model(), tmp_path)
