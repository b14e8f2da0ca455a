"""Tiny models of every layout with random parameters, for the tests of this folder."""

import math

import ml_dtypes
import numpy as np

from jaxmem.models.configs import MODELS, parameter_shapes
from jaxmem.optim.dims import nested
from jaxmem.spec import parse_preset

TINY = {
    "llama": "decoder-tiny,embed=24,mlp=40,vocab=96,rope_scaling=llama3,rope_original_positions=64",
    "gpt2": "decoder-tiny,mlp_kind=plain,activation=gelu_tanh,positions=learned,max_positions=32,norm=layer,tied=true,bias=all,kv_heads=4,"
            "vocab=96",
    "qwen2": "decoder-tiny,embed=24,mlp=40,vocab=96,bias=qkv,head_dim=6,layers=3",
    "qwen3": "decoder-tiny,embed=24,mlp=40,vocab=96,qk_norm=true,tied=true",
    "jaxmem": "decoder-tiny,embed=24,mlp=40,vocab=96,post_norms=both,norm_offset=one,window=8,final_softcap=30",
}


def config_for(layout):
    return parse_preset(MODELS, TINY[layout], what="model")


def random_params(config, dtype="f32", seed=0):
    """Random bits (NaNs and infinities among them), so that equal means every bit equal."""
    rng = np.random.default_rng(seed)
    word, kind = {"f32": (np.uint32, np.float32), "bf16": (np.uint16, ml_dtypes.bfloat16), "f16": (np.uint16, np.float16)}[dtype]
    return nested({path: rng.integers(0, np.iinfo(word).max, math.prod(shape), dtype=word).view(kind).reshape(shape)
                   for path, (shape, _) in parameter_shapes(config).items()})
