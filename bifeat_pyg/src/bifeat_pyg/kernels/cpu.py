"""The C kernels, through ctypes; absent where no compiler was at hand when the package was built.

`available()` says whether they are there; everything else works without them, through
`kernels.reference` and numpy. Set BIFEAT_NATIVE=0 to do without them on purpose.

Callers pass contiguous CPU tensors and checked row indices: `bifeat_pyg._dispatch` sees to both.
"""

import ctypes
import functools
import os
import sys
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bifeat_pyg.kernels._threads import share

_ABI = 3  # of native/common.h
_SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
LIBRARY = Path(__file__).with_name(f"_bifeat{_SUFFIX}")

# name -> (result, arguments); pointers are passed as integers
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "bf_abi": (c_int32, []),
    "bf_check": (c_int64, [c_void_p, c_int64, c_int64]),
    "bf_gather": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "bf_affine": (
        None,
        [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p],
    ),
    "bf_lut": (
        None,
        [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p],
    ),
    "bf_vector": (
        c_int64,
        [
            c_void_p,
            c_int64,
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            *[c_int64] * 4,
            c_void_p,
            c_void_p,
        ],
    ),
    "bf_affine_encode": (
        None,
        [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p, c_int64],
    ),
    "bf_errors": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "bf_assign": (
        None,
        [c_void_p, *[c_int64] * 4, *[c_void_p] * 4],
    ),
    "bf_table_new": (c_void_p, [c_int64, c_int32]),
    "bf_table_free": (None, [c_void_p]),
    "bf_table_count": (c_int64, [c_void_p]),
    "bf_table_read": (None, [c_void_p, c_int64, c_void_p, c_void_p]),
    "bf_table_seed": (c_int64, [c_void_p, c_void_p, c_void_p, c_int64]),
    "bf_hop_room": (c_int64, [c_void_p, c_void_p, c_int64, c_int64]),
    "bf_hop": (
        c_int64,
        [*[c_void_p] * 5, *[c_int64] * 3, c_int32, c_int32, c_uint64, *[c_void_p] * 5],
    ),
    "bf_csc": (
        c_int64,
        [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p],
    ),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the loaded library, or None where it was not built or cannot be loaded."""
    if os.environ.get("BIFEAT_NATIVE", "1") == "0" or not LIBRARY.is_file():
        return None
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        # Built for another machine, or left over from another version of the package.
        return None
    return loaded if loaded.bf_abi() == _ABI else None


def available() -> bool:
    """Returns whether the C kernels can be called."""
    return library() is not None


def _library() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "callers ask available() first"
    return loaded


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def first_bad(index_M: Tensor, rows: int) -> int:
    """Returns the first position whose index is outside [0, rows), or -1."""
    return int(_library().bf_check(_at(index_M), index_M.numel(), rows))


def _part(
    codes_NB: Tensor, index_M: Tensor | None, start: int, stop: int
) -> tuple[int | None, int, int | None, int]:
    """Returns table, stride, index and count of the chosen rows start to stop, as C takes them."""
    if index_M is None:
        codes_NB = codes_NB[start:stop]
        return _at(codes_NB), codes_NB.stride(0), None, stop - start
    return _at(codes_NB), codes_NB.stride(0), _at(index_M[start:stop]), stop - start


def gather(codes_NB: Tensor, bytes_: int, index_M: Tensor, out_MB: Tensor) -> None:
    """Copies the first `bytes_` of each chosen row into `out_MB`, uint8 [M, bytes_]."""
    call = _library().bf_gather

    def work(start: int, stop: int) -> None:
        table, stride, index, count = _part(codes_NB, index_M, start, stop)
        call(table, stride, bytes_, index, count, _at(out_MB[start:stop]))

    share(work, index_M.numel(), bytes_)


def affine(
    codes_NB: Tensor, index_M: Tensor | None, low_D: Tensor, step_D: Tensor, bits: int, out: Tensor
) -> None:
    """Writes `code * step + low` of the chosen rows (all, without an index) into float32 `out`."""
    call, columns = _library().bf_affine, out.shape[1]

    def work(start: int, stop: int) -> None:
        rows = _part(codes_NB, index_M, start, stop)
        call(*rows, columns, bits, _at(low_D), _at(step_D), _at(out[start:stop]))

    share(work, out.shape[0], 4 * columns)


def add_errors(x_ND: Tensor, y_ND: Tensor, squared_D: Tensor, power_D: Tensor) -> None:
    """Adds the squares of y - x and of x to float64 sums by column; rows are float32."""
    _library().bf_errors(
        _at(x_ND), _at(y_ND), x_ND.shape[0], x_ND.shape[1], _at(squared_D), _at(power_D)
    )


def lut(
    codes_NB: Tensor, index_M: Tensor | None, values_L: Tensor, bits: int, out_MD: Tensor
) -> None:
    """Writes `values[code]` of the chosen rows into float32 `out_MD`."""
    call, columns = _library().bf_lut, out_MD.shape[1]

    def work(start: int, stop: int) -> None:
        rows = _part(codes_NB, index_M, start, stop)
        call(*rows, columns, bits, _at(values_L), _at(out_MD[start:stop]))

    share(work, out_MD.shape[0], 4 * columns)


def vector(
    codes_NB: Tensor,
    index_M: Tensor | None,
    codebook_SLW: Tensor,
    stages: int,
    code_bytes: int,
    out_MD: Tensor,
) -> int:
    """Writes the sums of the chosen rows' codebook entries into float32 `out_MD`.

    Returns the first row that holds a code outside the codebook, or -1.
    """
    books, length, width = codebook_SLW.shape
    call, columns = _library().bf_vector, out_MD.shape[1]

    def work(start: int, stop: int) -> int:
        bad = call(
            *_part(codes_NB, index_M, start, stop), columns, code_bytes, books // stages, stages,
            length, width, _at(codebook_SLW), _at(out_MD[start:stop]),
        )  # fmt: skip
        return -1 if bad < 0 else start + int(bad)

    found = share(work, out_MD.shape[0], 4 * columns * stages)
    return next((bad for bad in found if bad >= 0), -1)


def affine_encode(x_ND: Tensor, low_D: Tensor, inverse_D: Tensor, bits: int, out: Tensor) -> None:
    """Quantizes and packs float32 rows into uint8 `out` [N, B]."""
    _library().bf_affine_encode(
        _at(x_ND), x_ND.shape[0], x_ND.shape[1], bits, _at(low_D), _at(inverse_D),
        _at(out), out.stride(0),
    )  # fmt: skip


def assign(x_NW: Tensor, book_LW: Tensor, offset_L: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each row the centroid of least `offset - x . centroid`, and that least.

    Args:
        x_NW: float32; rows may be any distance apart.
        book_LW: float32 centroids.
        offset_L: float32, half the squared norms for Euclidean distance.

    Returns:
        int64 [N] and float32 [N].
    """
    length, width = book_LW.shape
    padded = -(-length // 16) * 16
    book = torch.zeros((width, padded), dtype=torch.float32)
    book[:, :length] = book_LW.t()
    offset = torch.full((padded,), torch.inf)
    offset[:length] = offset_L
    rows = x_NW.shape[0]
    code, least = torch.empty(rows, dtype=torch.long), torch.empty(rows)
    call = _library().bf_assign

    def work(start: int, stop: int) -> None:
        call(
            _at(x_NW[start:stop]), x_NW.stride(0), stop - start, width, padded, _at(book),
            _at(offset), _at(code[start:stop]), _at(least[start:stop]),
        )  # fmt: skip

    # A product takes about as long as four bytes take to be written.
    share(work, rows, width * padded // 4)
    return code, least


def compressed_columns(
    edge_index: Tensor, sources: int, targets: int
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Returns (first bad edge or -1, colptr [targets + 1], row [E], edge_id [E]), all int64."""
    source, target = edge_index[0].contiguous(), edge_index[1].contiguous()
    edges = source.numel()
    colptr = torch.empty(targets + 1, dtype=torch.long)
    row = torch.empty(edges, dtype=torch.long)
    edge_id = torch.empty(edges, dtype=torch.long)
    bad = _library().bf_csc(
        _at(source), _at(target), edges, sources, targets, _at(colptr), _at(row), _at(edge_id)
    )
    return int(bad), colptr, row, edge_id


class NodeTable:
    """Numbers nodes in order of first appearance; in disjoint use, nodes together with a seed."""

    def __init__(self, room: int, disjoint: bool) -> None:
        self._free = _library().bf_table_free
        self._handle = _library().bf_table_new(room, int(disjoint))
        self._disjoint = disjoint
        if not self._handle:
            raise MemoryError("no memory to number sampled nodes")

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._free(self._handle)
            self._handle = None

    def __len__(self) -> int:
        return int(_library().bf_table_count(self._handle))

    def seed(self, node: Tensor, batch: Tensor | None) -> None:
        """Numbers the seeds in their order; one that comes twice is found by its first number."""
        if _library().bf_table_seed(self._handle, _at(node), _at(batch), node.numel()):
            raise MemoryError("no memory to number sampled nodes")

    def read(self, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Returns the nodes numbered `start` and up, and their seeds in disjoint use."""
        count = len(self) - start
        node = torch.empty(count, dtype=torch.long)
        batch = torch.empty(count, dtype=torch.long) if self._disjoint else None
        _library().bf_table_read(self._handle, start, _at(node), _at(batch))
        return node, batch

    def hop(
        self,
        colptr: Tensor,
        row: Tensor,
        frontier: Tensor,
        batch: Tensor | None,
        first: int,
        k: int,
        *,
        replace: bool,
        last: bool,
        key: int,
        time: Tensor | None,
        bound: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws up to k in-neighbours of each frontier node, numbering them in this table.

        Returns local source, local destination and position in `row`, int64. The reference is
        `bifeat_pyg._sampling.hop`, which gives the same edges.
        """
        call = _library()
        room = int(call.bf_hop_room(_at(colptr), _at(frontier), frontier.numel(), k))
        out_row, out_col, out_edge = (torch.empty(room, dtype=torch.long) for _ in range(3))
        made = call.bf_hop(
            self._handle, _at(colptr), _at(row), _at(frontier), _at(batch), first,
            frontier.numel(), k, int(replace), int(last), key, _at(time), _at(bound),
            _at(out_row), _at(out_col), _at(out_edge),
        )  # fmt: skip
        if made < 0:
            raise MemoryError("no memory to number sampled nodes")
        return out_row[:made], out_col[:made], out_edge[:made]
