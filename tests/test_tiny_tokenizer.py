"""The tokenizer of the tiny models: exact, complete, and the same through transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reasonlab.model import tiny_tokenizer
from reasonlab.model.tiny_tokenizer import TinyTokenizer

ASSETS = Path(tiny_tokenizer.__file__).parent / "assets" / "tiny_tokenizer"
PIECES = [token for token in tiny_tokenizer.vocabulary() if not token.startswith("<reserved")]
TEXT = "<bos>Tom has 12 apples,Zed  buys\n\n 3:apples=?\n<think>1+1=2 check 2-1=1 ok</think>Answer:2<eos>"

tokenizer = TinyTokenizer.load()


def test_special_tokens_have_their_ids() -> None:
    assert tokenizer.encode("<pad><bos><eos><think></think><unk>") == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert (tokenizer.think_id, tokenizer.end_think_id, tokenizer.unknown_id) == (3, 4, 5)


def test_words_are_single_tokens_and_numbers_are_digits() -> None:
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("Tom has 125 apples check ok</think>Answer:1")]
    assert "|".join(pieces) == "Tom| has| |1|2|5| apples| check| ok|</think>|Answer|:|1"


@pytest.mark.parametrize("word", tiny_tokenizer.REFLECTION_WORDS)
def test_reflection_words_are_reserved(word: str) -> None:
    assert len(tokenizer.encode(word)) == len(tokenizer.encode(f" {word}")) == 1


def test_the_vocabulary_has_a_round_size_and_no_doubles() -> None:
    tokens = tiny_tokenizer.vocabulary()
    assert tokenizer.vocab_size == len(tokens) == len(set(tokens))
    assert tokenizer.vocab_size % 8 == 0


@settings(deadline=None)
@given(st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n")))
def test_printable_text_comes_back_unchanged(text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text]) == [ids]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES)))
def test_text_made_of_tokens_comes_back_unchanged(pieces: list[str]) -> None:
    assert tokenizer.decode(tokenizer.encode("".join(pieces))) == "".join(pieces)


def test_a_foreign_character_is_unknown_not_lost() -> None:
    assert tokenizer.encode("1é2") == [*tokenizer.encode("1"), tokenizer.unknown_id, *tokenizer.encode("2")]


def test_stored_files_are_what_the_code_builds(tmp_path: Path) -> None:
    tiny_tokenizer.save(tmp_path)
    for built in tmp_path.iterdir():
        stored = (ASSETS / built.name).read_text(encoding="utf-8")
        if built.suffix == ".json":
            assert json.loads(stored) == json.loads(built.read_text(encoding="utf-8"))
        else:
            assert stored == built.read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in ASSETS.iterdir()}


def test_transformers_reads_the_stored_files_the_same_way() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    assert len(theirs) == tokenizer.vocab_size
    assert theirs(TEXT).input_ids == tokenizer.encode(TEXT)
    assert theirs.decode(tokenizer.encode(TEXT)) == TEXT
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    user = {"role": "user", "content": "37+85=?"}
    prompt = theirs.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert prompt == "<bos>37+85=?\n"
    both = theirs.apply_chat_template([user, {"role": "assistant", "content": "Answer:122"}], tokenize=False)
    assert both == "<bos>37+85=?\nAnswer:122<eos>"
