"""Best of N in `prm-selection`: answers of one student, and whose pick of them is right.

Beside the judges stand the majority, the majority weighted by the larger trajectory-aware judge, the oracle, and two
ways to pick by lot: any answer (N = 1 of every curve), and any *distinct text*. Right answers often agree word for
word, so a judge that scores texts and knows nothing does not pick like N = 1 but like the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from reasonlab.config import Config
from reasonlab.evaluate.curves import maj_at_k, pass_at_k, rm_at_k
from reasonlab.evaluate.statistics import mean_interval
from reasonlab.figures.tables import BestOfRow
from reasonlab.judges.bench import Question, answer_given, by_question, weighted_majority
from reasonlab.judges.types import Candidate, write_pool
from reasonlab.keys import key
from reasonlab.studies.answers import asked_problems
from reasonlab.studies.prm_judges import JudgeName, candidate, judges_of, sampling_of, scores_of, traces_of
from reasonlab.studies.recipe import StudySettings
from reasonlab.studies.scores import Floats
from reasonlab.terminal import make_observer
from reasonlab.train.exchange import tiny_exchange
from reasonlab.train.sample import open_engine, sample_groups

BEST = "best-of-n"
MAJORITY, WEIGHTED, ANY_TEXT, ORACLE = "majority", "weighted majority", "any distinct text", "oracle"
LOTS = 32  # over which picks by lot are averaged


def sample_best_of(model: Path, config: Config, settings: StudySettings, out: Path) -> None:
    """Many answers of one student to test problems, to pick the best of."""
    where = out / "traces" / f"{BEST}.jsonl.gz"
    if where.exists():
        return
    problems = asked_problems(config, settings)[: settings.best_of_questions]
    engine, tokenizer = open_engine(model, config.device, config.threads, config.rollout.rows)
    with make_observer(1, BEST) as observer:
        sampling = sampling_of(config, tokenizer.eos_id)
        groups = sample_groups(
            engine, tiny_exchange(tokenizer), problems, settings.best_of, sampling, 0, observer.progress
        )
    pairs = [(g.problem, r, bool(right)) for g in groups for r, right in zip(g.rollouts, g.correct, strict=True)]
    write_pool(where, [candidate(problem, tokenizer.decode(r.ids), right, BEST) for problem, r, right in pairs])


def best_of(settings: StudySettings, out: Path, voter: JudgeName) -> dict[str, dict[int, Floats]]:
    """For each selector and N the chance that its pick is right, [question]: exact over all subsets of N, but by draws
    for the weighted majority, whose weights are `voter`'s scores."""
    pool = traces_of(out, BEST, settings)
    numbers = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= settings.best_of]
    picks = {str(one): exact(questions(pool, scores_of(out, BEST, one, pool)), numbers) for one in judges_of(settings)}
    weighed = questions(pool, scores_of(out, BEST, voter, pool))
    picks[WEIGHTED] = {n: np.array([_weighted(one, n) for one in weighed]) for n in numbers}
    picks[MAJORITY] = _table([maj_at_k(one.votes, one.correct) for one in weighed], numbers)
    by_lot = [exact(questions(pool, lots(pool, lot)), numbers) for lot in range(LOTS)]
    picks[ANY_TEXT] = {n: np.mean([lot[n] for lot in by_lot], axis=0) for n in numbers}
    picks[ORACLE] = {
        n: np.array([pass_at_k(len(one.correct), int(one.correct.sum()), n) for one in weighed]) for n in numbers
    }
    return picks


def questions(pool: Sequence[Candidate], scores: Sequence[float]) -> list[Question]:
    families = by_question(pool, np.array(scores), answer_given).families
    return [question for some in families.values() for question in some]


def exact(asked: Sequence[Question], numbers: Sequence[int]) -> dict[int, Floats]:
    return _table([rm_at_k(one.scores, one.correct) for one in asked], numbers)


def _weighted(question: Question, n: int) -> float:
    return weighted_majority(question, n) if n > 1 else float(question.correct.mean())


def _table(curves: Sequence[Floats], numbers: Sequence[int]) -> dict[int, Floats]:
    return {n: np.array([curve[n - 1] for curve in curves]) for n in numbers}


def lots(pool: Sequence[Candidate], lot: int) -> list[float]:
    """A score by lot for every distinct text."""
    return [key("lot", lot, one.problem, one.response) / 2.0**63 for one in pool]


def best_of_rows(picks: Mapping[str, Mapping[int, Floats]]) -> list[BestOfRow]:
    rows = []
    for who, curve in picks.items():
        for n, values in curve.items():
            value = mean_interval(values)
            low, high = max(0.0, value.low), min(1.0, value.high)
            rows.append(BestOfRow(who, n, value.estimate, low, high, len(values)))
    return rows
