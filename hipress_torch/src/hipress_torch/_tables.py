"""Plain text tables."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of texts as aligned columns, the first row underlined."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)
