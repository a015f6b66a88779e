"""Forward and backward pass of a micro-batch as two CUDA graphs.

A small model's update takes the device less time than Python needs to launch it. So the launches are recorded once and
replayed. A graph has fixed sizes and reads its inputs where they lay when it was recorded. Packs are therefore filled
up to few sizes (`Shape`). Tokens and readers become multiples of a sixteenth of the next power of two, five percent
more on average. What costs little when it is empty is as large as the largest so far, in powers of two. The
tokens that fill a pack up are sequences of their own, and the slope of the loss at the readers that do is zero: they
add nothing to any gradient.

    first pack of a shape    the same operations, launched one by one: this compiles the kernels
    second                   recorded, then replayed, as from then on

The loss stands between the two graphs: methods compute it as they like, from log-probabilities that are a leaf, and
its slope goes back in. The backward graph adds the gradients to one set of fp32 sums that all graphs share, those of
matrices as they are computed (`model/accumulate.py`). The graphs also share the memory for what lies between their
operations: a forward replay is followed by its own backward replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reasonlab.model import accumulate
from reasonlab.model.attention import BLOCK, PackedCausal, Pieces, Ragged, for_device
from reasonlab.model.transformer import Attend
from reasonlab.train.batch import Layout

CAPTURE = True
"""Whether learners capture their updates. False launches every operation from Python: slower, easier to debug."""
PARTS = 16  # sizes are multiples of such a part of the next power of two: up to 8 of them for every doubling
ALIGNED = 64  # and of this, as matrix products like it
FILLING = 256  # the longest sequence of tokens that only fill up
MOST = 32  # shapes that are kept; of more, the one that was not used for longest is dropped


class Compute(Protocol):
    """Log-probabilities and entropies at the readers: the learner's forward pass."""

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, readers: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]: ...


# --- sizes -----------------------------------------------------------------------------------------------------------


class Caps(NamedTuple):
    """Sizes that cost little where they are larger than needed: empty blocks of a kernel, and for every key that is not
    there two rows of zeros in the backward pass. They never shrink, so shapes stay few."""

    sequences: int = 16
    beginnings: int = 16
    keys: int = 256  # of all beginnings together

    def grown(self, pieces: Pieces) -> Caps:
        needed = [len(pieces.own)]
        if pieces.shared:
            needed += [len(pieces.keys), len(pieces.at)]
        sizes = [max(cap, power_of_two(int(n))) for cap, n in zip(self, needed, strict=False)]
        return Caps(*sizes, *self[len(sizes) :])


class Shape(NamedTuple):
    """The sizes of a pack that was filled up."""

    tokens: int
    readers: int
    shared: bool  # whether any sequence has a beginning that is another's
    caps: Caps


def filled_size(count: int) -> int:
    """What so many tokens or readers are filled up to."""
    part = max(ALIGNED, power_of_two(count) // PARTS)
    return part * -(-count // part)


def power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


# --- packs -----------------------------------------------------------------------------------------------------------


class Inputs:
    """Everything that packs of one shape differ in, in memory that stays where it is."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        caps = shape.caps
        keys = caps.keys if shape.shared else 0
        sizes = (shape.tokens, shape.tokens, shape.readers, shape.readers, keys)
        self.shape, self.device = shape, device
        self.numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.ids, self.positions, self.readers, self.targets, self.at = self.numbers.split(sizes)
        # Every piece has one block that is not full, at most.
        self.block_count = shape.tokens // BLOCK + caps.sequences
        self.key_block_count = keys // BLOCK + caps.beginnings if shape.shared else 0
        parts = (5 * self.block_count, 4 * self.key_block_count)
        self.tables = torch.zeros(sum(parts), dtype=torch.int32, device=device)
        self.blocks, self.key_blocks = (x.view(n, -1) for x, n in zip(self.tables.split(parts), (5, 4), strict=True))
        self.slopes = torch.zeros(shape.readers, device=device)  # of the loss, at each reader

    def write(self, layout: Layout, packed: PackedCausal, pieces: Pieces) -> None:
        caps = self.shape.caps
        numbers: list[NDArray[np.int64]] = [layout.ids, packed.positions.numpy(), layout.readers, layout.targets]
        tables = [pieces.query_blocks(self.block_count)]
        if self.shape.shared:
            # What is filled in is read by nobody. It is spread over the tokens, as the readers are.
            numbers += [pieces.at, np.arange(caps.keys - len(pieces.at)) % self.shape.tokens]
            tables.append(pieces.key_blocks(self.key_block_count))
        for here, array in (
            (self.numbers, np.concatenate(numbers)),
            (self.tables, np.concatenate([table.ravel() for table in tables])),
        ):
            here.copy_(for_device(array, self.device), non_blocking=True)

    def ragged(self) -> Ragged:
        return Ragged(self.blocks, self.at, self.key_blocks) if self.shape.shared else Ragged(self.blocks)


class Captured(NamedTuple):
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    logprobs: Tensor  # where the forward graph writes them
    entropies: Tensor


class Slot:
    """A shape: its inputs, and its graphs once it was seen before."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.inputs = Inputs(shape, device)
        self.seen = False
        self.captured: Captured | None = None


class Pass(NamedTuple):
    """A pack whose backward pass is still to come. Nothing else may run before it."""

    logprobs: Tensor  # a leaf
    entropies: Tensor
    backward: Callable[[Tensor], None]  # takes the slope of the loss at the logprobs and adds to the gradients


class UpdateGraphs:
    """The passes of one learner, for the weights where they lie."""

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor], compute: Compute) -> None:
        self.model, self.parameters, self.compute = model, parameters, compute
        self.device = parameters[0].device
        self.sums: list[Tensor] = []  # of the gradients of a step, in fp32
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.caps = Caps()
        self.room = True  # for graphs beside everything else; once there is none, all goes on without them
        self.places: list[int] = []
        self.slots: dict[Shape, Slot] = {}  # the one used last stands last
        self.release()

    def release(self) -> None:
        """Leave the memory of the graphs to others. They must be captured again."""
        for slot in self.slots.values():
            slot.captured = None
        self.held = 0  # bytes that the graphs keep for themselves
        self.memory = torch.cuda.graph_pool_handle() if self.stream is not None else None

    def begin(self) -> None:
        """A step begins: gradients are zero, and the weights lie where the graphs read them."""
        if (places := [x.data_ptr() for x in _tensors(self.model)]) != self.places:
            self.release()
            self.places = places
            self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
            for dtype in {p.dtype for p in self.parameters}:
                accumulate.addmm_takes(self.device, dtype)  # found out now: while a graph is captured it cannot be
        torch._foreach_zero_(self.sums)

    def forward(self, layout: Layout) -> Pass | None:
        """None if the pack's sequences do not lie as the kernels want them."""
        tokens, readers = filled_size(len(layout.ids)), filled_size(len(layout.readers))
        filled = layout.filled(tokens, readers, FILLING)
        packed = PackedCausal(filled.lengths, "cpu", filled.sequences)
        if packed.pieces is None:
            return None
        slot = self.slot_for(tokens, readers, packed.pieces)
        slot.inputs.write(filled, packed, packed.pieces)
        if slot.captured is None and slot.seen and self.stream is not None and self.room:
            self.capture(slot)
        slot.seen = True
        return self.replayed(slot, len(layout.readers)) or self.launched(slot, len(layout.readers))

    def slot_for(self, tokens: int, readers: int, pieces: Pieces) -> Slot:
        caps = self.caps.grown(pieces)
        if caps != self.caps:  # graphs for the old ones will not be asked for again
            self.caps = caps
            self.release()
            self.slots.clear()
        shape = Shape(tokens, readers, pieces.shared, caps)
        slot = self.slots.pop(shape, None)
        if slot is None:
            if self.held > self.free_memory():  # this pack is launched beside what the graphs hold
                self.room = False
                self.release()
            slot = Slot(shape, self.device)
        self.slots[shape] = slot
        if len(self.slots) > MOST:
            del self.slots[next(iter(self.slots))]
        return slot

    # --- one pack ----------------------------------------------------------------------------------------------

    def launched(self, slot: Slot, count: int) -> Pass:
        """Operation by operation."""
        outputs, entropies = self.run_forward(slot.inputs)

        def backward(slope: Tensor) -> None:
            write_slopes(slot.inputs, slope)
            self.run_backward(outputs, slot.inputs)

        return Pass(leaf(outputs, count), entropies[:count], backward)

    def replayed(self, slot: Slot, count: int) -> Pass | None:
        captured = slot.captured
        if captured is None:
            return None
        captured.forward.replay()

        def backward(slope: Tensor) -> None:
            write_slopes(slot.inputs, slope)
            captured.backward.replay()

        return Pass(leaf(captured.logprobs, count), captured.entropies[:count], backward)

    def run_forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        ragged = inputs.ragged()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ragged(q, k, v)

        with accumulate.into(dict(zip(self.parameters, self.sums, strict=False))):  # no sums before the first step
            return self.compute(inputs.ids, inputs.positions, attend, inputs.readers, inputs.targets)

    def run_backward(self, logprobs: Tensor, inputs: Inputs) -> None:
        """Add all gradients to the sums.

        Autograd is asked for those of all weights, so that it goes through every layer. It has none to return where a
        layer added to the sum itself; what it returns is still to be added.
        """
        gradients = torch.autograd.grad([logprobs], self.parameters, [inputs.slopes], allow_unused=True)
        left = [(total, g) for total, g in zip(self.sums, gradients, strict=True) if g is not None]
        if left:
            add_mixed([total for total, _ in left], [g for _, g in left])

    # --- capture -----------------------------------------------------------------------------------------------

    def capture(self, slot: Slot) -> None:
        """Record both passes of a shape.

        The memory of a graph serves another one if that is not larger. So the largest must be the first: if this one
        is larger than those before, they are all captured again, after it.
        """
        shape, wanted = slot.inputs.shape, [slot]
        before = [one for one in self.slots.values() if one.captured is not None]
        tokens = max((one.inputs.shape.tokens for one in before), default=shape.tokens)
        readers = max((one.inputs.shape.readers for one in before), default=shape.readers)
        if shape.tokens > tokens or shape.readers > readers:
            wanted = sorted([slot, *before], key=lambda one: one.inputs.shape[:2], reverse=True)
            self.release()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        try:
            for one in wanted:
                one.captured = self.recorded(one.inputs)
        except torch.cuda.OutOfMemoryError:
            self.room = False
            self.release()
            return
        self.held += torch.cuda.memory_reserved(self.device) - reserved

    def recorded(self, inputs: Inputs) -> Captured:
        """Nothing runs meanwhile, and nothing of the autograd graph stays."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self.memory, stream=self.stream):
            logprobs, entropies = self.run_forward(inputs)
        with torch.cuda.graph(backward, pool=self.memory, stream=self.stream):
            self.run_backward(logprobs, inputs)
        return Captured(forward, backward, logprobs.detach(), entropies.detach())

    def free_memory(self) -> int:
        """Bytes that a pack can have beside the graphs."""
        if self.stream is None:
            return 0
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) - self.held
        return torch.cuda.mem_get_info(self.device)[0] + max(0, cached)


def leaf(logprobs: Tensor, count: int) -> Tensor:
    """A copy of the first ones, which a loss can be differentiated by and the next replay leaves alone."""
    return logprobs.detach()[:count].clone().requires_grad_()


def write_slopes(inputs: Inputs, slope: Tensor) -> None:
    inputs.slopes[: len(slope)].copy_(slope)
    inputs.slopes[len(slope) :].zero_()


def add_mixed(sums: list[Tensor], gradients: list[Tensor]) -> None:
    """sums += gradients, which may have another dtype.

    A kernel that takes many tensors at once either casts or adds. Asked for both, torch takes one after the other.
    """
    exact = [torch.empty_like(g, dtype=torch.float32) for g in gradients]
    torch._foreach_copy_(exact, gradients)
    torch._foreach_add_(sums, exact)


def _tensors(model: nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
