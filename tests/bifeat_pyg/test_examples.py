"""The examples do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "bifeat_pyg" / "examples"


def test_the_loss_gap_shrinks_with_the_bits():
    # BiFeat's statement as a figure: on a loss with one optimum, what is lost vanishes with the
    # error.
    found = list(runpy.run_path(str(EXAMPLES / "loss_gap.py"))["gaps"]())
    gaps = {name: gap for name, _, gap in found}
    by_bits = [gaps[f"{bits} bit"] for bits in (1, 2, 4, 8, 16)]
    assert all(gap > -1e-12 for gap in by_bits)
    for wider, narrower in zip(by_bits[1:], by_bits, strict=False):
        assert wider < narrower / 5
    assert by_bits[2] < 1e-3
