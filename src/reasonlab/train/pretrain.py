"""Pre-train a rung of the tiny ladder on the tiny world's corpus, and report how much room it leaves for learning.

Writes a Hugging Face checkpoint and `pretraining.json`: the settings, the loss curve, for each style and level the
share of right answers at temperature 1 on validation problems, and how well reflections are written and used. Studies
at GPU scale call `ladder_model`, which trains a rung that does not ship once and keeps it in the cache.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reasonlab.config import LearnerConfig
from reasonlab.errors import UserError
from reasonlab.evaluate.evaluator import FORCED_STYLE, evaluate, summarise
from reasonlab.grading.grade import grade
from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.methods.sft import demonstration, sft_loss
from reasonlab.model.checkpoint import save_model
from reasonlab.model.ladder import bundled_models, cached_model, resolve_model, tiny_config
from reasonlab.model.tiny_tokenizer import TinyTokenizer, save
from reasonlab.model.transformer import Transformer
from reasonlab.problems.corpus import (
    KIND_SHARES,
    LEVEL_WEIGHTS,
    MISTAKES,
    STYLE_SHARES,
    Kind,
    Retrospect,
    corpus,
    retrospect,
)
from reasonlab.problems.misconceptions import MISCONCEPTIONS
from reasonlab.problems.reflections import (
    Reflection,
    heuristic_only,
    hinted_prompt,
    parse_reflection,
    retrospective_prompt,
)
from reasonlab.problems.tiny_world import Drawn, problem_set, solution_of
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.runs.files import replace_directory
from reasonlab.train.batch import Example
from reasonlab.train.learner import Learner

Tokens = NDArray[np.uint8]
Lengths = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Pretraining:
    """What a rung is trained with."""

    size: str
    steps: int = 3000
    lr: float = 2e-3
    batch_tokens: int = 65536
    samples: int = 2_000_000
    """Distinct samples of the corpus."""
    seed: int = 0
    device: str = "cpu"
    processes: int = 8
    """That write the corpus."""
    evaluate_problems: int = 3000
    reflection_share: float = 0.0
    hinted_share: float = 0.0
    """Of the samples; all others are plain. With both 0 the corpus knows no reflections."""
    misconceptions: bool = False
    """Whether part of the text follows the typical wrong way of each family (`problems/misconceptions.py`)."""

    @property
    def kinds(self) -> dict[Kind, float]:
        plain = round(1 - self.reflection_share - self.hinted_share, 6)
        if min(plain, self.reflection_share, self.hinted_share) < 0:
            raise UserError(
                f"reflections {self.reflection_share:g} and hints {self.hinted_share:g} are no shares of one corpus",
                "Give numbers from 0 to 1 that add up to at most 1.",
            )
        return {"plain": plain, "reflection": self.reflection_share, "hinted": self.hinted_share}


_MISLED: dict[str, Any] = {
    "samples": 700_000,
    "evaluate_problems": 900,
    "reflection_share": KIND_SHARES["reflection"],
    "hinted_share": KIND_SHARES["hinted"],
    "misconceptions": True,
}

# How far models are trained: far enough to think well, not so far that nothing is left to learn. The smallest ship.
RECIPES = {
    "tiny-0.03m": Pretraining("tiny-0.03m", steps=5000, lr=4e-3, processes=5),
    "tiny-0.06m": Pretraining("tiny-0.06m", steps=5000, lr=4e-3, processes=5),
    "tiny-0.1m": Pretraining("tiny-0.1m", steps=5000, lr=3e-3, processes=5),
    "tiny-0.2m": Pretraining("tiny-0.2m", steps=5000, lr=2e-3, processes=5),
    "tiny-0.3m": Pretraining("tiny-0.3m", steps=5000, lr=2e-3, processes=5),
    "tiny-1m": Pretraining("tiny-1m", steps=2400, lr=2e-3, processes=5),
    "tiny-3m": Pretraining("tiny-3m", steps=1800, lr=2e-3),
    "tiny-10m": Pretraining("tiny-10m", steps=1300, lr=1.5e-3, samples=1_500_000),
    "tiny-32m": Pretraining("tiny-32m", steps=1300, lr=1e-3, samples=1_500_000),
    "tiny-1m-misled": Pretraining("tiny-1m", steps=1800, lr=2e-3, **_MISLED),
    "tiny-10m-misled": Pretraining("tiny-10m", steps=1150, lr=1.5e-3, **_MISLED),
}


def ladder_model(name: str, device: str, say: Callable[[str], None] = print) -> Path:
    """The checkpoint of a model: on disk, bundled, in the cache, or trained now into the cache (minutes on a GPU)."""
    if name not in RECIPES or name in bundled_models() or cached_model(name).is_dir():
        return resolve_model(name)
    target = cached_model(name)
    say(f"{name} does not ship: pre-training it once into {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        pretrain(replace(RECIPES[name], device=device), unfinished, say)
        replace_directory(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def shard(seed: int, count: int, settings: Pretraining) -> tuple[Tokens, Lengths, Lengths]:
    """`count` samples of the corpus: all tokens flat, prompt lengths and response lengths."""
    tokenizer = TinyTokenizer.load()
    texts: list[str] = []
    for sample in islice(corpus(seed, kinds=settings.kinds, misconceptions=settings.misconceptions), count):
        texts += [sample.prompt, sample.response]
    encoded = tokenizer.encode_batch(texts)
    flat = np.fromiter((t for ids in encoded for t in ids), np.uint8)
    lengths = np.array([len(ids) for ids in encoded], np.uint16).reshape(-1, 2)
    return flat, lengths[:, 0], lengths[:, 1]


def make_corpus(settings: Pretraining) -> list[Example]:
    size = min(20_000, settings.samples)
    seeds = [key(settings.seed, "shard", i) for i in range(-(-settings.samples // size))]
    examples: list[Example] = []
    with ProcessPoolExecutor(settings.processes) as pool:
        for flat, prompts, responses in pool.map(shard, seeds, repeat(size), repeat(settings)):
            start = 0
            wide = flat.astype(np.int64)
            for p, r in zip(prompts.tolist(), responses.tolist(), strict=True):
                examples.append(demonstration(wide[start : start + p], wide[start + p : start + p + r]))
                start += p + r
    return examples


def batches(examples: list[Example], tokens: int, seed: int) -> Iterator[list[Example]]:
    """Endless passes in a fresh order; a batch holds about `tokens` tokens."""
    for epoch in range(10**9):
        order = list(range(len(examples)))
        Random(key(seed, "epoch", epoch)).shuffle(order)
        batch: list[Example] = []
        used = 0
        for i in order:
            batch.append(examples[i])
            used += examples[i].length
            if used >= tokens:
                yield batch
                batch, used = [], 0


def room(engine: Engine, tokenizer: TinyTokenizer, problems: int, misconceptions: bool = False) -> dict[str, object]:
    """Accuracy at temperature 1, free and with each style forced, overall and by level."""
    chosen = problem_set("validation", problems, levels=(1, 2, 3, 4, 5)) + problem_set("harder", problems // 5)
    sampling = Sampling(max_tokens=200, stop_ids=(tokenizer.eos_id,))
    report: dict[str, object] = {}
    for name, force in (("free", ""), ("answer", "Answer"), ("worked", FORCED_STYLE)):
        answers = evaluate(engine, tokenizer, chosen, sampling, force=force)
        levels = {level: [a for a in answers if a.level == level] for level in range(1, 8)}
        families = sorted({a.family for a in answers})
        mix = [a for a in answers if 2 <= a.level <= 5]
        thinking = [a for a in mix if a.text.startswith("<think>")]
        checking = [a for a in thinking if " check " in a.text]
        report[name] = {
            "accuracy": round(summarise(mix).accuracy.estimate, 4),
            "tokens": round(summarise(mix).tokens.estimate, 2),
            "by_level": {n: round(summarise(a).accuracy.estimate, 3) for n, a in levels.items()},
            "by_family": {
                f: round(summarise([a for a in mix if a.family == f]).accuracy.estimate, 3) for f in families
            },
            "thinking": round(len(thinking) / len(mix), 3),
            "checking": round(len(checking) / len(mix), 3),
            "accuracy_checked": round(summarise(checking).accuracy.estimate, 3) if checking else None,
            "accuracy_worked": round(summarise([a for a in thinking if " check " not in a.text]).accuracy.estimate, 3)
            if len(thinking) > len(checking)
            else None,
            "accuracy_answer": round(
                summarise([a for a in mix if not a.text.startswith("<think>")]).accuracy.estimate, 3
            )
            if len(mix) > len(thinking)
            else None,
        }
    report["experience"] = experience(engine, tokenizer, problems // 3, sampling, misconceptions)
    return report


def experience(
    engine: Engine, tokenizer: TinyTokenizer, problems: int, sampling: Sampling, misconceptions: bool
) -> dict[str, object]:
    """How well reflections on planted mistakes are written at temperature 1, and how much a true one helps as a hint.

    Of the reflections: the share that can be read, that name the first wrong place, what should stand there and the
    rule, and that are true in all of it; with a right response beside the wrong one and without. Of the answers: the
    accuracy with the true reflection as a hint, with its rule alone, and with no hint but the worked style forced.
    """
    chosen = problem_set("validation", problems, levels=(2, 3, 4, 5))
    cases = [retrospect(Drawn(p, solution_of(p)), Random(key("experience", p.id)), misconceptions) for p in chosen]

    def responses(prompts: list[str]) -> list[str]:
        keys = [key("experience", p.id, "response") for p in chosen]
        requests = [Request(tokenizer.encode(text), [k]) for text, k in zip(prompts, keys, strict=True)]
        return [tokenizer.decode(rollout.ids) for (rollout,) in engine.generate(requests, sampling)]

    def reflections(with_right: bool) -> dict[str, object]:
        prompts = [
            retrospective_prompt(p.question, case.wrong, case.right if with_right else None)
            for p, case in zip(chosen, cases, strict=True)
        ]
        pairs = list(zip(responses(prompts), cases, strict=True))
        with_steps = [pair for pair in pairs if pair[1].wrong.startswith("<think>")]
        return {"all": _truth(pairs), "wrong_with_steps": _truth(with_steps)}

    def accuracy(texts: list[str]) -> float:
        right = [grade(p, text).verdict == "correct" for p, text in zip(chosen, texts, strict=True)]
        return round(sum(right) / len(right), 4)

    def hinted(hints: list[str]) -> float:
        return accuracy(responses([hinted_prompt(p.question, hint) for p, hint in zip(chosen, hints, strict=True)]))

    unaided = evaluate(engine, tokenizer, chosen, sampling, force=FORCED_STYLE)
    return {
        "problems": len(chosen),
        "reflections": reflections(with_right=True),
        "reflections_from_wrong_only": reflections(with_right=False),
        "accuracy_hinted": hinted([case.reflection for case in cases]),
        "accuracy_rule_only": hinted([heuristic_only(case.reflection) or "" for case in cases]),
        "accuracy_worked_without_hint": accuracy([answer.text for answer in unaided]),
    }


def _truth(pairs: Sequence[tuple[str, Retrospect]]) -> dict[str, float]:
    """Of written reflections, the share with each part as in the true one."""
    written = [parse_reflection(text) for text, _ in pairs]
    true = [parse_reflection(case.reflection) for _, case in pairs]
    agree = {
        part: [w is not None and getattr(w, part) == getattr(t, part) for w, t in zip(written, true, strict=True)]
        for part in Reflection._fields
    }
    return {
        "read": round(np.mean([w is not None for w in written]), 4),
        **{part: round(np.mean(same), 4) for part, same in agree.items()},
        "true": round(np.mean([w is not None and w == t for w, t in zip(written, true, strict=True)]), 4),
    }


def pretrain(settings: Pretraining, out: Path, say: Callable[[str], None] = print) -> None:
    """Train and write the checkpoint and its report into `out`."""
    prepare(settings.device)
    tokenizer = TinyTokenizer.load()
    started = time.time()
    examples = make_corpus(settings)
    total = sum(e.length for e in examples)
    say(f"{settings.size}: {len(examples):,} samples, {total:,} tokens in {time.time() - started:.0f} s")

    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    model = Transformer(tiny_config(settings.size, tokenizer.vocab_size, **ids))
    model.initialise(settings.seed)
    model.to(settings.device)
    config = LearnerConfig(
        lr=settings.lr,
        token_budget=2 * settings.batch_tokens,
        schedule="cosine",
        warmup_steps=min(200, settings.steps // 10),
        decay_steps=settings.steps,
        final_lr_ratio=0.05,
        weight_decay=0.05,
    )
    learner = Learner(model, config)
    started, curve, seen = time.time(), [], 0
    for step, batch in enumerate(islice(batches(examples, settings.batch_tokens, settings.seed), settings.steps), 1):
        result = learner.step(batch, sft_loss)
        seen += sum(e.length for e in batch)
        if step % max(1, settings.steps // 40) == 0:
            rate = seen / (time.time() - started)
            curve.append({"step": step, "loss": round(result.loss, 4), "grad_norm": round(result.grad_norm, 4)})
            say(f"{settings.size}: step {step} of {settings.steps}, loss {result.loss:.4f}, {rate:,.0f} tokens/s")
    seconds = time.time() - started

    engine = Engine(model, rows=512 if settings.device == "cpu" else 2048)
    report = {
        "size": settings.size,
        "parameters": model.config.parameter_count(),
        "settings": asdict(settings),
        "corpus": {
            "kinds": settings.kinds,
            "misconceptions": {name: held.temptation for name, held in MISCONCEPTIONS.items()}
            if settings.misconceptions
            else None,
            "styles": STYLE_SHARES,
            "levels": LEVEL_WEIGHTS,
            "mistakes": MISTAKES,
            "tokens": total,
        },
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "seconds": round(seconds, 1),
        "tokens_seen": seen,
        "curve": curve,
        "room": room(engine, tokenizer, settings.evaluate_problems, settings.misconceptions),
    }
    out.mkdir(parents=True, exist_ok=True)
    save_model(model.cpu(), out)
    save(out)
    (out / "pretraining.json").write_text(json.dumps(report, indent=1) + "\n")
