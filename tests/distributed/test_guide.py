"""The guide to context parallelism runs as printed, on the four ranks that it speaks of."""

from __future__ import annotations

import re
from pathlib import Path

from longdelta.testing.ranks import RankPool

from .rank_guide import run_blocks

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "context-parallelism.md"
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_guide_code_runs_as_printed_on_four_ranks(pool: RankPool) -> None:
    blocks = CODE.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(blocks) >= 6
    found = pool.run(4, run_blocks, blocks)
    assert all(each["finite"] and each["moving"] for each in found)
    # Two replicas of two ranks share 2304 rows each.
    assert found[0]["rows"] + found[1]["rows"] == found[2]["rows"] + found[3]["rows"] == 2304
