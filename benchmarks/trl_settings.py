"""What every comparison with TRL's GRPOTrainer tells it: the same update as ours, and nothing beside it."""

from __future__ import annotations

from typing import Any

LEARNING_RATE = 1e-6
BETAS, CLIP_NORM = (0.9, 0.95), 1.0
TRL_SETTINGS: dict[str, Any] = {
    "disable_dropout": True,
    "gradient_checkpointing": False,
    "num_iterations": 1,
    "temperature": 1.0,
    "beta": 0.0,
    "loss_type": "grpo",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "max_grad_norm": CLIP_NORM,
    "optim": "adamw_torch_fused",
    "shuffle_dataset": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
