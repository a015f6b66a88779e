"""Text encoders: what stands behind Φ when two steps are compared.

The default needs no model: character n-grams, hashed into a fixed number of places. It sees shared numbers, operations
and words, which is what steps of the tiny world have in common. For texts of real models a sentence encoder of
transformers can be named, by the directory that holds it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from reasonlab.errors import UserError

Floats = NDArray[np.float64]


class Encoder(Protocol):
    def encode(self, texts: Sequence[str]) -> Floats:
        """Vectors of length one, one row for each text. The same text has the same vector in any company."""
        ...


class HashedNgrams:
    """Counts of character n-grams in `places` hashed places. Counts are never negative, so neither are cosines."""

    def __init__(self, places: int = 512, sizes: Sequence[int] = (1, 2, 3)) -> None:
        self.places, self.sizes = places, tuple(sizes)

    def encode(self, texts: Sequence[str]) -> Floats:
        vectors = np.zeros((len(texts), self.places))
        for row, text in zip(vectors, texts, strict=True):
            marked = f"\x02{' '.join(text.lower().split())}\x03"  # both ends count as characters: no text is empty
            grams = [marked[i : i + n] for n in self.sizes for i in range(len(marked) - n + 1)]
            np.add.at(row, [zlib.crc32(gram.encode()) % self.places for gram in grams], 1.0)
        return unit(vectors)


class TransformersEncoder:
    """The mean of the last hidden states of a model that transformers can load from a directory.

    A text with more tokens than the model has positions is read in pieces, and the mean is over all its tokens.
    """

    def __init__(self, directory: Path, device: str = "cpu", batch: int = 32) -> None:
        from transformers import AutoModel, AutoTokenizer

        if not (directory / "config.json").is_file():
            raise UserError(f"{directory} holds no encoder", "Name a directory with config.json and the weights")
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self.model: Any = AutoModel.from_pretrained(directory, local_files_only=True).eval().to(device)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{directory} cannot be loaded as an encoder ({error})", "Save it again") from None
        self.device, self.batch = device, batch
        positions = getattr(self.model.config, "max_position_embeddings", None)
        self.room: int = min(self.tokenizer.model_max_length, positions or 10**9)

    def encode(self, texts: Sequence[str]) -> Floats:
        import torch

        pieces = [(i, piece) for i, text in enumerate(texts) for piece in self._pieces(text)]
        pieces.sort(key=lambda one: len(one[1]))  # similar lengths together, little padding
        sums = np.zeros((len(texts), self.model.config.hidden_size))
        for start in range(0, len(pieces), self.batch):
            part = pieces[start : start + self.batch]
            ids = torch.zeros(len(part), len(part[-1][1]), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, (_, piece) in enumerate(part):
                ids[row, : len(piece)] = torch.tensor(piece)
                mask[row, : len(piece)] = 1
            with torch.inference_mode():
                hidden = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device))
            states = hidden.last_hidden_state.double().cpu() * mask[:, :, None]
            for (i, _), total in zip(part, states.sum(1).numpy(), strict=True):
                sums[i] += total
        return unit(sums)

    def _pieces(self, text: str) -> list[list[int]]:
        """Its tokens, with whatever the tokenizer puts around them, in pieces that the model can read."""
        read = self.tokenizer(text, truncation=True, max_length=self.room, return_overflowing_tokens=True)
        pieces: list[list[int]] = read["input_ids"]
        return [piece for piece in pieces if piece]


def unit(vectors: Floats) -> Floats:
    """Every row divided by its length; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = vectors / np.where(lengths > 0, lengths, 1.0)
    return scaled
