"""Published judges are read as their publishers read them: same files, same text, same scores.

Every layout is built small, with random weights and a real tokenizer, in the files and names of the published one. The
scores are then computed a second time with transformers alone, in the words of the model cards.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import shake
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
)

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

QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
ACEMATH_SYSTEM = "Please reason step by step, and check your final answer within \\boxed{}."
CORPUS = [
    "Please reason step by step, and put your final answer within \\boxed{}. system user assistant",
    "Step 1: 16 - 3 = 13 eggs are left. ки\nStep 2: 13 - 4 = 9 ки\nStep 3: 9 * 2 = 18 dollars, so + or - ки",
    "How many eggs do the ducks of Janet lay each day? She sells the rest for $2. + - + - ки ки ки",
    "You are a helpful assistant. First we add, then we divide.\n\nThe answer is \\boxed{18}.",
]
# Shaped like Qwen's: a default system turn where none is given.
QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + eos_token }}{% endfor %}"
)
QUESTION = "How many dollars does Janet make each day?"
RESPONSES = [
    "First we add: 16 - 3 = 13.\n\nThen we divide, 13 / 4.\n\nThe answer is \\boxed{18}.",
    "Step 1: 16 - 3 = 13 eggs are left.\nStep 2: 13 - 4 = 9\n\nStep 3: 9 * 2 = 18 dollars",
    "18",
    "",
    "\n\nblank lines first\n\n\n\nand a trailing one é ☃\n",
]
POOL = [Candidate(f"p{number}", QUESTION, response) for number, response in enumerate(RESPONSES)]
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


# --- small checkpoints in the published layouts ----------------------------------------------------------------------


def write_byte_level(directory: Path, **settings: Any) -> int:
    """A byte-level tokenizer like Qwen's, with its special tokens, and its settings; returns the vocabulary's size."""
    tokenizer = Tokenizer(models.BPE())
    words = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<extra_0>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    save_tokenizer(
        tokenizer,
        directory,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "chat_template": QWEN_TEMPLATE}
        | settings,
    )
    return int(tokenizer.get_vocab_size())


def write_sentence_piece(directory: Path, **settings: Any) -> int:
    """A tokenizer like Mistral's: ▁ for spaces and before the first word, bytes for the rest, <s> at the beginning."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # Words are learnt apart from one another, so that no token spans two of them.
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=specials, max_token_length=6)
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split()], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    save_tokenizer(
        tokenizer, directory, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA_TEMPLATE} | settings
    )
    return int(tokenizer.get_vocab_size())


def save_tokenizer(tokenizer: Tokenizer, directory: Path, settings: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def change_config(directory: Path, **changes: Any) -> None:
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def qwen_backbone(vocabulary: int, seed: int, **changes: Any) -> Any:
    ids = {"pad_token_id": None, "bos_token_id": vocabulary - 4, "eos_token_id": vocabulary - 2}
    model = Qwen2Model(Qwen2Config(vocab_size=vocabulary, **SHAPE | ids | changes)).eval()
    shake(model, seed)
    return model


def write_with_head(directory: Path, backbone: Any, head: dict[str, torch.Tensor], architecture: str) -> None:
    """Backbone tensors behind `model.`, a language head that must be ignored, and the head of the judge."""
    tensors = {f"model.{name}": tensor for name, tensor in backbone.state_dict().items()}
    noise = torch.full((backbone.config.vocab_size, backbone.config.hidden_size), float("nan"))
    save_file(tensors | {"lm_head.weight": noise} | head, directory / "model.safetensors", metadata={"format": "pt"})
    # The spelling of 2024: rope_theta beside the sizes, torch_dtype, no rope_parameters.
    raw = backbone.config.to_dict() | {"architectures": [architecture], "rope_theta": 10000.0, "torch_dtype": "float32"}
    raw |= {"use_sliding_window": False, "sliding_window": None}
    for key in ("rope_parameters", "layer_types", "dtype"):
        raw.pop(key, None)
    (directory / "config.json").write_text(json.dumps(raw))


def two_layers(outputs: int, seed: int) -> nn.Sequential:
    hidden = SHAPE["hidden_size"]
    head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
    shake(head, seed, 0.2)
    return head


def named(head: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in head.state_dict().items()}


# --- the same judges in the words of their model cards ---------------------------------------------------------------

Reference = Callable[[Candidate], list[float]]


def their_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    return PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **settings)


def blank_line_steps(response: str) -> list[str]:
    return [part.strip() for part in response.split("\n\n") if part.strip()] or [""]


def lines(response: str) -> list[str]:
    return [part.strip() for part in response.split("\n") if part.strip()] or [""]


@torch.no_grad()
def separated_scores(
    tokenizer: Any, backbone: Any, head: nn.Module, question: str, steps: Sequence[str], system: str
) -> list[float]:
    """The card of Qwen2.5-Math-PRM: softmax at every <extra_0>, class 1."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "<extra_0>".join(steps) + "<extra_0>"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    ids = tokenizer.encode(text, return_tensors="pt")
    probabilities = head(backbone(ids).last_hidden_state).softmax(-1)
    return probabilities[ids == tokenizer.convert_tokens_to_ids("<extra_0>")][:, 1].tolist()


def make_qwen_prm(directory: Path, seed: int = 1, system: str = QWEN_SYSTEM, **changes: Any) -> Reference:
    vocabulary = write_byte_level(directory)
    backbone, head = qwen_backbone(vocabulary, seed, **changes), two_layers(2, seed + 1)
    write_with_head(directory, backbone, named(head, "score"), "Qwen2ForProcessRewardModel")
    tokenizer = their_tokenizer(directory)

    def reference(candidate: Candidate, steps: Sequence[str] | None = None) -> list[float]:
        steps = blank_line_steps(candidate.response) if steps is None else steps
        return separated_scores(tokenizer, backbone, head, candidate.question, steps, system)

    return reference


def make_reasonflux_7b(directory: Path) -> Reference:
    return make_qwen_prm(directory, seed=3, system="")


def make_skywork(directory: Path) -> Reference:
    vocabulary = write_byte_level(directory, bos_token="<|endoftext|>")
    backbone, head = qwen_backbone(vocabulary, 5), nn.Linear(SHAPE["hidden_size"], 1)
    shake(head, 6, 0.2)
    write_with_head(directory, backbone, named(head, "v_head.summary"), "Qwen2ForPrmModel")
    tokenizer = their_tokenizer(directory)

    @torch.no_grad()
    def reference(candidate: Candidate) -> list[float]:
        ids = tokenizer.encode(tokenizer.bos_token + candidate.question + "\n")
        flags = [0] * len(ids)
        for step in candidate.response.split("\n"):
            mine = [*tokenizer.encode(step), tokenizer.encode("\n")[-1]]
            ids, flags = ids + mine, flags + [0] * (len(mine) - 1) + [1]
        values = head(backbone(torch.tensor([ids])).last_hidden_state)[0, :, 0].sigmoid()
        return values[torch.tensor(flags) == 1].tolist()

    return reference


def make_shepherd(directory: Path, **changes: Any) -> Reference:
    vocabulary = write_sentence_piece(directory)
    options = SHAPE | {"sliding_window": None, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2} | changes
    model = MistralForCausalLM(MistralConfig(vocab_size=vocabulary, **options)).eval()
    shake(model, 7)
    model.save_pretrained(directory)
    tokenizer = their_tokenizer(directory)

    @torch.no_grad()
    def reference(candidate: Candidate) -> list[float]:
        signs = tokenizer.encode("+ -")[1:]
        tag = tokenizer.encode("ки")[-1]
        text = f"{candidate.question} " + "\n".join(f"{step} ки" for step in lines(candidate.response))
        ids = torch.tensor([tokenizer.encode(text)])
        return model(ids).logits[:, :, signs].softmax(-1)[:, :, 0][ids == tag].tolist()

    return reference


def make_acemath(directory: Path, system: str = ACEMATH_SYSTEM) -> Reference:
    vocabulary = write_byte_level(directory)
    options = SHAPE | {"num_labels": 1, "pad_token_id": vocabulary - 4, "bos_token_id": None, "eos_token_id": None}
    model = Qwen2ForSequenceClassification(Qwen2Config(vocab_size=vocabulary, **options)).eval()
    shake(model, 9)
    model.save_pretrained(directory, max_shard_size="40KB")
    return classifier_reference(directory, model, system)


def classifier_reference(directory: Path, model: Any, system: str) -> Reference:
    tokenizer = their_tokenizer(directory)

    @torch.no_grad()
    def reference(candidate: Candidate) -> list[float]:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [
            {"role": "user", "content": candidate.question},
            {"role": "assistant", "content": candidate.response},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        return model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0].tolist()

    return reference


def make_llama_classifier(directory: Path) -> Reference:
    """Its template ends in the end token, which is the padding token too: transformers reads the token before it."""
    vocabulary = write_sentence_piece(directory)
    options = SHAPE | {"num_labels": 1, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=vocabulary, **options)).eval()
    shake(model, 11)
    model.save_pretrained(directory)
    return classifier_reference(directory, AutoModelForSequenceClassification.from_pretrained(directory), "")


def make_qwen_rm(directory: Path) -> Reference:
    vocabulary = write_byte_level(directory)
    backbone, head = qwen_backbone(vocabulary, 13), two_layers(1, 14)
    write_with_head(directory, backbone, named(head, "score"), "Qwen2ForRewardModel")

    class Both(nn.Module):
        def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
            hidden = backbone(input_ids).last_hidden_state
            return type("Output", (), {"logits": head(hidden)[:, -1]})

    return classifier_reference(directory, Both(), QWEN_SYSTEM)


def make_reasonflux_small(directory: Path) -> Reference:
    vocabulary = write_byte_level(directory)
    options = SHAPE | {"tie_word_embeddings": True, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, **options)).eval()
    shake(model, 15)
    head = nn.Linear(SHAPE["hidden_size"], 1)
    shake(head, 16, 0.2)
    model.save_pretrained(directory)
    torch.save(head.state_dict(), directory / "reward_head.pt")
    tokenizer, again = their_tokenizer(directory), AutoModelForCausalLM.from_pretrained(directory)

    @torch.no_grad()
    def reference(candidate: Candidate) -> list[float]:
        encoded = tokenizer(candidate.question + candidate.response, return_tensors="pt")
        hidden = again.model(input_ids=encoded["input_ids"]).last_hidden_state
        return head(hidden[:, -1]).sigmoid()[0].tolist()

    return reference


# kind: the directory's name, how it is made
LAYOUTS: dict[str, tuple[str, Callable[[Path], Reference]]] = {
    "qwen2.5-math-prm": ("Qwen2.5-Math-PRM-7B", make_qwen_prm),
    "reasonflux-prm-7b": ("ReasonFlux-PRM-7B", make_reasonflux_7b),
    "reasonflux-prm-1.5b": ("ReasonFlux-PRM-1.5B", make_reasonflux_small),
    "skywork-prm": ("Skywork-o1-Open-PRM-Qwen-2.5-7B", make_skywork),
    "math-shepherd": ("math-shepherd-mistral-7b-prm", make_shepherd),
    "acemath-rm": ("AceMath-7B-RM", make_acemath),
    "qwen2.5-math-rm": ("Qwen2.5-Math-RM-72B", make_qwen_rm),
    "sequence-classifier": ("some-llama-reward", make_llama_classifier),
}
PROCESS = ("qwen2.5-math-prm", "reasonflux-prm-7b", "skywork-prm", "math-shepherd")
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
