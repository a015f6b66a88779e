"""Small judges in the files and names of the published ones, and their scores in the words of the model cards.

Weights are random and tokenizers real. What a maker returns computes the scores of the judge it wrote a second time,
with transformers alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
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

from reasonlab.judges.types import Candidate

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
