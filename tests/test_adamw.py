"""The optimizer's kernel moves weights as torch's AdamW does, and writes their copy in the same pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small_model
from test_learner import LOSSES, settings, watch_gradients
from torch import Tensor, nn
from update_pieces import DEVICE, compiled_elsewhere, device_learner, grouped_examples, on_cuda, through_kernels

from reasonlab.model.lora import add_lora
from reasonlab.train import adamw, graphs
from reasonlab.train.adamw import AdamW, chunk_table
from reasonlab.train.checkpoint import optimizer_tensors
from reasonlab.train.learner import Learner, working_copy

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "odd": [(1,), (63,), (64,), (65,), (7, 29), (), (3, 64)],
    "many": [(5,)] * 40,
    "empty": [(0,), (70,), (3, 0)],
}
CHUNK = 64
ROUNDING = 1e-7 if DEVICE == "cpu" else 2e-6  # on CUDA torch has the betas in fp32, and 1 − β₂ with five digits


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks of each launch; chunks are small, and casts in the interpreter round as those of a device do."""
    through_kernels(monkeypatch)
    from triton.runtime import interpreter

    from reasonlab.train import kernels

    convert, launch, seen = interpreter._convert_float, kernels.adamw, []

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) != ("fp32", "bf16"):
            return convert(x, source, target, mode)
        return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.uint16).numpy()

    def note(table: Tensor, *others: Any) -> None:
        seen.append(len(table))
        launch(table, *others)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(kernels, "adamw", note)
    monkeypatch.setattr(adamw, "CHUNK", CHUNK)
    return seen


def draw(shapes: Sequence[tuple[int, ...]], seed: int, size: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(size * torch.randn(shape, generator=generator)).to(DEVICE) for shape in shapes]


def number(x: float) -> Tensor:
    return torch.tensor(x, device=DEVICE)


class Pair:
    """Weights that the kernel moves, and the same ones that torch does."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], **changes: Any) -> None:
        self.options = OPTIONS | changes
        self.shapes = shapes
        self.mine, self.theirs = ([nn.Parameter(x) for x in draw(shapes, 0)] for _ in range(2))
        self.copies = [p.detach().to(torch.bfloat16) for p in self.mine]
        self.ours = AdamW(self.mine, **self.options)
        self.torchs = torch.optim.AdamW(self.theirs, **self.options, fused=True)

    def step(self, seed: int, scale: float = 1.0, found_inf: bool = False, copied: bool = True) -> None:
        for parameters in (self.mine, self.theirs):
            for p, g in zip(parameters, draw(self.shapes, seed, 0.1 * seed), strict=True):
                p.grad = torch.empty_like(p).copy_(g)  # with its strides
        self.ours.step_and_copy(self.copies if copied else [], number(scale), number(float(found_inf)))
        self.torchs.grad_scale, self.torchs.found_inf = number(scale), number(float(found_inf))  # type: ignore[attr-defined]
        self.torchs.step()

    def check(self) -> None:
        assert_close(self.mine, self.theirs)
        for p, q in zip(self.mine, self.theirs, strict=True):
            mine, theirs = self.ours.state[p], self.torchs.state[q]
            assert mine.keys() == theirs.keys()
            assert float(mine["step"]) == float(theirs["step"])
            assert_close([mine["exp_avg"], mine["exp_avg_sq"]], [theirs["exp_avg"], theirs["exp_avg_sq"]])
        self.check_copies()

    def check_copies(self) -> None:
        assert all(torch.equal(p.to(c.dtype), c) for p, c in zip(self.mine, self.copies, strict=True))


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=ROUNDING, rtol=2e-6)


# --- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torch(shapes: str, decay: float, launches: list[int]) -> None:
    pair = Pair(SHAPES[shapes], weight_decay=decay)
    for seed, scale in enumerate((1.0, 3.7, 1.0, 120.0), start=1):
        pair.step(seed, scale)
        pair.check()
    chunks = sum(-(-p.numel() // CHUNK) for p in pair.mine)
    assert launches == [chunks] * 4, "one launch for all tensors"


def test_chunks_of_real_size(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 8192)
    pair = Pair([(2 * 8192 + 1030,), (33,)])
    for seed in (1, 2):
        pair.step(seed, scale=2.0)
        pair.check()
    assert launches == [4, 4]


@pytest.mark.parametrize("when", [1, 3])
def test_nothing_moves_where_something_is_infinite(when: int, launches: list[int]) -> None:
    pair = Pair(SHAPES["odd"])
    for seed in range(1, 5):
        before = [p.detach().clone() for p in pair.mine]
        pair.step(seed, scale=float("nan") if seed == when else 2.0, found_inf=seed == when)
        pair.check()
        assert all(torch.equal(a, b) for a, b in zip(before, pair.mine, strict=True)) is (seed == when)
    assert float(pair.ours.state[pair.mine[0]]["step"]) == 3
    assert len(launches) == 4


@pytest.mark.parametrize("betas", [(0.0, 0.5), (0.9, 0.99999)])
def test_corrections_lose_no_digits(betas: tuple[float, float], launches: list[int]) -> None:
    """After one step from zero moments m̂ = g and v̂ = g², whatever the betas."""
    pair = Pair([(50,)], betas=betas, weight_decay=0.0, eps=1e-12)
    before = pair.mine[0].detach().clone()
    pair.step(1)
    moved = (before - pair.mine[0]).sign() * 0.01
    torch.testing.assert_close(before - pair.mine[0], moved, atol=5e-7, rtol=0)
    assert launches == [1]


def test_without_copies(launches: list[int]) -> None:
    pair = Pair(SHAPES["odd"])
    before = [c.clone() for c in pair.copies]
    pair.step(1, copied=False)
    assert_close(pair.mine, pair.theirs)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.copies, strict=True))
    assert len(launches) == 1


def test_nothing_outside_a_tensor_is_written(launches: list[int]) -> None:
    """Tensors lie in one buffer, with numbers behind them that are nobody's."""
    pair = Pair([(61,), (130,)])
    buffers = []
    for of_pair, dtype in ((pair.mine, torch.float32), (pair.copies, torch.bfloat16)):
        buffer = torch.full((512,), 7.0, dtype=dtype, device=DEVICE)
        buffers.append(buffer)
        for x, start in zip(of_pair, (0, 256), strict=True):
            place = buffer[start : start + x.numel()]
            place.copy_(x.detach())
            x.data = place
    pair.step(1)
    pair.check()
    for buffer in buffers:
        assert bool((buffer[61:256] == 7).all() & (buffer[256 + 130 :] == 7).all())
    assert len(launches) == 1


def test_autograd_sees_that_weights_changed(launches: list[int]) -> None:
    pair = Pair([(5,)])
    loss = (pair.mine[0] ** 2).sum()
    pair.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert len(launches) == 1


def test_who_asked_for_it_is_told_of_a_step_once(launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, told = Pair([(5,)]), []
    pair.ours.register_step_pre_hook(lambda *_: told.append("before"))
    pair.ours.register_step_post_hook(lambda *_: told.append("after"))
    pair.step(1)
    assert len(launches) == 1
    monkeypatch.setattr(adamw.fused, "uses_kernels", lambda x: False)
    pair.step(2)
    assert len(launches) == 1
    assert told == ["before", "after"] * 2
    pair.check()


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    count = adamw.CHUNK
    rows = chunk_table([[1600, 16], [3200, 32], [4800, 48], [6400, 64], [8000, 0]], [count + 3, 5], DEVICE)
    assert rows.tolist() == [
        [1600, 3200, 4800, 6400, 8000, count],
        [1600 + 4 * count, 3200 + 4 * count, 4800 + 4 * count, 6400 + 4 * count, 8000 + 2 * count, 3],
        [16, 32, 48, 64, 0, 5],
    ]
    assert rows.dtype == torch.int64


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every table that is made."""
    made: list[int] = []

    def note(places: Any, sizes: Any, device: Any) -> Tensor:
        made.append(len(sizes))
        return chunk_table(places, sizes, device)

    monkeypatch.setattr(adamw, "chunk_table", note)
    return made


def test_the_table_stays_while_everything_does(launches: list[int], tables: list[int]) -> None:
    pair = Pair(SHAPES["odd"])
    gradients = draw(pair.shapes, 1)
    for _ in range(3):
        for p, g in zip(pair.mine, gradients, strict=True):
            p.grad = g
        pair.ours.step_and_copy(pair.copies, number(1.0), number(0.0))
        pair.ours.zero_grad(set_to_none=True)
    assert (len(launches), len(tables)) == (3, 1)


def elsewhere(x: Tensor) -> Tensor:
    """The numbers at another place, and others where they were."""
    moved = x.detach().clone()
    x.detach().fill_(99.0)
    return moved


@pytest.mark.parametrize("what", ["gradients", "weights", "copies", "moments"])
def test_tensors_that_move_away_are_followed(what: str, launches: list[int], tables: list[int]) -> None:
    pair = Pair(SHAPES["odd"])
    kept: list[Tensor] = []  # so that no address is used again
    for seed in range(1, 4):
        pair.step(seed)
        pair.check()
        kept += [p.grad for p in pair.mine if p.grad is not None] if what == "gradients" else []
        if what == "weights":
            for p in pair.mine:
                kept.append(p.data)
                p.data = elsewhere(p)
        elif what == "copies":
            kept += pair.copies
            pair.copies = [elsewhere(c) for c in pair.copies]
        elif what == "moments":
            for state in pair.ours.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    kept.append(state[name])
                    state[name] = elsewhere(state[name])
    assert (len(launches), len(tables)) == (3, 3)


def strided(pair: Pair) -> None:
    pair.mine[1].data = pair.mine[1].data.T.contiguous().T


def shifted(pair: Pair) -> None:
    pair.mine[1].data = torch.cat([number(0.0)[None], pair.mine[1].data.flatten()])[1:].view(6, 9)


def mixed(pair: Pair) -> None:
    """Such as the head of a judge, which computes in fp32."""
    pair.copies[1] = pair.copies[1].float()


@pytest.mark.parametrize(("change", "by_kernel"), [(strided, False), (shifted, False), (mixed, True)])
def test_what_the_kernel_cannot_take(change: Callable[[Pair], None], by_kernel: bool, launches: list[int]) -> None:
    pair = Pair([(5,), (6, 9)])
    change(pair)
    for seed in (1, 2):
        pair.step(seed, scale=1.5)
        pair.check()
    assert bool(launches) is by_kernel


def test_a_gradient_that_lies_otherwise_than_its_weight() -> None:
    """Rows must not be taken for columns, by the kernel or by torch."""
    moved = []
    for turned in (False, True):
        learner = device_learner()
        gradients = [torch.randn_like(p).fill_(1.0).cumsum(0) for p in learner.parameters]
        if turned:
            gradients = [g.T.contiguous().T if g.dim() == 2 else g for g in gradients]
            assert any(g.stride() != p.stride() for g, p in zip(gradients, learner.parameters, strict=True))
        learner._move(gradients, [torch.zeros((), device=DEVICE)], 1e-2)
        moved.append([p.detach().clone() for p in learner.parameters])
    assert_close(moved[1], moved[0])


def test_parameters_that_begin_later_or_have_no_gradient(launches: list[int]) -> None:
    pairs = [[torch.nn.Parameter(torch.zeros(8, device=DEVICE)) for _ in range(2)] for _ in range(2)]
    mine = AdamW(pairs[0], 0.1, (0.9, 0.99), 1e-8, 0.0)
    right = torch.optim.AdamW(pairs[1], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for given in ((True, False), (True, True), (True, True)):
        for pair in pairs:
            for weight, one, seed in zip(pair, given, (1, 2), strict=True):
                weight.grad = draw([(8,)], seed)[0] if one else None
        mine.step_and_copy([], number(1.0), number(0.0))
        right.step()
        assert_close(pairs[0], pairs[1])
    assert not launches, "their counters differ, and the kernel reads one"


def test_parameters_in_bf16_are_moved_by_torch(launches: list[int]) -> None:
    weight = nn.Parameter(torch.ones(5, device=DEVICE, dtype=torch.bfloat16))
    optimizer = AdamW([weight], **OPTIONS)
    weight.grad = torch.ones_like(weight)
    optimizer.step_and_copy([], number(1.0), number(0.0))
    assert bool((weight < 1).all())
    assert not launches


# --- its state -------------------------------------------------------------------------------------------------------


def test_state_goes_to_torch_and_back(launches: list[int]) -> None:
    """Each goes on from what the other wrote."""
    pair = Pair(SHAPES["odd"])
    for seed in range(1, 5):
        pair.step(seed)
        mine, theirs = pair.ours.state_dict(), pair.torchs.state_dict()
        assert mine["state"].keys() == theirs["state"].keys()
        assert mine["param_groups"][0].keys() == theirs["param_groups"][0].keys()
        pair.ours = AdamW(pair.mine, **pair.options)
        pair.torchs = torch.optim.AdamW(pair.theirs, **pair.options, fused=True)
        pair.ours.load_state_dict(theirs)
        pair.torchs.load_state_dict(mine)
        pair.check()
    assert len(launches) == 4


def test_a_cleared_state_starts_afresh(launches: list[int]) -> None:
    pair = Pair(SHAPES["odd"])
    for seed in range(1, 4):
        pair.step(seed)
        pair.check()
        pair.ours.state.clear()
        pair.torchs.state.clear()
    assert len(launches) == 3


# --- a learner -------------------------------------------------------------------------------------------------------


def as_on_cuda(learner: Learner) -> Learner:
    """Takes its steps as on CUDA in bf16: with a working copy, without waiting."""
    learner.working = working_copy(learner.model)
    learner.working_parameters = [p for p in learner.working.parameters() if p.requires_grad]
    learner.device = torch.device("cuda")
    return learner


def moves(learner: Learner, count: int) -> None:
    shapes = [tuple(p.shape) for p in learner.parameters]
    for seed in range(count):
        losses = [number(float("nan") if seed == 1 else 1.0)]
        learner._move(draw(shapes, seed + 1), losses, lr=0.01)
        assert all(p.grad is None for p in learner.parameters)


def two_moved(monkeypatch: pytest.MonkeyPatch, adapters: bool) -> tuple[Learner, Learner]:
    """Learners after three steps of clipped gradients, the second without a finite loss; by the kernel and by torch."""
    learners = []
    for on in (True, False):
        model = small_model(seed=2).to(DEVICE)
        if adapters:
            add_lora(model, rank=2, alpha=4)
        learner = as_on_cuda(Learner(model, settings(clip_grad_norm=0.5, weight_decay=0.1)))
        monkeypatch.setattr(adamw.fused, "uses_kernels", lambda x, on=on: on)
        monkeypatch.setattr(learner, "refresh", pytest.fail)  # the copy is fresh after the step
        moves(learner, 3)
        learners.append(learner)
    return learners[0], learners[1]


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_a_learner_moves_as_with_torch(adapters: bool, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    learner, plain = two_moved(monkeypatch, adapters)
    assert len(launches) == 3
    assert_close(learner.parameters, plain.parameters)
    got, expected = optimizer_tensors(learner), optimizer_tensors(plain)
    assert got.keys() == expected.keys()
    assert_close(list(got.values()), list(expected.values()))
    assert float(got["0.step"]) == 2
    for weight, copied in zip(learner.model.parameters(), learner.working.parameters(), strict=True):
        assert torch.equal(weight.to(torch.bfloat16), copied)
    start = dict(small_model(seed=2).named_parameters())
    frozen = {name: p for name, p in learner.model.named_parameters() if not p.requires_grad}
    assert bool(frozen) is adapters
    assert all(torch.equal(p.cpu(), start[name]) for name, p in frozen.items())
    assert len(learner.optimizer.state) == len(learner.parameters)


# --- for a GPU -------------------------------------------------------------------------------------------------------

COMPILE = """
import json
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from reasonlab.train import adamw, kernels

kernel = kernels._adamw
constants = {"CHUNK": adamw.CHUNK, "BLOCK": kernels.BLOCK}
pointers = {"table": "*i64", "step": "*fp32", "scale": "*fp32", "found_inf": "*fp32"}
kinds = {name: "constexpr" if name in constants else pointers.get(name, "fp32") for name in kernel.arg_names}
source = ASTSource(
    kernel, signature=kinds, constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()}
)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
assert built.asm["cubin"]
ptx = built.asm["ptx"]
patterns = {"loads": r"ld\\.global[.\\w:]*\\.v4", "stores": r"st\\.global[.\\w:]*\\.v4", "copies": r"st\\.global\\.v2"}
numbers = {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}
print(json.dumps(numbers | {"shared": built.metadata.shared, "local": ptx.count(".local")}))
"""


def test_the_kernel_compiles_for_hopper_and_reads_in_wide_pieces(tmp_path: Path) -> None:
    """Whole chunks: 4 elements of each of p, g, m, v at once, as many written back, and 4 of the copy, half as wide."""
    assert json.loads(compiled_elsewhere(COMPILE, tmp_path)) == {
        "loads": 4,
        "stores": 3,
        "copies": 1,
        "shared": 0,
        "local": 0,
    }


@pytest.mark.parametrize("capture", [False, True], ids=["launched", "captured"])
@pytest.mark.gpu
@on_cuda
def test_a_learner_on_a_device_moves_as_with_torch(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CAPTURE", capture)
    learner = device_learner(token_budget=200, clip_grad_norm=0.05, weight_decay=0.1)
    assert (learner.graphs is not None) is capture
    other = [nn.Parameter(p.detach().clone()) for p in learner.parameters]
    config = learner.config
    plain = torch.optim.AdamW(
        other, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )
    seen = watch_gradients(learner)
    for turn in range(5):
        result = learner.step(grouped_examples(), LOSSES["grpo"])
        assert result.grad_norm > config.clip_grad_norm
        plain.grad_scale = number((result.grad_norm + 1e-6) / config.clip_grad_norm)  # type: ignore[attr-defined]
        for p, g in zip(other, seen[turn], strict=True):
            p.grad = g
        plain.step()
        for p, q, c in zip(learner.parameters, other, learner.working_parameters, strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
            assert torch.equal(p.to(torch.bfloat16), c)
    assert learner.optimizer._table is not None
