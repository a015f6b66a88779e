"""Our side of `iteration.py`: the loop as `reasonlab train` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from iteration_work import Iteration, Stopwatch, Tell, Work, digest, reward_of

from reasonlab.methods.group import Array, Group
from reasonlab.terminal import PlainObserver
from reasonlab.train.loop import start
from reasonlab.train.sources import Rollouts


def ours(work: Work, scratch: Path, tell: Tell) -> list[Iteration]:
    """The loop of `reasonlab train`. Only three things differ: nothing stops early, the reward, and it is timed."""
    trainer = start(work.recipe, scratch / "run", ["benchmark"], PlainObserver(work.iterations, "ours", quiet=True))
    watch, source = Stopwatch(work.device), trainer.source
    assert isinstance(source, Rollouts)
    trainer.sampling = source.sampling = replace(trainer.sampling, stop_ids=work.stop_ids)
    drawn: list[Group] = []
    trained: list[int] = []

    def reward(number: int, group: Group) -> Array:
        drawn.append(group)
        return np.array([reward_of(rollout.ids) for rollout in group.rollouts])

    step_on = trainer.learner.step_on

    def counted(objectives: Sequence[Any]) -> Any:
        trained.append(sum(len(objective.examples) for objective in objectives))
        return step_on(objectives)

    for owner, name, timed in (
        (source, "_reward", watch.around("reward", reward)),
        (trainer.exchange, "grades", watch.around("reward", trainer.exchange.grades)),
        (source, "groups", watch.around("groups", source.groups)),
        (trainer, "_update", watch.around("update", trainer._update)),
        (trainer.learner, "step_on", counted),
    ):
        setattr(owner, name, timed)
    trainer._announce()
    iterations: list[Iteration] = []
    tell(iterations)
    for number in range(1, work.iterations + 1):
        drawn.clear()
        trained.clear()
        begin = watch.now()
        trainer._iteration(number)
        seconds = watch.now() - begin
        reward_s = watch.take("reward")
        iterations.append(
            Iteration(
                seconds,
                watch.take("groups") - reward_s,
                reward_s,
                watch.take("update"),
                tokens=sum(int(group.lengths.sum()) for group in drawn),
                in_loss=sum(trained),
                prompts=digest([rollout.prompt for group in drawn for rollout in group.rollouts]),
            )
        )
        tell(iterations)
    trainer._finish_writing()  # of the last rollouts: the scratch directory goes away
    return iterations
