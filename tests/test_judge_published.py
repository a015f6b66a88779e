"""Published judges are read as their publishers read them: same files, same text, same scores.

Every layout is built small (`published_judges.py`). The scores are then computed a second time with transformers alone,
in the words of the model cards.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_judges import (
    LAYOUTS,
    POOL,
    PROCESS,
    QUESTION,
    QWEN_SYSTEM,
    Reference,
    change_config,
    make_qwen_prm,
    make_shepherd,
    their_tokenizer,
    write_byte_level,
)
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from torch import nn

from reasonlab.errors import UserError
from reasonlab.judges.formats import own_format
from reasonlab.judges.network import fresh_judge, save_judge
from reasonlab.judges.published import LongInputWarning, OpenedJudge, open_judge
from reasonlab.judges.published.formats import TaggedLines
from reasonlab.judges.published.text import JudgeTokenizer
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.types import Candidate
from reasonlab.model.ladder import resolve_model

pytestmark = pytest.mark.parity

Made = dict[str, tuple[Path, Reference]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Every layout once."""
    place = tmp_path_factory.mktemp("judges")
    return {kind: (place / name, make(place / name)) for kind, (name, make) in LAYOUTS.items()}


def numbers(judge: OpenedJudge | ModelJudge, candidates: Sequence[Candidate]) -> list[list[float]]:
    """What a judge says, as one list for each candidate."""
    scored = judge.score(candidates)
    assert all((one.final is None) != (not one.steps) for one in scored), "these judges say one thing or the other"
    return [list(one.steps) if one.final is None else [one.final] for one in scored]


# --- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYOUTS)
def test_scores_are_those_of_the_model_card(kind: str, made: Made) -> None:
    directory, reference = made[kind]
    judge = open_judge(directory)
    assert judge.kind == kind
    scores = numbers(judge, POOL)
    for candidate, mine in zip(POOL, scores, strict=True):
        assert mine == pytest.approx(reference(candidate), abs=1e-5), candidate
    flat = [score for some in scores for score in some]
    assert max(flat) - min(flat) > 0.01, "a judge that says the same of everything tests nothing"


@pytest.mark.parametrize("kind", LAYOUTS)
def test_scores_do_not_depend_on_the_batch(kind: str, made: Made) -> None:
    judge = open_judge(made[kind][0], workers=2)
    together = numbers(judge, [*POOL, *reversed(POOL)])
    judge.token_budget = 64
    packed_otherwise = numbers(judge, POOL)
    for number, candidate in enumerate(POOL):
        alone = numbers(judge, [candidate])[0]
        for other in (together[number], together[-1 - number], packed_otherwise[number]):
            assert other == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("kind", PROCESS)
def test_a_score_does_not_know_what_follows(kind: str, made: Made) -> None:
    judge = open_judge(made[kind][0])
    beginning = "16 - 3 = 13.\n\nThen 13 - 4 = 9."
    whole = replace(POOL[0], response=f"{beginning}\n\nNo, that was nonsense: the answer is 7.")
    short, long = numbers(judge, [replace(POOL[0], response=beginning), whole])
    assert len(long) > len(short)
    assert long[: len(short)] == pytest.approx(short, abs=1e-5)


@pytest.mark.parametrize("kind", PROCESS)
def test_given_steps_are_kept(kind: str, made: Made) -> None:
    """A candidate that names its steps (as ProcessBench does) is not cut otherwise."""
    judge = open_judge(made[kind][0])
    first, second = "one line\nand another\n\n", "the rest\n\nof it"
    (scores,) = numbers(judge, [Candidate("p", QUESTION, first + second, step_ends=(22, 22 + len(second)))])
    assert len(first) == 22
    assert len(scores) == 2


def test_the_system_turn_can_be_replaced(made: Made) -> None:
    directory, _ = made["qwen2.5-math-prm"]
    published, none, own = (numbers(open_judge(directory, system=s), POOL) for s in (None, "", "Think."))
    assert published[0] != pytest.approx(none[0], abs=1e-4)
    assert published[0] != pytest.approx(own[0], abs=1e-4)
    assert numbers(open_judge(directory, kind="reasonflux-prm-7b"), POOL) == none


def test_the_tag_in_a_question_is_no_step(made: Made) -> None:
    """The published code takes every "ки" for a step; a Russian question has its own."""
    judge = open_judge(made["math-shepherd"][0])
    (scores,) = numbers(judge, [Candidate("p", "Сколько ки ки?", "Step 1: 9 * 2 = 18\nStep 2: 18 dollars")])
    assert len(scores) == 2


def test_the_signs_of_a_tokenizer_without_a_leading_space_are_a_pair(tmp_path: Path) -> None:
    """A byte-level tokenizer makes "+" and " -" of "+ -"; the judge must compare two tokens of one form."""
    write_byte_level(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("ки", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    form = TaggedLines(JudgeTokenizer(tmp_path))
    assert [tokenizer.decode([token]) for token in (form.plus, form.minus)] == [" +", " -"]
    assert [tokenizer.id_to_token(token) for token in (form.plus, form.minus)] == ["Ġ+", "Ġ-"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_progress_counts_every_candidate_once(kind: str, made: Made) -> None:
    seen: list[int] = []
    open_judge(made[kind][0]).score([*POOL, *POOL], seen.append)
    assert sum(seen) == 2 * len(POOL)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", LAYOUTS)
def test_scores_on_cuda_are_those_of_the_cpu(kind: str, made: Made) -> None:
    on_cpu, on_cuda = (numbers(open_judge(made[kind][0], device=device), POOL) for device in ("cpu", "cuda"))
    for ours, theirs in zip(on_cpu, on_cuda, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_sixteen_bits_stay_near(made: Made) -> None:
    directory, _ = made["skywork-prm"]
    exact, rounded = (numbers(open_judge(directory, bfloat16=b), POOL)[0] for b in (False, True))
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.05)


# --- long responses --------------------------------------------------------------------------------------------------

LONG_STEPS = [f"Step {number}: then {number} + {number * number} = {number + number * number}." for number in range(24)]
LONG = Candidate("a-long-one", QUESTION, "\n\n".join(LONG_STEPS))
LIMIT = 220


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    directory = tmp_path_factory.mktemp("narrow") / "Qwen2.5-Math-PRM-7B"
    return directory, make_qwen_prm(directory, max_position_embeddings=LIMIT)


def test_a_long_response_is_read_in_windows(narrow: tuple[Path, Reference]) -> None:
    """Each step has one score, from a window that fits, holds the question, and reaches back over earlier steps."""
    directory, reference = narrow
    with pytest.warns(LongInputWarning, match="1 of 2 responses exceed the 220 positions"):
        scores, other = numbers(open_judge(directory), [LONG, POOL[0]])
    assert len(scores) == len(LONG_STEPS)
    assert other == pytest.approx(reference(POOL[0]), abs=1e-5)
    tokenizer = their_tokenizer(directory)

    def size(steps: Sequence[str]) -> int:
        return len(tokenizer.encode("<extra_0>".join(steps) + "<extra_0>"))

    room = LIMIT - len(
        tokenizer.encode(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": QWEN_SYSTEM}, {"role": "user", "content": QUESTION}],
                tokenize=False,
                add_generation_prompt=True,
            )
        )
    )
    first = done = windows = 0
    while done < len(LONG_STEPS):
        end = done
        while end < len(LONG_STEPS) and size(LONG_STEPS[first : end + 1]) <= room:
            end += 1
        theirs = reference(LONG, LONG_STEPS[first:end])  # type: ignore[call-arg]
        assert scores[done:end] == pytest.approx(theirs[done - first :], abs=1e-5)
        windows, done = windows + 1, end
        first = next(start for start in range(done + 1) if size(LONG_STEPS[start:done]) * (start < done) <= room // 2)
        assert first < done, "a window must look back"
    assert windows > 2


@pytest.mark.parametrize("kind", PROCESS)
def test_in_windows_too_a_score_does_not_know_what_follows(kind: str, made: Made, tmp_path: Path) -> None:
    directory = tmp_path / made[kind][0].name
    shutil.copytree(made[kind][0], directory)
    change_config(directory, max_position_embeddings=LIMIT)
    judge = open_judge(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LongInputWarning)
        (whole,) = numbers(judge, [LONG])
        for count in (5, 11, 17, 23):
            (part,) = numbers(judge, [replace(LONG, response="\n\n".join(LONG_STEPS[:count]))])
            assert part == pytest.approx(whole[: len(part)], abs=1e-5)


def test_long_responses_can_be_refused(narrow: tuple[Path, Reference]) -> None:
    with pytest.raises(UserError, match=r"'a-long-one' has .* tokens, the judge reads 220 at most"):
        open_judge(narrow[0], long="refuse").score([POOL[0], LONG])


def test_a_step_that_fits_no_window_is_refused(narrow: tuple[Path, Reference]) -> None:
    with pytest.raises(UserError, match=r"step 2 .*'p0'"):
        open_judge(narrow[0]).score([replace(POOL[0], response="short\n\n" + "long " * LIMIT)])


@pytest.mark.parametrize("kind", ["acemath-rm", "reasonflux-prm-1.5b"])
def test_an_outcome_judge_refuses_what_it_cannot_see_at_once(kind: str, made: Made) -> None:
    with pytest.raises(UserError, match=r"'p0' has .* tokens, the judge reads 512 at most"):
        open_judge(made[kind][0]).score([replace(POOL[0], response="18 + " * 512)])


def test_a_stored_truncation_is_switched_off(made: Made, tmp_path: Path) -> None:
    """tokenizer.json remembers the max_length of its last training run; a judge must not."""
    directory = tmp_path / made["reasonflux-prm-1.5b"][0].name
    shutil.copytree(made["reasonflux-prm-1.5b"][0], directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert numbers(open_judge(directory), POOL) == numbers(open_judge(made["reasonflux-prm-1.5b"][0]), POOL)


def test_a_sliding_window_bounds_the_positions(tmp_path: Path) -> None:
    """Up to the window Mistral is a Llama; beyond it our full attention would be another model."""
    directory = tmp_path / "math-shepherd"
    reference = make_shepherd(directory, sliding_window=160)
    judge = open_judge(directory, long="refuse")
    assert numbers(judge, POOL[:2])[1] == pytest.approx(reference(POOL[1]), abs=1e-5)
    with pytest.raises(UserError, match="reads 160 at most"):
        judge.score([LONG])


# --- recognition and errors ------------------------------------------------------------------------------------------


def copy_of(made: Made, kind: str, place: Path) -> Path:
    """The files of a layout in a directory whose name says nothing."""
    shutil.copytree(made[kind][0], place)
    return place


def test_a_name_is_found_in_the_cache_and_on_the_card(made: Made, tmp_path: Path) -> None:
    cached = tmp_path / "models--Gen-Verse--ReasonFlux-PRM-7B" / "snapshots" / "0123abcd"
    assert open_judge(copy_of(made, "reasonflux-prm-7b", cached)).kind == "reasonflux-prm-7b"
    carded = copy_of(made, "acemath-rm", tmp_path / "a")
    assert open_judge(carded).kind == "sequence-classifier"
    (carded / "README.md").write_text("---\ntags:\n- nvidia\n- AceMath\n---\n")
    assert open_judge(carded).kind == "acemath-rm"


def test_a_language_model_is_no_judge_unless_one_says_so(made: Made, tmp_path: Path) -> None:
    directory = copy_of(made, "math-shepherd", tmp_path / "mistral")
    with pytest.raises(UserError, match=r"is a language model .* Known kinds: qwen2.5-math-prm \(Qwen2.5-Math-PRM-7B"):
        open_judge(directory)
    assert numbers(open_judge(directory, kind="math-shepherd"), POOL) == numbers(
        open_judge(made["math-shepherd"][0]), POOL
    )


def test_our_own_judges_open_the_same_way(tmp_path: Path) -> None:
    base = resolve_model("tiny-0.3m")
    pool = [Candidate("p", "12*7+3=?", "12*7=84; 84+3=87</think> Answer:87")]
    for kind in ("outcome", "process"):
        directory = tmp_path / kind
        directory.mkdir()
        save_judge(fresh_judge(base, kind, seed=3), own_format(base, kind), directory, base)  # type: ignore[arg-type]
        judge = open_judge(directory)
        assert judge.kind == "reasonlab"
        assert judge.score(pool) == ModelJudge.open(directory).score(pool)


def remove_tensor(directory: Path, name: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def replace_tensor(directory: Path, name: str, value: torch.Tensor) -> None:
    tensors = load_file(directory / "model.safetensors") | {name: value}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def only_pickles(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def without_separator(directory: Path) -> None:
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("<extra_0>", "<other_0>"))


def without_tokenizer_settings(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no head": ("qwen2.5-math-prm", lambda d: remove_tensor(d, "score.2.weight"), "has no head that is known"),
    "three classes": (
        "qwen2.5-math-prm",
        lambda d: replace_tensor(d, "score.2.weight", torch.zeros(3, 32)),
        r"has no head that is known .*score.2.weight \[3, 32\]",
    ),
    "bias of another head": (
        "qwen2.5-math-prm",
        lambda d: replace_tensor(d, "score.2.bias", torch.zeros(5)),
        "score.2 has shape",
    ),
    "missing layer": (
        "skywork-prm",
        lambda d: remove_tensor(d, "model.layers.1.mlp.up_proj.weight"),
        "has no tensor 'model.layers.1.mlp.up_proj.weight'",
    ),
    "more layers than the config": (
        "skywork-prm",
        lambda d: change_config(d, num_hidden_layers=1),
        "does not speak of 'model.layers.1",
    ),
    "other shape": ("skywork-prm", lambda d: change_config(d, intermediate_size=40), "have shape .* asks for"),
    "only pickles": ("skywork-prm", only_pickles, "only pytorch_model.bin, which is never unpickled"),
    "no config": ("skywork-prm", lambda d: (d / "config.json").unlink(), "is not a checkpoint"),
    "mistral without sizes": (
        "math-shepherd",
        lambda d: change_config(d, hidden_size=...),
        "lacks the key 'hidden_size'",
    ),
    "unknown architecture": (
        "acemath-rm",
        lambda d: change_config(d, model_type="gemma2"),
        "'gemma2' is not supported",
    ),
    "base tokenizer": ("reasonflux-prm-7b", without_separator, "has no token <extra_0>"),
    "no chat template": ("reasonflux-prm-7b", without_tokenizer_settings, "has no chat template"),
    "foreign tokenizer": ("math-shepherd", write_byte_level, "splits the step tag 'ки'|makes .* of"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_said_clearly(damage: str, made: Made, tmp_path: Path) -> None:
    kind, spoil, message = DAMAGE[damage]
    directory = copy_of(made, kind, tmp_path / made[kind][0].name)
    spoil(directory)
    with pytest.raises(UserError, match=message):
        open_judge(directory).score(POOL)


def test_wrong_arguments_are_said_clearly(made: Made, tmp_path: Path) -> None:
    directory = made["skywork-prm"][0]
    for arguments, message in (
        ({"kind": "skywork"}, "there is no kind of judge 'skywork'. Known kinds"),
        ({"kind": "acemath-rm"}, "has no tensor 'score.weight'"),
        ({"kind": "reasonflux-prm-1.5b"}, "reward_head.pt is missing"),
        ({"kind": "qwen2.5-math-rm"}, "has no tensor 'score.0.weight'"),
        ({"long": "truncate"}, 'Use "chunk" or "refuse"'),
    ):
        with pytest.raises(UserError, match=message):
            open_judge(directory, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no directory"):
        open_judge(tmp_path / "nowhere")
    with pytest.raises(UserError, match="'p9' contains <extra_0>"):
        open_judge(made["qwen2.5-math-prm"][0]).score([Candidate("p9", QUESTION, "one<extra_0>two")])


class _Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path(self.file),)  # type: ignore[return-value]


def test_a_head_that_could_run_code_is_refused(made: Made, tmp_path: Path) -> None:
    directory = copy_of(made, "reasonflux-prm-1.5b", tmp_path / "judge")
    head, trap = directory / "reward_head.pt", tmp_path / "sprung"
    torch.save({"weight": torch.zeros(1, 32), "bias": _Trap(trap)}, head)
    with pytest.raises(UserError, match="holds more than tensors"):
        open_judge(directory)
    head.write_bytes(pickle.dumps(_Trap(trap), protocol=2))
    with pytest.raises(UserError, match=r"holds more than tensors|cannot be read"):
        open_judge(directory)
    assert not trap.exists()
    torch.save(nn.Linear(32, 1), head)  # a whole module, not its state dict
    with pytest.raises(UserError, match="holds more than tensors"):
        open_judge(directory)
    head.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"holds more than tensors|cannot be read"):
        open_judge(directory)
    torch.save({"reward_head.weight": torch.ones(1, 32), "reward_head.bias": torch.zeros(1)}, head)
    assert len(numbers(open_judge(directory), POOL)) == len(POOL)
    torch.save({"something": torch.ones(1)}, head)
    with pytest.raises(UserError, match="is not the state dict of a linear layer"):
        open_judge(directory)
