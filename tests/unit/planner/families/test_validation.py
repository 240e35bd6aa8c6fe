from dataclasses import replace

import pytest

from ckptctl.families import family, list_model_types
from ckptctl.planner.families.validation import iterate_contradictions
from ckptctl.planner.layouts import Drop, Family, Tie


@pytest.mark.parametrize("name", list_model_types())
def test_shipped_families_have_no_flaws(name):
    assert list(iterate_contradictions(family(name))) == []


PHI = family("phi3")


def extended(*rows: str) -> Family:
    table = "\n".join(("logical  axes  hf", *rows))
    return replace(PHI, tables=(*PHI.tables, table))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(PHI, name="phi 3"), "lower-case"),
        (replace(PHI, layouts=(*PHI.layouts, "x")), "`x`, which is not in any table"),
        (replace(PHI, drops=(Drop("meta", "a", "b"),)), "layout `meta`, which does not exist"),
        (replace(PHI, ties=(Tie("outputt", of="embed", stored_in=()),)), "`outputt`"),
        (extended("extra@moe  d  a.weight"), "variant `moe`, which is not declared"),
        (extended("extra  d  a.weight#1"), "are not numbered 0, 1"),
        (extended("one  d  a.weight#0", "two  d v  a.weight#1"), "different dimensions"),
        (extended("extra  f* d  a.weight v d"), "divides `f`"),
    ],
)
def test_flaws_describe_broken_family(broken, said):
    assert any(said in flaw for flaw in iterate_contradictions(broken)), list(
        iterate_contradictions(broken)
    )
