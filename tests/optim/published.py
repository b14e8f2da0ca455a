"""The learned rules in float64 NumPy, written from their descriptions: every feature an array of the tensor's shape, one concatenation."""

import numpy as np

TIMESCALES = (1, 3, 10, 30, 100, 300, 1e3, 3e3, 1e4, 3e4, 1e5)


def rsqrt(x):
    return 1 / np.sqrt(x)


class Tensor:
    """The accumulators of one tensor, and its features after each gradient."""

    def __init__(self, shape, momentum_decays, second_decay, factored_decays, floor, momentum_floor):
        self.shape = shape or (1,)
        self.dm, self.dv, self.df = momentum_decays, second_decay, factored_decays
        self.floor, self.momentum_floor = floor, momentum_floor
        self.m = np.zeros((*self.shape, 3))
        self.v = np.zeros(self.shape)
        if len(self.shape) >= 2:
            self.d1, self.d0 = (int(i) for i in np.argsort(self.shape, kind="stable")[-2:])
            self.r = np.zeros((*np.delete(self.shape, self.d0), 3))
            self.c = np.zeros((*np.delete(self.shape, self.d1), 3))
        else:
            self.full = np.zeros((*self.shape, 3))

    def take(self, g):
        g = self.g = np.asarray(g, np.float64).reshape(self.shape)
        self.m = self.dm * self.m + (1 - self.dm) * g[..., None]
        self.v = self.dv * self.v + (1 - self.dv) * g**2
        square = (g**2 + 1e-30)[..., None]
        if len(self.shape) >= 2:
            self.r = self.df * self.r + (1 - self.df) * square.mean(self.d0)
            self.c = self.df * self.c + (1 - self.df) * square.mean(self.d1)
            where = self.d1 - 1 if self.d1 > self.d0 else self.d1
            row = rsqrt(np.maximum(self.r / (self.r.mean(where, keepdims=True) + self.floor), self.floor))
            col = rsqrt(np.maximum(self.c, self.floor))
            self.factor = np.expand_dims(row, self.d0) * np.expand_dims(col, self.d1)
            self.momentum_factor = self.factor
            one = np.ones((*self.shape, 1))
            self.rows, self.cols = np.expand_dims(self.r, self.d0) * one, np.expand_dims(self.c, self.d1) * one
        else:
            self.full = self.df * self.full + (1 - self.df) * square
            self.factor = rsqrt(np.maximum(self.full + self.floor, self.floor))
            self.momentum_factor = rsqrt(self.full + self.momentum_floor)
            self.rows = self.cols = self.full

    def small_fc_features(self, p):
        """[..., 28], normalised."""
        p = np.asarray(p, np.float64).reshape(self.shape)
        root = rsqrt(self.v + 1e-6)
        inputs = [self.g, p, self.m, self.v, self.m * root[..., None], root, self.g[..., None] * self.factor, self.rows, self.cols,
                  rsqrt(self.rows + 1e-8), rsqrt(self.cols + 1e-8), self.m * self.momentum_factor]
        x = np.concatenate([a if a.ndim > len(self.shape) else a[..., None] for a in inputs], -1)
        assert x.shape[-1] == 28
        return x * rsqrt(1e-5 + (x**2).mean(tuple(range(len(self.shape))), keepdims=True))

    def celo_features(self, p):
        """[..., 30], normalised."""
        p = np.asarray(p, np.float64).reshape(self.shape)
        root, bound = rsqrt(self.v), 0.1 * np.sqrt((self.g**2).mean())
        inputs = [self.g, np.clip(self.g, -bound, bound), p, self.m, self.v, self.m * root[..., None], root,
                  self.g[..., None] * self.factor, self.g * root, self.rows, self.cols, rsqrt(self.rows),
                  rsqrt(self.cols), self.m * self.momentum_factor]
        x = np.concatenate([a if a.ndim > len(self.shape) else a[..., None] for a in inputs], -1)
        assert x.shape[-1] == 30
        return x * rsqrt((x**2).mean(tuple(range(len(self.shape))), keepdims=True))


def network(x, w):
    for i in range(3):
        x = x @ np.asarray(w[f"w{i}"], np.float64) + np.asarray(w[f"b{i}"], np.float64)
        x = np.maximum(x, 0) if i < 2 else x
    return x


def decay(initial, offset):
    """In the variable x = log(1 - decay) / 10."""
    return 1 - np.exp(10 * (np.log(1 - np.asarray(initial)) / 10 + np.asarray(offset, np.float64)))


def small_fc_tensor(shape, w):
    return Tensor(shape, decay((0.9, 0.99, 0.999), w["momentum_decays"]), float(np.clip(decay([0.999], w["rms_decays"])[0], 0, 1)),
                  np.clip(decay((0.9, 0.99, 0.999), w["adafactor_decays"]), 0, 1), 1e-9, 1e-6)


def small_fc_inputs(tensor, p, t):
    """[..., 39]: normalised features, then the step embedding."""
    x = tensor.small_fc_features(p)
    return np.concatenate([x, np.tile(np.tanh(t / np.asarray(TIMESCALES) - 1), (*tensor.shape, 1))], -1)


def small_fc_step(tensor, p, t, w):
    out = network(small_fc_inputs(tensor, p, t), w)
    return out[..., 0] * np.exp(0.001 * out[..., 1]) * 0.001, out


def celo_tensor(shape):
    fixed = np.array([0.9, 0.99, 0.999])
    return Tensor(shape, fixed, 0.95, fixed, 0.0, 0.0)


def celo_step(tensor, p, t, w):
    adam = tensor.m[..., 0] / (1 - 0.9**(t + 1)) / np.sqrt(tensor.v / (1 - 0.95**(t + 1)))
    out = network(tensor.celo_features(p), w)[..., 0] + adam
    return out * rsqrt((out**2).mean())
