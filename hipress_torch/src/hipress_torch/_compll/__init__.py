"""CompLL: a compression algorithm written once, as a few lines over :mod:`hipress_torch.ops`.

The functions are traced into a small graph (``_graph``), which the reference evaluates with torch
(``_reference``) and the emitters turn into fused kernels (``_emit_c``, ``_emit_triton``).
"""
