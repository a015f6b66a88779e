"""The header of a GGUF file, read in one pass over the mapped file: what it says, and where its tensors lie.

The `gguf` package reads it too, but makes several arrays for every string, and a vocabulary with its merges has
hundreds of thousands. The layout, all little-endian, where a string is its length (u64) and that much UTF-8:

    "GGUF", version u32, count of tensors u64, count of keys u64
    keys:    name string, type u32, value; an array is type u32, count u64, values
    tensors: name string, count of dimensions u32, dimensions u64 (the fastest first), type u32, offset u64
    padding up to the alignment, and from there on, by their offsets, the tensors

What does not fit this is a ValueError, or what the `gguf` package raises for types and shapes it does not know.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reasonlab.errors import UserError

_VERSIONS = (2, 3)  # the first one counted in 32 bits
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32, _STRING, _ARRAY = 4, 8, 9
_DIMENSIONS = 4  # ggml has no more
_ALIGNMENT = 32  # where the file names none


class StoredTensor(NamedTuple):
    """A tensor as it lies in the file; `kind` is the package's GGMLQuantizationType."""

    kind: Any
    shape: tuple[int, ...]  # as PyTorch has it: the fastest dimension last
    data: NDArray[np.uint8]  # a view of the file, in rows


class Header(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Metadata in Python's types and tensors by their names, both in the order of the file."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if mapped[4:6] == b"\0\0":  # the version, a small number, with its bytes swapped
        raise UserError(f"{path} is a big-endian GGUF file, which is not supported", "Fetch the little-endian one")
    try:
        return _Reader(mapped).header()
    except struct.error:
        raise ValueError("it ends in its header") from None


class _Reader:
    """A place in the mapped file that moves on with everything read."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._at = 0

    def header(self) -> Header:
        magic, version = self._unpack("<4sI")
        if magic != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if version not in _VERSIONS:
            raise ValueError(f"it is version {version}, supported are 2 and 3")
        tensor_count, key_count = self._unpack("<QQ")
        alignment, metadata = _ALIGNMENT, {}
        for _ in range(key_count):
            name, (kind,) = self._string(), self._unpack("<I")
            if name in metadata:
                raise ValueError(f"it has the key {name!r} twice")
            metadata[name] = self._value(kind)
            if name == "general.alignment":
                alignment = metadata[name]
                if kind != _U32 or alignment.bit_count() != 1:
                    raise ValueError(f"its alignment {alignment!r} is not a power of two")
        places: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name, (dimensions,) = self._string(), self._unpack("<I")
            if name in places:
                raise ValueError(f"it has the tensor {name!r} twice")
            if dimensions > _DIMENSIONS:
                raise ValueError(f"its tensor {name!r} has {dimensions} dimensions")
            places[name] = (self._unpack(f"<{dimensions}Q")[::-1], *self._unpack("<IQ"))
        start = -(-self._at // alignment) * alignment
        return Header(
            metadata,
            {name: self._tensor(name, shape, kind, start + offset) for name, (shape, kind, offset) in places.items()},
        )

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self._mapped, self._at)
        self._at += struct.calcsize(layout)
        return found

    def _bytes(self, count: int) -> int:
        """Step over so many bytes, all of which must be there; where they begin."""
        start, self._at = self._at, self._at + count
        if self._at > len(self._mapped):
            raise ValueError("it ends in its header")
        return start

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start = self._bytes(length)
        return self._mapped[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind != _ARRAY:
            return self._values(kind, 1)[0]
        kind, count = self._unpack("<IQ")
        return self._values(kind, count)

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _NUMBERS:  # arrays of arrays are among them: llama.cpp reads none either
            raise ValueError(f"it has a value of the unknown type {kind}")
        number = np.dtype(_NUMBERS[kind])
        start = self._bytes(number.itemsize * count)
        return np.frombuffer(self._mapped, number, count, start).tolist()  # type: ignore[no-any-return]

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        known = GGMLQuantizationType(kind)
        rows = quant_shape_to_byte_shape(shape, known)
        size = math.prod(rows)
        if start + size > len(self._mapped):
            raise ValueError(f"it ends before its tensor {name!r}")
        return StoredTensor(known, shape, np.frombuffer(self._mapped, np.uint8, size, start).reshape(rows))
