"""Guesses of chat models, by which curation finds problems that need no thought: they begin behind an empty one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from reasonlab.evaluate.pass_rates import _ThoughtClosed
from reasonlab.model.text_format import ChatFormat
from reasonlab.model.tokenizer import ChatTokenizer

WORDS = {word: number for number, word in enumerate(["[UNK]", "q", "bot", "<think>", "</think>"])}


@pytest.mark.parametrize(
    ("template", "asked", "opening"),
    [
        ("{{ messages[0]['content'] }} bot", "q bot <think> </think>", "<think>\n\n</think>\n\n"),
        ("{{ messages[0]['content'] }} bot <think>", "q bot <think> </think>", "<think>\n</think>\n\n"),
        ("{{ messages[0]['content'] }} bot <think> </think>", "q bot <think> </think>", ""),
    ],
)
def test_the_thought_of_a_guess_is_closed_before_it_begins(template: str, asked: str, opening: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    closed = _ThoughtClosed(ChatFormat(ChatTokenizer(tokenizer, template)))
    prompt = closed.prompt("q")
    assert closed.prompts(["q", "q q"]) == [prompt, closed.prompt("q q")]
    assert (prompt.ids, prompt.opening) == ([WORDS[word] for word in asked.split()], opening)
    answers = [[WORDS["q"]], [WORDS["bot"], WORDS["q"]]]
    assert closed.responses(answers) == [closed.response(ids) for ids in answers]


def test_a_model_that_knows_no_thoughts_is_left_alone() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "q": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Punctuation()  # the mark is three tokens
    inner = ChatFormat(ChatTokenizer(tokenizer))
    assert _ThoughtClosed(inner).prompt("q") == inner.prompt("q")
