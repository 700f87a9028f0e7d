"""Every loss of the library once more, in numpy and float64, one trajectory's tokens at a time.

Written from the papers. A trajectory is cut down to its sampled tokens first, so neither rows,
padding nor masks exist here. Gradients are by the complex step: a token gets an imaginary part,
`sg` takes it away again, and what is left of it in a loss is the exact derivative.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tests.losses.conformance.batches import CODER, EMA, EXPERT, FIELDS, Tokens

STEP = 1e-30
LIVE = ("current", "entropy", "value")
"""Scores with a gradient."""
SHORT = {EMA: "ema", EXPERT: "expert", CODER: "coder"}
"""What the oracle calls scores that have arguments."""


class Out(NamedTuple):
    """Of each sampled token of one trajectory."""

    loss: Any
    weight: Any = 0.0
    """None where the library promises nothing of it."""
    kept: Any = True


Whole = Sequence[SimpleNamespace]
Oracle = Callable[[SimpleNamespace, Whole], Out]
"""(one trajectory's sampled tokens, those of all) -> what the loss makes of the former."""


class Answer(NamedTuple):
    """Of one trajectory, all its tokens."""

    loss: np.ndarray
    weight: np.ndarray
    """nan where the library promises nothing of it."""
    kept: np.ndarray
    gradients: dict[str, np.ndarray]
    """By name of score: of sum(weights x loss)."""


def answers(oracle: Oracle, batch: Sequence[Tokens], kept: bool = True) -> list[Answer]:
    """The oracle's word on every trajectory; `kept` is what masks before the loss left."""
    whole = [sampled(tokens, kept) for tokens in batch]
    whole = [t for t in whole if t.current.size]
    return [_answer(oracle, tokens, whole, kept) for tokens in batch]


def sampled(tokens: Tokens, kept: bool = True) -> SimpleNamespace:
    """The fields of the sampled tokens in float64, by attribute."""
    mask = tokens["mask"]
    fields = {SHORT.get(n, n): tokens[n][mask] for n in (*FIELDS, "weights") if n != "mask"}
    exact = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in fields.items()}
    return SimpleNamespace(**exact, kept=np.full(int(mask.sum()), kept))


def _answer(oracle: Oracle, tokens: Tokens, whole: Whole, kept: bool) -> Answer:
    own, mask = sampled(tokens, kept), tokens["mask"]
    count = int(mask.sum())
    if not count:
        none = np.zeros(mask.shape)
        return Answer(none, none, none.astype(bool), dict.fromkeys(LIVE, none))
    parts = [np.nan if part is None else np.real(part) for part in oracle(own, whole)]
    out = Out(*(np.broadcast_to(part, count) for part in parts))
    gradients = {}
    for name in LIVE:
        stepped = SimpleNamespace(**vars(own))
        setattr(stepped, name, getattr(own, name) + 1j * STEP * np.eye(count))
        loss = np.broadcast_to(oracle(stepped, whole).loss, (count, count))
        gradients[name] = (np.imag(loss) / STEP) @ own.weights
    return Answer(
        *(_filled(part, mask) for part in out),
        {name: _filled(gradient, mask) for name, gradient in gradients.items()},
    )


def _filled(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Back among the tokens that were not sampled, which have 0."""
    full = np.zeros(mask.shape, values.dtype)
    full[mask] = values
    return full


# --- pieces of formulas --------------------------------------------------------------------------


sg = np.real


def cut(x: Any, low: float | None, high: float | None) -> Any:
    """Between the bounds, with a gradient where neither holds it."""
    x = x if low is None else np.where(sg(x) < low, low, x)
    return x if high is None else np.where(sg(x) > high, high, x)


def log_ratio(numerator: Any, denominator: Any) -> Any:
    """Cut to +-20, as every public implementation does before it exponentiates."""
    return cut(numerator - denominator, -20.0, 20.0)


def ratio(numerator: Any, denominator: Any) -> Any:
    return np.exp(log_ratio(numerator, denominator))


def mean(x: Any) -> Any:
    return np.mean(x, axis=-1, keepdims=True)


def total(x: Any) -> Any:
    return np.sum(x, axis=-1, keepdims=True)


def own_gradient(value: Any, token: Any) -> Any:
    """A sequence's number whose gradient is the token's own (GSPO eq. 14)."""
    return sg(value) + token - sg(token)


def smaller(a: Any, b: Any) -> Any:
    return np.where(sg(a) <= sg(b), a, b)


def larger(a: Any, b: Any) -> Any:
    return np.where(sg(a) >= sg(b), a, b)


def among(x: Any, kept: Any) -> Any:
    return np.where(kept, x, 0.0)


def score_function(
    t: SimpleNamespace, factor: Any, kept: Any = True, advantages: Any = None
) -> Out:
    """-sg(factor A) log p."""
    kept = t.kept & kept
    weight = among(sg(factor), kept)
    advantages = t.advantages if advantages is None else advantages
    return Out(-weight * sg(advantages) * t.current, weight, kept)


def surrogate(t: SimpleNamespace, r: Any, factor: Any = 1.0, kept: Any = True) -> Out:
    """-factor r A, differentiated through r."""
    kept = t.kept & kept
    return Out(among(-sg(factor) * r * t.advantages, kept), among(sg(factor * r), kept), kept)


def clip(
    t: SimpleNamespace,
    r: Any,
    low: float,
    high: float,
    factor: Any = 1.0,
    kept: Any = True,
    dual: float | None = None,
) -> Out:
    """-factor min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at least dual A."""
    A, kept = t.advantages, t.kept & kept
    flows = ~(((A > 0) & (sg(r) > 1 + high)) | ((A < 0) & (sg(r) < 1 - low)))
    objective = smaller(r * A, cut(r, 1 - low, 1 + high) * A)
    if dual is not None:
        objective = np.where(A < 0, larger(objective, dual * A), objective)
        flows = flows & ~((A < 0) & (sg(r) > dual))
    loss = among(-sg(factor) * objective, kept)
    return Out(loss, among(sg(factor * r), kept & flows), kept)


def k1(x: Any) -> Any:
    """x = log reference - log current."""
    return -x


def k2(x: Any) -> Any:
    return x**2 / 2


def k3(x: Any) -> Any:
    return np.expm1(x) - x


def plus(out: Out, loss: Any) -> Out:
    """A term on every sampled token, kept or not."""
    return out._replace(loss=out.loss + loss)
