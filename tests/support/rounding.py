"""Tolerances between two computations of one number, from the arithmetic, since a measured bound holds only on the CPU that measured it.

On another CPU, over other ranks or in other batches the same terms are added in another order. Every rounding on the way is off by at most
the unit roundoff u, up or down, so that n of them together are off by λ·√n·u, but for a probability of 2·exp(−λ²/2) (Higham and Mary, A New
Approach to Probabilistic Rounding Error Analysis, 2019, https://doi.org/10.1137/18M1226312). Two computations differ by √2 times that.
"""

from __future__ import annotations

import math

UNIT = {"FP32": 2.0**-24, "FP16": 2.0**-11, "BF16": 2.0**-8}
FALSE_ALARMS = 1e-6
"""The probability that a test fails though nothing is wrong."""


def tolerance(roundings: int, precision: str = "FP32", *, results: int = 10, terms: int = 1) -> float:
    """The relative difference that none of `results` numbers exceeds, each the mean of `terms` numbers with `roundings` of their own."""
    deviations = math.sqrt(2 * math.log(2 * results / FALSE_ALARMS))
    return deviations * math.sqrt(2 * roundings / terms) * UNIT[precision]


def forward_roundings(*, hidden: int, intermediate: int, attention: int, vocabulary: int, sequence: int, layers: int = 2) -> int:
    """Additions in FP32 on the way from a token to its loss: the terms of all sums that follow one another.

    Of a layer these are two norms, the products that give queries, queries with keys, and the feed-forward part's inputs, the adapters
    beside them (`hidden` terms each, or fewer), softmax and mean over the `sequence`, and the products out of `attention` and
    `intermediate`.
    """
    return layers * (6 * hidden + 2 * sequence + attention + intermediate) + 2 * hidden + vocabulary


def gradient_roundings(forward: int, tokens: int) -> int:
    """Additions of a weight's gradient: forward, the same way back, and the sum over a batch's tokens."""
    return 2 * forward + tokens


TINY = forward_roundings(hidden=62, intermediate=127, attention=64, vocabulary=258, sequence=128)
"""Roundings of the model that most tests of the trainer train, at its longest sequence."""
SAME_LOSS = tolerance(gradient_roundings(TINY, tokens=1000))
"""Relative, of its losses after the same steps: roundings of the forward pass, and of the gradients that led there."""
LOW_PRECISION_ROUNDINGS = 2 * 20 + 3
"""Tensors in BF16 or FP16 on the way from a token to its loss in a decoder of two layers with adapters; sums inside of an operation are in
FP32.
"""


def same_rounding_tolerance(precision: str, *, longest_sum: int, terms: int) -> float:
    """`tolerance` of a mean over `terms` samples where both computations round the same sums, added in FP32, to BF16 or FP16 at the same
    places.

    A number is rounded the other way only where its sum lies nearer to the middle of two neighbors than the two orders of its terms lie
    apart.
    """
    share = math.sqrt(2 * longest_sum) * UNIT["FP32"] / UNIT[precision]
    return math.sqrt(share) * tolerance(LOW_PRECISION_ROUNDINGS, precision, terms=terms)
