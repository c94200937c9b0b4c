"""The C kernels: their support header, the source generated for the built-in codecs, the loader."""
