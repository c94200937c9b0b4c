"""The demo's page: one self-contained HTML file with a plot and a table a plugin."""

import base64
import html
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_STYLE = """
:root { color-scheme: light; --ink: #1c2230; --soft: #5b6475; --line: #d9dde5; --back: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 0; font-family: ui-monospace, monospace; }
p { margin: .4rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px;
          padding: 1.2rem; margin-top: 1.2rem; }
img { width: 100%; height: auto; margin: .8rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.bad { color: #a3121f; white-space: pre-wrap; }
"""


def write_page(
    out: Path, rows: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> Path:
    """Writes ``index.html`` into ``out`` and returns its path."""
    sections = [_section(out / plugin, plugin, row) for plugin, row in rows.items()]
    for plugin, why in failures.items():
        text = html.escape(why)
        sections.append(f'<section><h2>{plugin}</h2><p class="bad">{text}</p></section>')
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = html.escape(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {when}"
    )
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Five plugins, measured</title><style>{_STYLE}</style></head><body><main>"
        "<h1>Five plugins, measured</h1>"
        "<p>Each job ran twice in this run: as a user of the framework has it today, and with the "
        "plugin. Nothing here is quoted from elsewhere.</p>"
        f'<p class="soft">{machine}</p>{"".join(sections)}</main></body></html>\n'
    )
    path = out / "index.html"
    unfinished = out / "index.html.part"
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _section(folder: Path, plugin: str, row: Mapping[str, Any]) -> str:
    image = base64.b64encode((folder / "plot.svg").read_bytes()).decode()
    caption = html.escape(row["caption"])
    lines = "".join(
        f"<tr><td>{html.escape(m['name'])}</td>"
        f'<td class="n">{_number(m["without"])}</td><td class="n">{_number(m["with_plugin"])}</td>'
        f"<td>{html.escape(m['unit'])}</td></tr>"
        for m in row["measures"]
    )
    return (
        f'<section><h2>{plugin}</h2><p class="soft">{html.escape(row["data"])}; '
        f"{row['seconds']:.0f} s</p>"
        f'<img alt="{caption}" src="data:image/svg+xml;base64,{image}"><p>{caption}</p>'
        '<div class="scroll"><table><thead><tr><th>measured</th><th class="n">without</th>'
        f'<th class="n">with</th><th>unit</th></tr></thead><tbody>{lines}</tbody></table></div>'
        "</section>"
    )


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
