"""Which arms there are, and what one hears of those that are not here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from longdelta.bench.baselines import CHECKED, all_arms, chosen_arms
from longdelta.errors import InvalidInput

PEERS = ("fla", "flash_qla", "attn_gym")


def test_every_arm_of_the_issue_exists() -> None:
    assert {
        "ours",
        "ours_fast",
        "fla",
        "flash_qla",
        "attn_gym",
        "fla_kcp",
        "flash_qla_cp",
        "flash_qla_one_gpu",
        "fla_heads",
        "flash_qla_heads",
    } <= set(all_arms())


def test_unknown_arm_is_told_what_exists() -> None:
    with pytest.raises(InvalidInput, match=r"'flaa' does not exist; there are ours \(any ranks\)"):
        chosen_arms(["flaa"], 1)


def test_arm_of_many_ranks_is_refused_on_one() -> None:
    with pytest.raises(InvalidInput, match="fla_kcp runs on several ranks; here are 1"):
        chosen_arms(["ours", "fla_kcp"], 1)


def test_default_arms_fit_the_number_of_ranks() -> None:
    one, two = ({a.name for a in chosen_arms([], ranks)} for ranks in (1, 2))
    assert one == {"ours", "ours_fast", "fla", "flash_qla", "attn_gym"}
    assert {"ours", "fla_kcp", "flash_qla_cp", "flash_qla_heads", "flash_qla_one_gpu"} <= two
    assert not two & {"fla", "flash_qla"}


def test_listing_the_arms_imports_no_peer() -> None:
    before = set(sys.modules)
    all_arms()
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_missing_peer_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    peer = all_arms()[name]
    assert peer.missing().startswith(f"not installed: pip install {peer.distribution}")
    assert all_arms()["ours"].missing() == ""


def test_documentation_installs_the_releases_that_missing_peers_are_named_with() -> None:
    page = Path(__file__).parents[2] / "docs/design/benchmark.md"
    named = " ".join(f"{name}=={release}" for name, release in CHECKED.items())
    assert f"pip install {named}" in page.read_text(encoding="utf-8")
