"""The length reward under advantages that are divided by their group's spread, and under those that are not.

    python scripts/length_and_spread.py --out runs/length-and-spread        # laptop, eight minutes on two cores

RL first makes `tiny-1m` think. From there GRPO goes on with a length reward, three seeds for each kind of advantage and
nothing else changed. A line for every evaluation on validation problems. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reasonlab.config import validate
from reasonlab.runs import RunReader
from reasonlab.terminal import make_observer
from reasonlab.train.loop import resume, start

COMMON: dict[str, Any] = {
    "threads": 2,
    "model": {"path": "tiny-1m"},
    "rollout": {"prompts": 32, "samples": 8, "max_tokens": 160},
    "checkpoint": {"every": 40, "keep": 1},
}
LONG: dict[str, Any] = {
    "method": {"type": "mirror_descent", "tau": 0.1},
    "learner": {"lr": 3e-4, "eps": 3e-3, "schedule": "linear", "decay_steps": 40},
    "evaluate": {"every": 40, "problems": 480},
}
SHORTER: dict[str, Any] = {
    "reward": {"length_weight": 0.5},
    "learner": {"lr": 3e-5, "eps": 1e-8, "inner_steps": 4},
    "evaluate": {"every": 10, "problems": 480},
}


def train(run: Path, settings: dict[str, Any]) -> None:
    """Make a run, or go on with one that was interrupted."""
    if (run / "run.json").exists() and RunReader(run).run["status"] == "finished":
        return
    config = validate(settings, "length_and_spread.py")
    with make_observer(config.iterations, run.name) as observer:
        trainer = resume(run, observer) if run.exists() else start(config, run, [Path(__file__).name], observer)
        if trainer.run().status != "finished":
            raise SystemExit("interrupted; the same command goes on")


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/length-and-spread"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--problems", type=int, default=480, help="of an evaluation")
    options = parser.parse_args(arguments)

    def settings(own: dict[str, Any], **more: Any) -> dict[str, Any]:
        evaluate = {**own["evaluate"], "problems": options.problems}
        return {**COMMON, **own, "evaluate": evaluate, "iterations": options.iterations, **more}

    long = options.out / "long"
    train(long, settings(LONG))
    model = {"path": str(long / "checkpoints" / "final")}
    for advantage in ("group_std", "group_mean"):
        for seed in range(options.seeds):
            run = options.out / f"{advantage}-{seed}"
            train(run, settings(SHORTER, model=model, seed=seed, method={"type": "grpo", "advantage": advantage}))
            for line in RunReader(run).metrics():
                if (score := line.get("eval/tiny/avg@1")) is not None:
                    tokens = line["eval/tiny/length/mean"]
                    print(f"{run.name:14} iteration {line['step']:3}  {score:6.1%}  {tokens:5.1f} tokens", flush=True)


if __name__ == "__main__":
    main()
