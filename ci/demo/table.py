"""The demo's table on the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def write_markdown(path: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the same table in the form that the README quotes."""
    lines = ["| plugin | data | without it | with it | job |", "|---|---|---|---|---|"]
    for plugin, row in rows.items():
        cells = (f"`{plugin}`", row["data"], row["without"], row["with_plugin"])
        lines.append(f"| {' | '.join(cells)} | {row['seconds']:.0f} s |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def print_table(rows: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> None:
    """Prints a row a plugin: data, figures without it, figures with it, seconds."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 132
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("plugin", no_wrap=True)
    table.add_column("data", ratio=3)
    table.add_column("without it", ratio=4)
    table.add_column("with it", ratio=4)
    table.add_column("job", justify="right", no_wrap=True)
    for plugin, row in rows.items():
        seconds = f"{row['seconds']:.0f} s"
        # Text, because a job's words may hold brackets, which rich would read as markup.
        words = [Text(row[key]) for key in ("data", "without", "with_plugin")]
        table.add_row(plugin, *words, seconds)
    for plugin, why in failures.items():
        table.add_row(plugin, "", "", Text(f"FAILED: {why}"), "")
    console.print(table)
