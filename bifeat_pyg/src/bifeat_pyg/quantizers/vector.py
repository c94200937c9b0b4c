"""VQ: one code for a group of neighbouring columns, an entry of a codebook fitted by k-means."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bifeat_pyg import _dispatch
from bifeat_pyg._errors import FeatureError, SpecError
from bifeat_pyg.kernels import reference
from bifeat_pyg.quantizers._base import Codec, Spec, Summary, require
from bifeat_pyg.quantizers._kmeans import assign, kmeans
from bifeat_pyg.quantizers.scalar import check_seed, positive

_LONGEST = 1 << 24


@dataclass(frozen=True)
class VQ(Spec):
    """Vector quantization: each group of `width` columns becomes one code.

    A code takes one byte for up to 256 entries, two up to 65536, three beyond: `VQ(8, 256)` stores
    eight float32 columns in one byte, 32 times less.

    With several stages a group has as many codes: the second codebook is fitted to what the first
    one leaves, and so on, and a row is their sum (residual quantization). `VQ(32, 256, stages=4)`
    has the size of `VQ(8, 256)`, also 32 times less, and a smaller error, for codebooks `stages`
    times as large and encoding `stages` times as long.

    Args:
        width: columns of a group; the last group may be narrower.
        length: entries of each group's codebook, at least 2. With fewer sampled rows than that the
            codebook shrinks to them, with a warning.
        metric: "l2", or "cosine" as in BiFeat: rows choose the entry of nearest direction.
        stages: codes of a group; more than one only with "l2".
        sample_rows: rows the codebooks are fitted to at most.
        seed: of the sample and of k-means.

    Raises:
        SpecError: an argument is not allowed.
    """

    width: int = 8
    length: int = 256
    metric: Literal["l2", "cosine"] = "l2"
    sample_rows: int = 65536
    seed: int = 0
    stages: int = 1

    name: ClassVar[str] = "vq"

    def __post_init__(self) -> None:
        positive("width", self.width)
        positive("stages", self.stages)
        positive("sample_rows", self.sample_rows)
        check_seed(self.seed)
        if not isinstance(self.length, int) or not 2 <= self.length <= _LONGEST:
            raise SpecError(f"length is {self.length!r}; it must be from 2 to {_LONGEST}")
        if self.metric not in ("l2", "cosine"):
            raise SpecError(f"metric is {self.metric!r}; allowed are 'l2', 'cosine'")
        if self.stages > 1 and self.metric != "l2":
            raise SpecError(
                f"stages is {self.stages} with metric 'cosine'; what a direction leaves is no "
                "smaller, so further stages need metric='l2'"
            )

    def fit(self, sample: Tensor, summary: Summary) -> Codec:
        """See `Spec.fit`."""
        if summary.integral:
            raise FeatureError(
                "VQ does not keep integers exact; use SQ, which does, or convert the features to "
                "float to accept the error"
            )
        self._check_range(summary)
        spec = self
        if 0 < sample.shape[0] < self.length:
            spec = replace(self, length=max(2, sample.shape[0]))
            warnings.warn(
                f"only {sample.shape[0]} rows to fit codebooks of {self.length} entries; using "
                f"{spec.length}",
                stacklevel=2,
            )
        parts = -(-summary.columns // self.width)
        padded = torch.nn.functional.pad(sample, (0, parts * self.width - summary.columns))
        if padded.shape[0] == 1:
            padded = padded.expand(2, -1)
        books = [
            book
            for part in range(parts)
            for book in spec._books(padded[:, part * self.width : (part + 1) * self.width], part)
        ]
        book = torch.stack(books) if books else sample.new_zeros((0, spec.length, self.width))
        return VectorCodec(spec, summary.columns, {"codebook": book})

    def _books(self, rows_NW: Tensor, part: int) -> Iterator[Tensor]:
        """Yields the codebook of each stage of one group, float32 [L, W]."""
        for stage in range(self.stages):
            if not rows_NW.shape[0]:
                yield rows_NW.new_zeros((self.length, self.width))
                continue
            seed = self.seed + part * self.stages + stage
            book_LW = kmeans(rows_NW, self.length, self.metric, seed)
            yield book_LW
            if stage + 1 < self.stages:
                code_N, _ = assign(rows_NW, book_LW, self.metric)
                rows_NW = rows_NW - book_LW[code_N]

    def _check_range(self, summary: Summary) -> None:
        """Refuses values whose squared distances overflow: every choice of an entry would be void.

        A distance has at most four times the greatest squared norm.
        """
        most = torch.maximum(summary.minimum.abs(), summary.maximum.abs()).square()
        for at in range(0, summary.columns, self.width):
            if float(most[at : at + self.width].sum()) * 4 > torch.finfo(torch.float32).max:
                column = at + int(most[at : at + self.width].argmax())
                raise FeatureError(
                    f"column {column} holds values up to {float(most[column].sqrt()):.3g}, whose "
                    "squared distances float32 cannot hold. Scale or clip the features, or use SQ"
                )

    def restore(self, columns: int, params: Mapping[str, Tensor]) -> Codec:
        """See `Spec.restore`."""
        shape = (-(-columns // self.width) * self.stages, self.length, self.width)
        return VectorCodec(self, columns, {"codebook": require(params, "codebook", shape)})


class VectorCodec(Codec):
    """Codes into one codebook for each group of columns and stage."""

    spec: VQ

    @property
    def code_bytes(self) -> int:
        """Bytes of one code."""
        return 1 if self.spec.length <= 1 << 8 else 2 if self.spec.length <= 1 << 16 else 3

    @property
    def books(self) -> int:
        """Number of codebooks, and of the codes of a row."""
        return int(self.params["codebook"].shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        return self.books * self.code_bytes

    def encode(self, x: Tensor) -> Tensor:
        """See `Codec.encode`."""
        book_SLW = self.params["codebook"].to(x.device)
        width, stages = self.spec.width, self.spec.stages
        padded = torch.nn.functional.pad(x, (0, self.books // stages * width - self.columns))
        packed = torch.empty((x.shape[0], self.row_bytes), dtype=torch.uint8, device=x.device)
        for number in range(self.books):
            part, stage = divmod(number, stages)
            if stage == 0:
                rows = padded[:, part * width : (part + 1) * width]
            code, _ = assign(rows, book_SLW[number], self.spec.metric)
            for byte in range(self.code_bytes):
                packed[:, number * self.code_bytes + byte] = (code >> (8 * byte) & 0xFF).to(
                    torch.uint8
                )
            if stage + 1 < stages:
                rows = rows - book_SLW[number][code]
        return packed

    def codes(self, packed: Tensor) -> Tensor:
        """Returns the codes of packed rows, int64 [M, books]."""
        return reference.vector_codes(packed, self.code_bytes, self.books)

    def _decode(
        self,
        packed: Tensor,
        index: Tensor | None,
        params: Mapping[str, Tensor],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return _dispatch.vector(
            packed, index, params["codebook"], self.spec.stages, self.code_bytes, self.columns,
            dtype, out,
        )  # fmt: skip
