"""The picture of a report that the README shows, from a search on measured runs.

    python3 -m ci bench mlcd_bo/report

Searches a table of measured runs for the cheapest deployment by a deadline, writes the whole
report to --folder (a temporary one by default) and its two pictures, one above the other, to --out.
"""

import argparse
import io
import os
import tempfile
from pathlib import Path

import mlcd_bo as mlcd

DATA = Path(os.environ.get("MLCD_TRACES", "../shared/data/deployments"))
OUT = Path(__file__).parents[1] / "docs" / "report.png"


def search_of(file: Path, job: str, hours: float, deadline: float) -> mlcd.DeploymentOptimizer:
    """Returns the finished search of one job of the table."""
    profiler = mlcd.TraceProfiler(
        file,
        job,
        trial_cost=mlcd.TrialCost(startup_s=0.0, per_machine_s=20.0, probe_s=120.0),
        noise=0.067,
        catalog=mlcd.Catalog.aws(),
    )
    search = mlcd.DeploymentOptimizer(
        profiler.space, mlcd.Scenario.cheapest_by(deadline * hours), profiler.job_of(hours)
    )
    print(search.run(profiler))
    return search


def stacked(folder: Path) -> bytes:
    """Returns the two pictures of a report as one PNG of few colours."""
    from PIL import Image

    pictures = [Image.open(folder / name) for name in ("curves.png", "ledger.png")]
    width = max(picture.width for picture in pictures)
    whole = Image.new("RGB", (width, sum(picture.height for picture in pictures)), "white")
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    buffer = io.BytesIO()
    whole.quantize(128).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def main() -> None:
    """Writes the report and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=DATA / "scout.csv")
    parser.add_argument("--job", default="pagerank_huge_spark")
    parser.add_argument("--hours", type=float, default=3.0, help="hours of the fastest run")
    parser.add_argument("--deadline", type=float, default=3.0, help="times the fastest run")
    parser.add_argument("--folder", type=Path, help="keep the whole report there")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if not args.trace.is_file():
        raise SystemExit(f"no table {str(args.trace)!r}; give one by --trace or MLCD_TRACES")
    search = search_of(args.trace, args.job, args.hours, args.deadline)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        page = search.report(folder)
        picture = stacked(folder)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        part = args.out.with_suffix(".part")
        part.write_bytes(picture)
        os.replace(part, args.out)
        print(
            f"{args.out}: {len(picture) / 1000:.0f} kB; the page: "
            f"{page.stat().st_size / 1000:.0f} kB"
        )


if __name__ == "__main__":
    main()
