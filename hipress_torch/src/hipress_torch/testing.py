"""Helpers for tests: a conformance suite for codecs, and real processes on this machine."""

from hipress_torch._conformance import CodecReport as CodecReport
from hipress_torch._conformance import check_codec as check_codec
from hipress_torch._rank_pool import RankPool as RankPool
from hipress_torch._rank_pool import run_ranks as run_ranks
