"""What quantization saved and what it lost, as figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from tqdm import tqdm

from bifeat_pyg._errors import FeatureError
from bifeat_pyg._fit import Errors, ErrorSum, as_float
from bifeat_pyg._rows import RowSource, blocks
from bifeat_pyg._table import PackedTable


@dataclass(frozen=True)
class TableReport:
    """Figures of one packed attribute.

    Attributes:
        group: node type, None in a homogeneous graph.
        attr: name of the attribute.
        rows: number of rows.
        columns: values of a row.
        spec: the quantizer, as text.
        source_bytes: before, in the dtype the features had.
        packed_bytes: codes and parameters.
        error: root of summed squared error over summed squares (0 is exact); None if unknown.
        column_error: the same for each column, float64 [columns]; None if unknown.
        column_rmse: root mean squared error of each column, float64 [columns]; None if unknown.
    """

    group: str | None
    attr: str
    rows: int
    columns: int
    spec: str
    source_bytes: int
    packed_bytes: int
    error: float | None
    column_error: Tensor | None
    column_rmse: Tensor | None

    @property
    def ratio(self) -> float:
        """Source bytes over packed bytes."""
        return self.source_bytes / self.packed_bytes if self.packed_bytes else 1.0


@dataclass(frozen=True)
class Report:
    """Figures of all packed attributes of a store; `str()` gives a table."""

    tables: tuple[TableReport, ...]

    def __iter__(self) -> Iterator[TableReport]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __str__(self) -> str:
        head = ("attribute", "rows", "columns", "from", "to", "ratio", "error", "worst column")
        lines = [head]
        for t in self.tables:
            error = worst = "unknown"
            if t.error is not None and t.column_error is not None:
                error = f"{t.error:.4f}"
                at = int(t.column_error.argmax()) if t.columns else 0
                worst = f"{float(t.column_error[at]):.4f} (column {at})" if t.columns else "none"
            name = t.attr if t.group is None else f"{t.group} {t.attr}"
            lines.append(
                (name, f"{t.rows}", f"{t.columns}", size(t.source_bytes), size(t.packed_bytes),
                 f"{t.ratio:.1f}x", error, worst)
            )  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def measure(table: PackedTable, source: RowSource, progress: bool = False) -> Errors:
    """Returns what a table lost of features, read in blocks.

    Raises:
        FeatureError: they have another shape; NonFiniteError for NaN.
    """
    if source.rows != table.rows or source.tail != table.codec.tail:
        raise FeatureError(
            f"{source.name} has shape {[source.rows, *source.tail]}, but the store holds "
            f"{[table.rows, *table.codec.tail]}: give the features that were packed"
        )
    errors = ErrorSum(table.codec)
    with tqdm(
        total=source.rows, unit="row", unit_scale=True, desc="report",
        disable=None if progress else True,
    ) as bar:  # fmt: skip
        for start, rows in blocks(source):
            x = as_float(rows, start, "error", source.name)
            errors.add(x, table.codes[start : start + len(x)])
            bar.update(len(x))
    return errors.result()


def table_report(
    group: str | None, attr: str, table: PackedTable, errors: Errors | None
) -> TableReport:
    """Returns the figures of one table."""
    return TableReport(
        group=group,
        attr=attr,
        rows=table.rows,
        columns=table.codec.columns,
        spec=str(table.codec.spec),
        source_bytes=table.source_bytes,
        packed_bytes=table.packed_bytes,
        error=None if errors is None else errors.relative,
        column_error=None if errors is None else errors.column_relative,
        column_rmse=None if errors is None else errors.column_rmse,
    )


def size(count: int) -> str:
    """Returns bytes as a short text, e.g. 1.5 MiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
