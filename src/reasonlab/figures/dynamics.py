"""Training dynamics of one run: accuracy and response length against RL iteration (Kimi k1.5, Fig. 5).

Every number is computed again from the answers the run kept. The total panel also shows the control, accuracy with
thinking forced, and the caption divides the gain by it: what the control does not support is not said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from reasonlab.config import Config, DpoConfig, GrpoConfig, SftConfig, load_recipe
from reasonlab.errors import UserError
from reasonlab.evaluate.control import FORCED_SUITE, SUITE, Split, caption, change_caption, recorded_answers, split_gain
from reasonlab.evaluate.evaluator import Answer, summarise
from reasonlab.figures.panel_grid import FORCED, TOTAL, draw_panel_grid, family_names, questions_asked
from reasonlab.figures.style import house_style, save
from reasonlab.figures.tables import PanelRow, write_table
from reasonlab.model.ladder import model_name
from reasonlab.problems.tiny_world import FAMILY_NAMES
from reasonlab.runs import RunReader
from reasonlab.wording import counted

_ORDER = {name: place for place, name in enumerate(FAMILY_NAMES)}
_METHODS = {"sft": "SFT", "dpo": "DPO", "rest": "ReST"}
_MANY_CUT = 0.05  # a share of the answers that a reader should know of


@dataclass(frozen=True, slots=True)
class Dynamics:
    """The numbers behind the figure."""

    points: tuple[PanelRow, ...]
    split: Split | None
    title: str
    subtitle: str
    caption: str
    step_label: str = "RL iteration"

    @property
    def families(self) -> list[str]:
        return family_names(self.points)


@dataclass(frozen=True, slots=True)
class DynamicsFiles:
    """What `draw_dynamics` wrote, and the numbers in it."""

    png: Path
    svg: Path
    csv: Path
    dynamics: Dynamics


def draw_dynamics(run: Path, out: Path) -> DynamicsFiles:
    """Draw a run's training dynamics into `out`: dynamics.png, dynamics.svg and dynamics.csv."""
    dynamics = read_dynamics(run)
    table = out / "dynamics.csv"
    write_table(table, PanelRow, dynamics.points)
    with house_style():
        figure = draw_panel_grid(
            dynamics.points, dynamics.title, dynamics.subtitle, dynamics.caption, step_label=dynamics.step_label
        )
        png, svg = save(figure, out / "dynamics", dynamics.title)
    return DynamicsFiles(png, svg, table, dynamics)


def read_dynamics(run: Path) -> Dynamics:
    """All points of the figure, from the stored answers."""
    reader = RunReader(run)
    config = load_recipe(run / "config.toml")
    suite = next((name for name in reader.evaluation_suites() if name != FORCED_SUITE), SUITE)
    free = {step: recorded_answers(reader, suite, step) for step in reader.evaluation_steps(suite)}
    forced = {step: recorded_answers(reader, FORCED_SUITE, step) for step in reader.evaluation_steps(FORCED_SUITE)}
    if not free:
        raise UserError(
            f"the run in {run} holds no evaluation to draw",
            "Wait for its first one, or train again with --evaluate.every 5",
        )
    arm = _method(config)
    points = [panel_row(arm, TOTAL, step, answers) for step, answers in free.items()]
    points += [panel_row(arm, FORCED, step, answers) for step, answers in forced.items()]
    families = {answer.family for answers in free.values() for answer in answers}
    for family in sorted(families, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        for step, answers in free.items():
            if part := [answer for answer in answers if answer.family == family]:
                points.append(panel_row(arm, family, step, part))
    split = split_gain(free, forced)
    below = caption(split, len(free)) if config.evaluate.suite == SUITE else change_caption(free)
    samples = not isinstance(config.method, SftConfig | DpoConfig)  # these learn from what is given
    cut = {step: summarise(answers).truncated for step, answers in free.items()}
    words = _title(config), _subtitle(config, points, cut), below
    return Dynamics(tuple(points), split, *words, "RL iteration" if samples else "iteration")


def panel_row(arm: str, panel: str, step: int, answers: Sequence[Answer]) -> PanelRow:
    """One panel of one run at one iteration."""
    summary = summarise(answers)
    accuracy, tokens = summary.accuracy, summary.tokens
    p05, p95 = np.quantile([answer.tokens for answer in answers], [0.05, 0.95])
    return PanelRow(
        arm=arm,
        panel=panel,
        iteration=step,
        accuracy=accuracy.estimate,
        accuracy_low=accuracy.low,
        accuracy_high=accuracy.high,
        tokens=tokens.estimate,
        tokens_low=tokens.low,
        tokens_high=tokens.high,
        tokens_p05=float(p05),
        tokens_p95=float(p95),
        questions=summary.questions,
        samples=summary.samples,
        seeds=1,
    )


def _method(config: Config) -> str:
    return config.method.variant if isinstance(config.method, GrpoConfig) else config.method.type


def _title(config: Config) -> str:
    return f"Training dynamics: {model_name(config.model.path)}, {_method_in_words(config)}, seed {config.seed}"


def _method_in_words(config: Config) -> str:
    if isinstance(config.method, GrpoConfig):
        variant = config.method.variant
        return "GRPO" if variant == "grpo" else f"GRPO ({variant.replace('_', ' ')})"
    return _METHODS.get(config.method.type, config.method.type.replace("_", " "))


def _subtitle(config: Config, points: Sequence[PanelRow], cut: Mapping[int, float]) -> str:
    """`cut` is the share of the answers that reached the limit of tokens, at each evaluation."""
    total, ends = points[0], dict.fromkeys((min(cut), max(cut)))
    shares = ", ".join(f"{100 * cut[end]:.0f} % at iteration {end}" for end in ends)
    many = f" (answers cut: {shares})" if max(cut.values()) > _MANY_CUT else ""
    asked = f"Held-out {config.evaluate.split} problems" if config.evaluate.suite == SUITE else "Held-out problems"
    return (
        f"{asked}: {questions_asked(points)}, "
        f"{counted(total.samples, 'sample')} each, temperature {config.evaluate.temperature:g}, "
        f"at most {config.rollout.max_tokens:,} tokens{many}"
    )
