"""Reader of GGUF files, versions 2 and 3, little-endian.

    header     magic, version u32, number of tensors u64, number of metadata entries u64
    metadata   key, type u32, value
    tensors    name, dimensions (the fastest first), type u32, offset u64
    data       at the next multiple of general.alignment; offsets count from there

Strings are a length u64 and UTF-8. Every count, length and offset is checked against the file's
size and against a limit before memory is taken for it.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.errors import CheckpointError, brief, choice_error
from lockstep.quantization.gguf_blocks import LAYOUTS, PLAIN, bytes_per_row
from lockstep.settings import path_fault

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 16
"""Metadata entries of a file; published ones have fewer than 100."""
MAX_TENSORS = 1 << 18
MAX_VALUES = 1 << 23
"""Elements of all arrays together. A vocabulary of 262,144 tokens has 4 arrays of that length."""
MAX_TEXT = 16 << 20
"""Bytes of one string."""
MAX_NAME = 256
"""Bytes of a key or a tensor name; GGML allows 64 for tensors, the format 65,535 for keys."""
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 1 << 48
MAX_ALIGNMENT = 1 << 20
ALIGNMENT = 32
"""Alignment of tensor data where the metadata does not say another."""

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Number of a value type -> its struct code."""
FLOAT32 = 6
STRING = 8
ARRAY = 9

KINDS: dict[int, str] = {
    **{number: kind for kind, (number, _) in PLAIN.items()},
    **{layout.number: kind for kind, layout in LAYOUTS.items()},
}
"""Number of a tensor type -> its name, of the supported types."""
OTHER_KINDS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip
"""Number -> name of types that are not supported, for messages."""


@dataclass(frozen=True)
class TensorEntry:
    """Tensor of a GGUF file.

    shape: slowest dimension first, as in torch. kind: name of its type. path: of the file. begin:
    offset of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    path: Path
    begin: int

    @property
    def rows(self) -> int:
        """Number of rows, each of shape[-1] columns."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return bytes_per_row(self.kind, self.shape[-1])

    def read(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Return rows as [rows, bytes] uint8. Raises CheckpointError where they cannot be read."""
        end = self.rows if end is None else end
        data = self.bytes(begin * self.row_bytes, end * self.row_bytes)
        return torch.frombuffer(data, dtype=torch.uint8).view(end - begin, self.row_bytes)

    def bytes(self, begin: int, end: int) -> bytearray:
        """Return bytes of the tensor. Raises CheckpointError where they cannot be read."""
        # Not mapped: torch would want a writable mapping, which counts as memory in use.
        data = bytearray(end - begin)
        try:
            with self.path.open("rb") as file:
                file.seek(self.begin + begin)
                count = file.readinto(data)
        except OSError as error:
            reason = path_fault(error)
            raise CheckpointError(
                f"{self.path} cannot be read: {reason}. Fetch it again."
            ) from None
        if count < len(data):
            raise CheckpointError(f"{self.path} was cut while it was read. Fetch it again.")
        return data


class GGUFFile:
    """Metadata and tensors of one file.

    header_bytes: length of all that precedes the data; size: of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises CheckpointError where it is damaged or cut."""
        self.path = path
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            reason = path_fault(error)
            raise CheckpointError(f"{path} cannot be read: {reason}. Fetch it again.") from None
        with data:
            self._read_header(_Cursor(path, data))

    def _read_header(self, cursor: "_Cursor") -> None:
        self.size = cursor.size
        tensors, entries = cursor.counts()
        self.metadata = cursor.metadata(entries)
        alignment = self._alignment(cursor)
        infos: dict[str, _TensorInfo] = {}
        for info in cursor.tensor_infos(tensors):
            if info.name in infos:
                cursor.fail("tensor", info.name, "each name once")
            infos[info.name] = info
        self.header_bytes = cursor.position
        data = -(-cursor.position // alignment) * alignment
        self.tensors = {n: info.entry(cursor, data, alignment) for n, info in infos.items()}

    def _alignment(self, cursor: "_Cursor") -> int:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        sound = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment % 8 == 0
        if not sound:
            allowed = f"multiples of 8, up to {MAX_ALIGNMENT}"
            cursor.fail("general.alignment", alignment, allowed)
        return alignment


class GGUFModel:
    """Model in one or several files: metadata of the first file, tensors of all."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the headers. Raises CheckpointError where one is damaged or tensors are missing."""
        self.files = [GGUFFile(path) for path in paths]
        self.path = self.files[0].path
        self.metadata = self.files[0].metadata
        self.tensors: dict[str, TensorEntry] = {}
        for file in self.files:
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"{file.path}: tensor {name[:100]!r} is in another of the model's files "
                        "too. Fetch the files again."
                    )
                self.tensors[name] = entry
        announced = self.metadata.get("split.tensors.count", len(self.tensors))
        if announced != len(self.tensors):
            raise choice_error(
                CheckpointError,
                f"{self.path}: split.tensors.count",
                announced,
                f"{len(self.tensors)}, the number of tensors in {len(self.files)} files",
                "Fetch all files of the model again.",
            )


@dataclass(frozen=True)
class _TensorInfo:
    """Entry of the tensor table. number: of its type; offset: from the start of the data."""

    name: str
    shape: tuple[int, ...]
    number: int
    offset: int

    def entry(self, cursor: "_Cursor", data: int, alignment: int) -> TensorEntry:
        """Return the checked entry of a tensor. data: offset of the data section in the file."""
        tensor = f"tensor {self.name[:100]!r}"
        if self.number not in KINDS:
            kind = OTHER_KINDS.get(self.number, f"type {self.number}")
            remedy = "Fetch a file that is quantized to these types, for example Q4_K_M or Q8_0."
            cursor.fail(f"{tensor} type", kind, ", ".join(KINDS.values()), remedy)
        if self.offset % alignment:
            cursor.fail(f"{tensor} offset", self.offset, f"multiples of {alignment}")
        layout = LAYOUTS.get(KINDS[self.number])
        if layout is not None and self.shape[-1] % layout.columns:
            cursor.fail(f"{tensor} columns", self.shape[-1], f"multiples of {layout.columns}")
        entry = TensorEntry(
            self.name, self.shape, KINDS[self.number], cursor.path, data + self.offset
        )
        size = entry.rows * entry.row_bytes
        if entry.begin + size > cursor.size:
            allowed = f"tensors that end within the file's {cursor.size} bytes"
            cursor.fail(f"{tensor} bytes", f"{entry.begin} to {entry.begin + size}", allowed)
        return entry


class _Cursor:
    """Position in the header. Each reading method returns one item and moves the position past it.

    values: elements of all arrays read so far.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0
        self.values = 0

    def fail(
        self, field: str, value: object, allowed: str, remedy: str = "Fetch the file again."
    ) -> NoReturn:
        """Raise the error of a field that is damaged or not supported."""
        raise CheckpointError(
            f"{self.path}: {field}={brief(value)} is not allowed; allowed: {allowed}. {remedy}"
        )

    def take(self, code: str, field: str) -> Any:
        """Read one number."""
        reader = struct.Struct(f"<{code}")
        self.need(reader.size, field)
        (value,) = reader.unpack_from(self.data, self.position)
        self.position += reader.size
        return value

    def need(self, size: int, field: str) -> None:
        """Check that `size` more bytes are in the file."""
        remaining = self.size - self.position
        if size > remaining:
            self.fail(f"length of {field}", size, f"at most the {remaining} bytes that are left")

    def bounded(self, code: str, field: str, limit: int) -> int:
        """Read a count of at most `limit`."""
        value: int = self.take(code, field)
        if value > limit:
            self.fail(field, value, f"0 to {limit}")
        return value

    def text(self, field: str, limit: int = MAX_TEXT) -> str:
        """Read a string of at most `limit` bytes."""
        length = self.bounded("Q", f"length of {field}", limit)
        self.need(length, field)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(field, raw[:32].hex(), "UTF-8")

    def counts(self) -> tuple[int, int]:
        """Read the start of the file: numbers of tensors and of metadata entries."""
        if self.data[:4] != MAGIC:
            self.fail("magic", self.data[:4].hex(), MAGIC.hex(), "Name a GGUF file.")
        self.position = 4
        version = self.take("I", "version")
        if version not in VERSIONS:
            remedy = "Convert the model again, to version 3."
            # A small version number in the other byte order has its low half zero.
            if version and not version & 0xFFFF:
                remedy = "The file is big-endian. Fetch a little-endian one."
            self.fail("version", version, "2, 3", remedy)
        tensors = self.bounded("Q", "number of tensors", MAX_TENSORS)
        return tensors, self.bounded("Q", "number of metadata entries", MAX_ENTRIES)

    def metadata(self, count: int) -> dict[str, Any]:
        """Read the metadata: texts, numbers, and tuples of these."""
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self.text("metadata key", MAX_NAME)
            if key in metadata:
                self.fail("metadata key", key, "each key once")
            kind = self.take("I", key)
            metadata[key] = self._array(key) if kind == ARRAY else self._value(kind, key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.text(key)
        if kind not in SCALARS:
            self.fail(f"type of {key}", kind, ", ".join(map(str, (*SCALARS, STRING, ARRAY))))
        value = self.take(SCALARS[kind], key)
        return shortest(value) if kind == FLOAT32 else value

    def _array(self, key: str) -> tuple[Any, ...]:
        kind = self.take("I", key)
        # One limit for all arrays: each of many could be as long as the limit of one.
        count = self.bounded("Q", f"length of {key}", MAX_VALUES - self.values)
        self.values += count
        if kind == STRING:
            return tuple(self._texts(key, count))
        if kind not in SCALARS:
            self.fail(f"type of {key}'s elements", kind, "numbers and strings")
        reader = struct.Struct(f"<{count}{SCALARS[kind]}")
        self.need(reader.size, key)
        values = reader.unpack_from(self.data, self.position)
        self.position += reader.size
        return values

    def _texts(self, key: str, count: int) -> Iterator[str]:
        self.need(8 * count, key)  # each string has at least its length
        for _ in range(count):
            yield self.text(key)

    def tensor_infos(self, count: int) -> Iterator[_TensorInfo]:
        """Read the table of tensors."""
        for _ in range(count):
            name = self.text("tensor name", MAX_NAME)
            field = f"tensor {name[:100]!r}"
            dimensions = self.take("I", f"{field} dimensions")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                self.fail(f"{field} dimensions", dimensions, f"1 to {MAX_DIMENSIONS}")
            shape = [self.take("Q", f"{field} shape") for _ in range(dimensions)]
            if not all(shape) or prod(shape) > MAX_ELEMENTS:
                self.fail(f"{field} shape", shape, f"1 to {MAX_ELEMENTS} elements")
            number = self.take("I", f"{field} type")
            offset = self.take("Q", f"{field} offset")
            # ggml has the fastest dimension first.
            yield _TensorInfo(name, tuple(reversed(shape)), number, offset)


def shortest(value: float) -> float:
    """Return the float with the fewest digits that rounds to this fp32 number.

    A GGUF file stores 1e-05 of config.json as fp32, which reads as 9.999999747378752e-06.
    """
    stored = struct.pack("<f", value)
    for digits in range(6, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == stored:
            return candidate
    return value
