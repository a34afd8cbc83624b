"""Values of every awkward kind. Each kind is a function of a count and a NumPy generator."""

import math

import numpy as np


def with_some(values, rng, *specials):
    values[rng.random(values.size) < 0.3] = specials[0]
    values[rng.random(values.size) < 0.1] = specials[-1]
    return values


MAKERS = {
    "normal": lambda n, rng: rng.standard_normal(n),
    "ties": lambda n, rng: rng.integers(-3, 4, n).astype(float),
    "zeros": lambda n, rng: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "constant": lambda n, rng: np.full(n, -0.25),
    "nan": lambda n, rng: with_some(rng.standard_normal(n), rng, math.nan, 0.0),
    "all_nan": lambda n, rng: np.full(n, math.nan),
    "infinite": lambda n, rng: with_some(rng.standard_normal(n), rng, math.inf, -math.inf),
    "denormal": lambda n, rng: rng.integers(-9, 10, n) * (2.0**-149 if n % 2 else 2.0**-24),  # float32's, float16's
    "sparse": lambda n, rng: rng.standard_normal(n) * (rng.random(n) < 0.0005),
    "row_scaled": lambda n, rng: rng.standard_normal(n) * np.exp(2 * rng.standard_normal(n // 50 + 1)).repeat(50)[:n],
    "heavy_tailed": lambda n, rng: rng.standard_cauchy(n),
    "striped": lambda n, rng: rng.standard_normal(n) * np.where(np.arange(n) % 1000 == 0, 100.0, 1.0),
}
