"""BiFeat as published: the quantizers and settings of its authors' code, for comparison.

Source: github.com/BiFeat/BiFeat (README and compresser.py). The formulas stand in
`bifeat_pyg.quantizers.log`. That code also reserves one codebook entry for near-zero groups when
the matrix fits in memory, and grows its k-means tolerance as it iterates; neither is done here, and
neither changes how codes decode.

The defaults of this package, `SQ(4)` and `VQ()`, are not these: they fit each column by least
squares.
"""

from bifeat_pyg.quantizers.scalar import SQ
from bifeat_pyg.quantizers.vector import VQ

__all__ = ["MAG240M", "MAG240M_FINE", "MAG240M_NARROW", "PAPERS100M", "REDDIT", "sq", "vq"]


def sq(bits: int) -> SQ:
    """Returns the published scalar quantizer: logarithmic scale, or for 1 bit the sign rule.

    Args:
        bits: 1, 2, 4, 8 or 16.
    """
    return SQ(bits, scale="log", sample_rows=100_000)


def vq(width: int, length: int) -> VQ:
    """Returns the published vector quantizer: cosine k-means on 50,000 rows.

    Args:
        width: columns of a group.
        length: entries of its codebook.
    """
    return VQ(width, length, metric="cosine", sample_rows=50_000)


MAG240M = vq(16, 2048)
MAG240M_FINE = vq(16, 8192)
MAG240M_NARROW = vq(12, 1024)
REDDIT = vq(64, 2048)
PAPERS100M = sq(1)
