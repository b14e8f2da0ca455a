"""Weights as safetensors folders: in Hugging Face layouts, and under jaxmem's own names."""

from jaxmem.checkpoint.formats.reading import config_of, read, read_into
from jaxmem.checkpoint.formats.writing import Later, write

__all__ = ["Later", "config_of", "read", "read_into", "write"]
