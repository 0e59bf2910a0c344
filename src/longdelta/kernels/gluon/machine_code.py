"""What only the machine code tells: whether a buffer is handed back while it is still being read.

Note [Handing back]: who has read a buffer in shared memory arrives at an mbarrier, and the copy
engine may then write it anew. The arrival is ordered after the loads before it, but a load that
nothing has used yet may still be on its way, since ptxas is free to put the use behind the arrival.
What is stored before the arrival, and comes of the loads, holds it back. Seen here is the order of
the text, so not an arrival at the beginning of a loop, on another path or by another warp after a
barrier of threads.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

from triton import knobs

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(@!?U?P[0-9T]+\s+)?([^;]+?)\s*;")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
_LEAVES = ("BRA", "BRX", "EXIT", "RET")
_STORES = ("ST", "RED", "ATOM", "SYNCS")
_WIDTHS = {"128": 4, "64": 2}
"""Registers of a number in memory, by a suffix of the instruction."""
_PRODUCT = (4, 2, 4)
"""Registers of the operands of a product, HMMA.16816 with sums in fp32."""


class Late(NamedTuple):
    """Loads from shared memory that an arrival finds under way."""

    any: int
    products: int
    """Those of them that a product of registers waits for."""


def late_loads(sass: str) -> Late:
    """Of a kernel's machine code as nvdisasm writes it, in the order in which it stands there.

    >>> load, arrive = "/*0010*/ LDSM.16.M88.4 R4, [R3] ;", "/*0020*/ SYNCS.ARRIVE RZ, [UR1], R0 ;"
    >>> product = "/*0030*/ HMMA.16816.F32.BF16 R20, R4, R22, R16 ;"
    >>> late_loads(load + arrive + product), late_loads(load + product + arrive)
    (Late(any=1, products=1), Late(any=0, products=0))
    """
    under_way: dict[int, int] = {}
    late: set[int] = set()
    products: set[int] = set()
    for place, found in enumerate(_INSTRUCTION.finditer(sass)):
        condition, text = found.groups()
        name, _, rest = text.partition(" ")
        if name.startswith(_LEAVES):
            if condition is None and not re.match(r"!?U?P\d", rest):
                under_way.clear()
            continue
        target, _, sources = rest.partition(",")
        # What happens on a condition may not: it proves nothing.
        read = set() if condition else _read(name, target, sources)
        for load in {under_way[r] for r in read if r in under_way}:
            if name.startswith("HMMA") and load in late:
                products.add(load)
            under_way = {r: at for r, at in under_way.items() if at != load}
        if name.startswith("LDS"):
            into = [int(r) for r, _ in _REGISTER.findall(target)]
            for first in into:
                under_way |= dict.fromkeys(range(first, first + _width(name)), place)
        elif name.startswith("SYNCS.ARRIVE"):
            late |= set(under_way.values())
    return Late(len(late), len(products))


def _width(name: str) -> int:
    """Registers that a load fills, or a store empties."""
    last = name.rsplit(".", 1)[-1]
    return int(last) if name.startswith("LDSM") and last in "124" else _WIDTHS.get(last, 1)


def _read(name: str, target: str, sources: str) -> set[int]:
    """Registers that an instruction reads."""
    operands = sources.split(",")
    widths = [1] * len(operands)
    if name.startswith("HMMA"):
        widths = [*_PRODUCT, *widths][: len(operands)]
    elif name.startswith("HGMMA"):
        widths[0] = 4
    elif name.startswith(_STORES):
        widths[-1] = _width(name)
        operands, widths = [target, *operands], [1, *widths]
    read = set()
    for operand, width in zip(operands, widths, strict=True):
        for register, pair in _REGISTER.findall(operand):
            read |= {int(register) + n for n in range(2 if pair else width)}
    return read


def disassembled(cubin: bytes) -> str:
    """The machine code of a compiled kernel, by the nvdisasm that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
