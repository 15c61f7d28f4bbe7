"""Divides the output's error among the operations of a step, to first order.

The share of an operation is the gradient of the output's error by the operation's result, times the error made there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines.comparison.observers import StepperObserver
from engines.comparison.reference import Reference, filled_cache
from exporter.measuring.named_values import SCORES, Values
from exporter.steppers.eager_stepper import feed_tensor, to_torch

CACHE = "cache"  # the name under which the errors of rows cached in earlier steps are added up


def error_shares(reference: Reference, index: int, carried: Values, past: list[np.ndarray]) -> dict[str, float]:
    """Returns each operation's share of the error of the step's last value, by name; the cache's share is under CACHE.

    Let e be the error of the last value, and J_v its derivative by value v. Let δ_v be the error that the backend makes
    at v: the difference from the exact operation on the backend's own inputs. Errors in the cache are such δ_v too.
    Then e ≈ Σ J_v δ_v, and the share of v is ⟨e, J_v δ_v⟩ / ‖e‖². Shares add up to 1 as long as the error is small.

    Args:
        reference: the audit's reference.
        index: index of the step.
        carried: the backend's named values at that step.
        past: the backend's cache rows before that step, one array [B, K, C, D] for each cache tensor.

    Returns:
        The shares. There are none where the error is 0 or not finite, or the backend does not show the last value.
    """
    step = reference.steps[index]
    last = reference.names[-1]
    if last not in carried or not np.isfinite(carried[last].astype(np.float64)).all():
        return {}
    error = torch.from_numpy(carried[last].astype(np.float64) - step.carried[last])
    size = float((error**2).sum())
    if size == 0:
        return {}
    probes: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point() or name.endswith(SCORES):
            return x
        probes[name] = torch.zeros_like(x, requires_grad=True)
        return x + probes[name]

    stepper = reference.stepper
    inputs = [feed_tensor(step.feeds, spec) for spec in stepper.contract.step_inputs]
    cached = [to_torch(array).requires_grad_() for array in reference.carried_pasts[index]]
    output = stepper.module(*inputs, *(tensor.clone() for tensor in cached), see=see)
    wanted = {**probes, **{f"{CACHE} {i}": tensor for i, tensor in enumerate(cached)}}
    gradients = torch.autograd.grad((output * error).sum(), list(wanted.values()), allow_unused=True)
    observer = StepperObserver(stepper)
    exact = observer.observe(step.feeds, filled_cache(observer, past), carried)
    made = {name: carried[name].astype(np.float64) - exact[name] for name in probes if name in carried}
    made |= {
        f"{CACHE} {i}": array.astype(np.float64) - reference.carried_pasts[index][i] for i, array in enumerate(past)
    }
    shares: dict[str, float] = {}
    for name, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None and name in made:
            key = CACHE if name.startswith(CACHE) else name
            shares[key] = shares.get(key, 0.0) + float((gradient.numpy() * made[name]).sum()) / size
    return shares
