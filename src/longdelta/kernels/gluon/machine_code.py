"""What only the machine code tells: whether a buffer is handed back while it is still being read.

Note [Handing back]: who has read a buffer in shared memory arrives at an mbarrier, and the copy
engine may then write it anew. The arrival is ordered after the loads before it, but a load that
nothing has used yet may still be on its way, since ptxas is free to put the use behind the arrival.
What is stored before the arrival, and comes of the loads, holds it back.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import NamedTuple

from triton import knobs

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P[0-9T]\s+)?([^;]+?)\s*;")
_REGISTER = re.compile(r"\bR(\d+)\b")
_LEAVES = ("BRA", "BRX", "EXIT", "RET")
_WIDTHS = {"128": 4, "64": 2}
"""Registers of an operand, by a suffix of the instruction."""


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
        name, _, rest = found.group(1).partition(" ")
        if name in _LEAVES and "@" not in found.group(0):
            under_way.clear()
            continue
        target, _, sources = rest.partition(",")
        load = name.startswith("LDS")
        for load_at in {under_way[r] for r in _read(name, target, sources) if r in under_way}:
            if name.startswith("HMMA") and load_at in late:
                products.add(load_at)
            under_way = {r: at for r, at in under_way.items() if at != load_at}
        if load:
            (first,) = map(int, _REGISTER.findall(target))
            under_way |= dict.fromkeys(range(first, first + _width(name)), place)
        elif name.startswith("SYNCS.ARRIVE"):
            late |= set(under_way.values())
    return Late(len(late), len(products))


def _width(name: str) -> int:
    """Registers that a load fills."""
    last = name.rsplit(".", 1)[-1]
    return int(last) if name.startswith("LDSM") and last in "124" else _WIDTHS.get(last, 1)


def _read(name: str, target: str, sources: str) -> set[int]:
    """Registers that an instruction reads, a few more where it is wide."""
    stores = name.startswith(("ST", "RED", "ATOM", "SYNCS"))
    registers = {int(r) for r in _REGISTER.findall(target + "," + sources if stores else sources)}
    wide = max([_WIDTHS.get(suffix, 1) for suffix in name.split(".")[1:]], default=1)
    width = 4 if name.startswith(("HMMA", "HGMMA")) else wide
    return {r + n for r in registers for n in range(width)}


def disassembled(cubin: bytes) -> str:
    """The machine code of a compiled kernel, by the nvdisasm that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
