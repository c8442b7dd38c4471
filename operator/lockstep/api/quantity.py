"""Kubernetes quantities as numbers: `100Gi`, `500m`, `1e3`
(https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity).
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, Overflow

_EXPONENTS = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FACTORS = {suffix: Decimal(10) ** power for suffix, power in _EXPONENTS.items()} | {
    f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)
}
_LARGEST = Decimal(2**63 - 1)
_RESOLUTION = Decimal("0.001")


def amount(quantity: object) -> Decimal | None:
    """The number that a quantity stands for, in any spelling, at most the 2^63 - 1 that the API server keeps. None: it is none."""
    text = str(quantity)
    digits = text.rstrip("numkKMGTPEi")
    try:
        return min(Decimal(digits) * _FACTORS[text[len(digits) :]], _LARGEST)
    except Overflow:  # 1e999999999
        return _LARGEST
    except (InvalidOperation, KeyError):
        return None


def number(quantity: object) -> Decimal:
    """The same, for example 1073741824 for 1Gi (bytes) or 0.5 for 500m (CPUs); 0 where it is none, or isn't stated."""
    return amount(quantity) or Decimal(0)


def same_amount(one: object, other: object) -> bool:
    """Return True if two quantities differ by less than the API server keeps, which rounds up to a thousandth."""
    first, second = amount(one), amount(other)
    return first is not None and second is not None and abs(first - second) < _RESOLUTION
