"""Draw again what a directory holds: the figures of a study from its tables, or that of a run from its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.figures.ablations import draw_ablations
from reasonlab.figures.accuracy_length import draw_accuracy_length
from reasonlab.figures.dynamics import draw_dynamics
from reasonlab.figures.long2short import draw_long2short
from reasonlab.figures.mel_reflection import draw_mel_reflection
from reasonlab.figures.mel_validation import draw_mel_validation
from reasonlab.figures.prm_selection import draw_prm_selection
from reasonlab.figures.record import VERDICTS, Record, read_record, unfinished
from reasonlab.figures.rm_scaling import draw_rm_scaling
from reasonlab.figures.study_dynamics import draw_published_dynamics, draw_study_dynamics
from reasonlab.figures.tables import (
    ARMS,
    BEST_OF,
    EXPERIENCE,
    JUDGE_RL,
    PANELS,
    PROGRESS,
    REFERENCES,
    SCORES,
    SELECTION,
    SLOPES,
    ArmRow,
    BestOfRow,
    ExperienceRow,
    JudgeRewardRow,
    PanelRow,
    ProgressRow,
    ReferenceRow,
    ScoreRow,
    SelectionRow,
    SlopeRow,
    read_table,
)


def redraw(directory: Path, out: Path) -> list[Path]:
    """Draw the figures of a study or of a run into `out`, and say which files were written."""
    if (directory / VERDICTS).exists():
        record = read_record(directory / VERDICTS)
        if record.study not in _STUDIES:
            known = " and ".join(_STUDIES)
            raise UserError(
                f"no figures are known for the study {record.study!r} in {directory}", f"They are for {known}"
            )
        return _STUDIES[record.study](directory, record, out)
    if (directory / "run.json").exists():
        files = draw_dynamics(directory, out)
        return [files.png, files.svg, files.csv]
    if error := unfinished(directory):
        raise error
    raise UserError(f"{directory} is neither a study nor a run", f"Name a directory that holds {VERDICTS} or run.json")


def _k15_dynamics(directory: Path, record: Record, out: Path) -> list[Path]:
    panels = read_table(directory / PANELS, PanelRow)
    slopes = read_table(directory / SLOPES, SlopeRow)
    return [
        *draw_study_dynamics(panels, record, out),
        *draw_published_dynamics(out),
        *draw_accuracy_length(panels, slopes, record, out),
        *draw_ablations(panels, record, out),
    ]


def _long2short(directory: Path, record: Record, out: Path) -> list[Path]:
    return draw_long2short(read_table(directory / ARMS, ArmRow), record, out)


def _mel_vs_grpo(directory: Path, record: Record, out: Path) -> list[Path]:
    panels = read_table(directory / PANELS, PanelRow)
    scores = read_table(directory / SCORES, ScoreRow)
    experience = read_table(directory / EXPERIENCE, ExperienceRow)
    return [*draw_mel_validation(panels, scores, record, out), *draw_mel_reflection(experience, record, out)]


def _rm_scaling(directory: Path, record: Record, out: Path) -> list[Path]:
    rows = read_table(directory / PROGRESS, ProgressRow)
    return draw_rm_scaling(rows, read_table(directory / REFERENCES, ReferenceRow), record, out)


def _prm_selection(directory: Path, record: Record, out: Path) -> list[Path]:
    rows, best = read_table(directory / SELECTION, SelectionRow), read_table(directory / BEST_OF, BestOfRow)
    there = (directory / JUDGE_RL).exists()  # a study may leave RL out
    rewards = read_table(directory / JUDGE_RL, JudgeRewardRow) if there else []
    return draw_prm_selection(rows, best, rewards, record, out)


_STUDIES: dict[str, Callable[[Path, Record, Path], list[Path]]] = {
    "k15-dynamics": _k15_dynamics,
    "long2short": _long2short,
    "mel-vs-grpo": _mel_vs_grpo,
    "rm-scaling": _rm_scaling,
    "prm-selection": _prm_selection,
}
