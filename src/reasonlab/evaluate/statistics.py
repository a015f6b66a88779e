"""Error bars for small benchmarks: the question, not the answer, is the unit that is drawn at random.

Sampling k answers to each of n questions gives n independent observations, the question means, not n·k:
pooling the answers makes intervals several times too narrow. So every function here works on questions;
comparisons are paired by question; and the intervals of scores stay inside [0, 1] and keep a width at 0 % and
100 %. This module gathers the room's statistics under one name; `docs/statistics.md` shows how they were tested.
"""

from reasonlab.evaluate.curves import Curve, maj_at_k, maj_curve, pass_at_k, pass_curve, rm_at_k, rm_curve
from reasonlab.evaluate.distributions import normal_quantile, student_t_quantile
from reasonlab.evaluate.frontier import Dominance, Joint, dominance, joint
from reasonlab.evaluate.intervals import (
    Interval,
    length_brackets,
    length_text,
    mean_interval,
    ratio_interval,
    same_questions_interval,
    score_interval,
    wilson,
)
from reasonlab.evaluate.lengths import Lengths, MeanLength, lengths, tokens_per_correct
from reasonlab.evaluate.paired import (
    accuracy_difference,
    holm,
    mcnemar,
    minimum_detectable_effect,
    paired_difference,
    sign_flip,
    varies,
)
from reasonlab.evaluate.seeds import (
    VarianceSplit,
    seed_difference,
    seed_mean_interval,
    seed_score_interval,
    seeds_for_half_width,
    variance_split,
)
from reasonlab.evaluate.selection import Selection, best_checkpoint

__all__ = [
    "Curve",
    "Dominance",
    "Interval",
    "Joint",
    "Lengths",
    "MeanLength",
    "Selection",
    "VarianceSplit",
    "accuracy_difference",
    "best_checkpoint",
    "dominance",
    "holm",
    "joint",
    "length_brackets",
    "length_text",
    "lengths",
    "maj_at_k",
    "maj_curve",
    "mcnemar",
    "mean_interval",
    "minimum_detectable_effect",
    "normal_quantile",
    "paired_difference",
    "pass_at_k",
    "pass_curve",
    "ratio_interval",
    "rm_at_k",
    "rm_curve",
    "same_questions_interval",
    "score_interval",
    "seed_difference",
    "seed_mean_interval",
    "seed_score_interval",
    "seeds_for_half_width",
    "sign_flip",
    "student_t_quantile",
    "tokens_per_correct",
    "variance_split",
    "varies",
    "wilson",
]
