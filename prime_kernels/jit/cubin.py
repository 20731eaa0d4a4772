"""A compiled kernel and what it costs: registers, stack, shared and constant memory, read from the ELF image.

Reading the image needs neither a driver nor the CUDA toolkit. The layout of the ``.nv.info`` sections is that
which ``cuobjdump -elf`` prints; a test compares the figures with ``cuobjdump -res-usage``.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from .errors import CubinError

_ELF_MAGIC = b"\x7fELF"
_ELF_CLASS_64 = 2
_EM_CUDA = 190
# Offsets in the 64-bit ELF header.
_CLASS_OFFSET = 4
_MACHINE_OFFSET = 18
_TABLE_OFFSETS_OFFSET = 32
_TABLE_COUNTS_OFFSET = 54
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SHT_SYMTAB = 2
_SHT_NOBITS = 8

# Entries of .nv.info: format, attribute, then either a 16-bit value or the size of the data that follows.
_INFO_ENTRY = struct.Struct("<BBH")
_FORMAT_SIZED = 4
_SYMBOL_VALUE = struct.Struct("<II")
_ATTRIBUTE_FRAME_SIZE = 0x11
_ATTRIBUTE_REGISTERS = 0x2F

# The first bytes of a block's shared memory belong to the system on SM90 and newer. The section of a kernel
# that uses shared memory starts with them; the limit of a launch (227 KiB) does not count them.
RESERVED_SMEM = 1024

_PTXAS_FUNCTION = re.compile(r"Function properties for (\S+)")
# ptxas reports an ignored setmaxnreg and serialised WGMMAs as "info: Potential Performance Loss".
_PTXAS_WARNING_WORDS = ("warning", "ignored", "performance loss")
_PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Resources:
    """What one thread or one block of the kernel takes; sizes in bytes.

    registers: per thread, as allocated at launch (before any ``setmaxnreg``).
    stack_bytes: frame per thread in local memory. Spilled registers live there, so 0 means no spills.
    local_bytes: local memory per thread beside the stack.
    spill_store_bytes, spill_load_bytes: as ptxas reported them when the kernel was compiled.
    static_smem: shared memory per block that the kernel declares; the dynamic part of a launch comes on top.
    constant_bytes: constant bank 0, which holds the kernel's parameters.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem: int
    constant_bytes: int

    @property
    def spills(self) -> bool:
        """True when registers were spilled to local memory."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel.

    data: the ELF image, as cuModuleLoadData and cuLibraryLoadData take it.
    symbol: lowered name of the kernel in the image.
    arch: architecture it was compiled for, for example ``sm_90a``.
    resources: see Resources.
    log: everything the compiler and the assembler printed.
    path: the file in the cache, None when no cache directory could be written.
    origin: "compiled", "cache" or "aot": where this process took it from.
    """

    data: bytes
    symbol: str
    arch: str
    resources: Resources
    log: str
    path: Path | None = None
    origin: str = "compiled"

    def replace(self, *, path: Path | None, origin: str) -> Cubin:
        """The same kernel, found elsewhere."""
        return dataclasses.replace(self, path=path, origin=origin)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the assembler warned of, among it an ignored ``setmaxnreg``."""
        return ptxas_warnings(self.log)


def ptxas_warnings(log: str) -> tuple[str, ...]:
    """Warnings of a ptxas log, and info lines that say something was ignored or serialised (WGMMA)."""
    return tuple(
        line.strip()
        for line in log.splitlines()
        if "ptxas" in line and any(word in line.lower() for word in _PTXAS_WARNING_WORDS)
    )


def ptxas_spills(log: str, symbol: str) -> tuple[int, int]:
    """(store bytes, load bytes) that ``--ptxas-options=--verbose`` reported for ``symbol``."""
    current = None
    for line in log.splitlines():
        function = _PTXAS_FUNCTION.search(line)
        if function is not None:
            current = function.group(1)
        spills = _PTXAS_SPILLS.search(line)
        if spills is not None and current == symbol:
            return int(spills.group(1)), int(spills.group(2))
    raise CubinError(f"the assembler's log has no spill figures for {symbol}")


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _string(image: bytes, start: int) -> str:
    return image[start : image.index(b"\0", start)].decode()


def _sections(image: bytes) -> list[_Section]:
    if len(image) < _SECTION_HEADER.size or not image.startswith(_ELF_MAGIC):
        raise CubinError("not an ELF image")
    (machine,) = struct.unpack_from("<H", image, _MACHINE_OFFSET)
    if image[_CLASS_OFFSET] != _ELF_CLASS_64 or machine != _EM_CUDA:
        raise CubinError(
            f"an ELF image, but not a 64-bit one for CUDA (class {image[_CLASS_OFFSET]}, machine {machine})"
        )
    segments, table = struct.unpack_from("<QQ", image, _TABLE_OFFSETS_OFFSET)
    segment_size, num_segments, entry_size, count, names_index = struct.unpack_from(
        "<HHHHH", image, _TABLE_COUNTS_OFFSET
    )
    headers = [_SECTION_HEADER.unpack_from(image, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    sections = [_Section(_string(image, names + h[0]), h[1], h[4], h[5], h[6]) for h in headers]
    ends = [section.offset + section.size for section in sections if section.kind != _SHT_NOBITS]
    if len(image) < max(segments + num_segments * segment_size, *ends):
        raise CubinError(f"the cubin is cut off at {len(image)} bytes")
    return sections


def _symbol_index(image: bytes, sections: list[_Section], symbol: str) -> int:
    table = next((section for section in sections if section.kind == _SHT_SYMTAB), None)
    if table is None:
        raise CubinError("the cubin has no symbol table")
    names = sections[table.link].offset
    for index in range(table.size // _SYMBOL.size):
        name, *_ = _SYMBOL.unpack_from(image, table.offset + index * _SYMBOL.size)
        if _string(image, names + name) == symbol:
            return index
    raise CubinError(f"the cubin has no kernel {symbol}")


def _info_values(image: bytes, section: _Section, symbol_index: int) -> dict[int, int]:
    """Attributes of .nv.info that are a value per symbol, for one symbol."""
    values = {}
    position, end = section.offset, section.offset + section.size
    while position < end:
        entry_format, attribute, size = _INFO_ENTRY.unpack_from(image, position)
        position += _INFO_ENTRY.size
        if entry_format != _FORMAT_SIZED:
            continue
        if size == _SYMBOL_VALUE.size:
            index, value = _SYMBOL_VALUE.unpack_from(image, position)
            if index == symbol_index:
                values[attribute] = value
        position += size
    return values


def read_resources(image: bytes, symbol: str, log: str) -> Resources:
    """Resources of kernel ``symbol`` in ``image``; the spill figures come from the assembler's ``log``."""
    try:
        sections = _sections(image)
        by_name = {section.name: section for section in sections}
        index = _symbol_index(image, sections, symbol)
        if ".nv.info" not in by_name:
            raise CubinError("the cubin has no .nv.info section")
        values = _info_values(image, by_name[".nv.info"], index)
    except (struct.error, ValueError, IndexError) as error:
        raise CubinError(f"the cubin is cut off or damaged ({error})") from error
    if _ATTRIBUTE_REGISTERS not in values or _ATTRIBUTE_FRAME_SIZE not in values:
        raise CubinError(f"the cubin does not say how many registers {symbol} takes")

    def size_of(prefix: str) -> int:
        section = by_name.get(f"{prefix}.{symbol}")
        return section.size if section is not None else 0

    stores, loads = ptxas_spills(log, symbol)
    return Resources(
        registers=values[_ATTRIBUTE_REGISTERS],
        stack_bytes=values[_ATTRIBUTE_FRAME_SIZE],
        local_bytes=size_of(".nv.local"),
        spill_store_bytes=stores,
        spill_load_bytes=loads,
        static_smem=max(0, size_of(".nv.shared") - RESERVED_SMEM),
        constant_bytes=size_of(".nv.constant0"),
    )
