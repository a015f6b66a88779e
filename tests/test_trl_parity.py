"""GRPO, DAPO, Dr. GRPO, GSPO and CISPO against TRL's own loss, on identical tensors.

TRL's `GRPOTrainer._compute_loss` runs unchanged on a stand-in for the trainer that carries the settings it reads, and
that hands over given logprobs instead of running a model.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reasonlab.config import GrpoConfig
from reasonlab.methods.grpo import Grpo
from reasonlab.train.batch import Example, Totals, pack

pytest.importorskip("trl", reason="TRL is not installed: make install-dev")
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

pytestmark = pytest.mark.parity

LENGTHS = [3, 9, 1, 12, 7, 12, 5, 2]
MAX_TOKENS = 16
# What a case means: our options, TRL's options.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"variant": "grpo"}, {"loss_type": "grpo"}),
    "grpo, clips apart": (
        {"variant": "grpo", "clip_low": 0.1, "clip_high": 0.3},
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    ),
    "dr_grpo": ({"variant": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"variant": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"variant": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo, wide": (
        {"variant": "gspo", "clip_low": 0.1, "clip_high": 0.15},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.15},
    ),
    "cispo": ({"variant": "cispo", "clip_high": 0.4}, {"loss_type": "cispo", "epsilon_high": 1.4}),
}


class OneProcess:
    """The accelerator of a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def stand_in(config: GRPOConfig, logprobs: Tensor) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer, filled from a real configuration."""
    return SimpleNamespace(
        args=config,
        beta=config.beta,
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_high if config.epsilon_high is not None else config.epsilon,
        max_completion_length=config.max_completion_length,
        top_entropy_quantile=config.top_entropy_quantile,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        use_vllm=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=OneProcess(),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )


def draw(spread: float, holes: bool) -> dict[str, Tensor]:
    """Padded tensors of ragged responses; `spread` is how far the policy has moved from the one that sampled."""
    generator = torch.Generator().manual_seed(round(spread * 100) + holes)
    shape = (len(LENGTHS), max(LENGTHS))
    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    if holes:  # tokens inside a response that no model wrote, such as a tool's answer
        mask[:, 1] = 0
    return {
        "logprobs": logprobs,
        "old": (logprobs + spread * torch.randn(shape, generator=generator)).float(),
        "reference": (logprobs + 0.5 * torch.randn(shape, generator=generator)).float(),
        "advantages": torch.randn(shape[0], generator=generator),
        "mask": mask,
    }


def their_loss(config: GRPOConfig, data: dict[str, Tensor]) -> tuple[float, Tensor]:
    logprobs = data["logprobs"].clone().requires_grad_()
    rows = len(LENGTHS)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(data["mask"]),
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["reference"],
        "num_items_in_batch": data["mask"].sum().float(),
    }
    trainer = stand_in(config, logprobs)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


def our_loss(config: GrpoConfig, data: dict[str, Tensor]) -> tuple[float, Tensor, float]:
    real = [slice(0, length) for length in LENGTHS]
    examples = [
        Example(
            prompt=np.zeros(1, np.int64),
            response=np.zeros(length, np.int64),
            logprobs=data["old"][i, real[i]].numpy(),
            mask=data["mask"][i, real[i]].numpy().astype(bool),
            advantage=data["advantages"][i].item(),
            reference=data["reference"][i, real[i]].numpy(),
        )
        for i, length in enumerate(LENGTHS)
    ]
    logprobs = data["logprobs"].clone().requires_grad_()
    flat = torch.cat([logprobs[i, part] for i, part in enumerate(real)])
    loss, metrics = Grpo(config, MAX_TOKENS).loss(flat, pack(examples, Totals.of(examples), "cpu"))
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad, metrics["clip_ratio"].item()


@pytest.mark.parametrize("kl", [0.0, 0.04], ids=["no KL", "KL"])
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "with holes"])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.4], ids=["on policy", "near", "far"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_those_of_trl(case: str, spread: float, holes: bool, kl: float, tmp_path: Path) -> None:
    ours, theirs = CASES[case]
    data = draw(spread, holes)
    config = GRPOConfig(
        output_dir=str(tmp_path),
        beta=kl,
        use_bias_correction_kl=False,  # TRL's addition: weighs the KL by the ratio, which the GRPO paper does not
        max_completion_length=MAX_TOKENS,
        steps_per_generation=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        **theirs,
    )
    expected, expected_gradient = their_loss(config, data)
    loss, gradient, clipped = our_loss(GrpoConfig(type="grpo", kl=kl, **ours), data)
    assert loss == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=0)
    assert (gradient != 0).any()
    if spread > 0.1 and case != "cispo":
        assert 0 < clipped < 1
