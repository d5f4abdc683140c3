"""Units of a layer that compute the same, and modules that start as copies of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

MIN_INPUTS = 8  # random vectors of fewer entries are parallel by chance
_MAX_UNITS = 256  # of a layer, evenly spaced: all pairs of 50,000 would take long
_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


@dataclass(frozen=True)
class Twins:
    """What the units of one weight tensor have in common."""

    cosine: float  # largest between two units
    share: float  # of units with a twin
    zero: bool  # all weights are zero
    identical: bool  # all units have the same weights


def twins(model: nn.Module, max_cosine: float) -> dict[str, Twins]:
    """Weight name -> Twins, for every trainable layer with at least 8 inputs and 2 units."""
    found = {}
    for name, groups in _weights(model):
        groups = [g for g in groups if g.shape[0] >= 2 and g.shape[1] >= MIN_INPUTS]
        if groups:
            found[name] = _compare(groups, max_cosine)
    return found


def _compare(groups: list[torch.Tensor], max_cosine: float) -> Twins:
    cosine, num_twins, num_units, identical = -1.0, 0, 0, True
    for units in groups:
        size = units.norm(dim=1, keepdim=True)
        alive = size[:, 0] > 1e-12
        unit = units[alive] / size[alive]
        near = (unit @ unit.T).fill_diagonal_(-1.0)
        num_units += len(units)
        if len(unit) > 1:
            cosine = max(cosine, near.max().clamp(max=1.0).item())
            num_twins += int((near.amax(dim=1) >= max_cosine).sum())
        identical &= bool(((units - units[:1]).norm(dim=1) <= 1e-6 * size.max()).all())
    zero = all(not bool(units.any()) for units in groups)
    return Twins(cosine, num_twins / num_units, zero, identical)


def _weights(model: nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(name, units by group), every tensor once; units of a group see the same inputs."""
    seen = {id(p) for m in model.modules() if _is_table(m) for p in m.parameters(recurse=False)}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in seen or not weight.requires_grad or weight.ndim < 2:
                continue
            seen.add(id(weight))
            full = f"{path}.{name}" if path else name
            groups = _units(module, weight.detach().float().cpu())
            if groups:
                yield full, [_few(group) for group in groups]


def _is_table(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _units(module: nn.Module, weight: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(module, _CONVOLUTIONS):
        if module.transposed:  # (in, out / groups, ...)
            return [part.transpose(0, 1).flatten(1) for part in weight.chunk(module.groups)]
        return [part.flatten(1) for part in weight.chunk(module.groups)]
    if isinstance(module, nn.RNNBase):
        return list(weight.split(module.hidden_size))
    if isinstance(module, nn.MultiheadAttention):
        return list(weight.split(module.embed_dim))
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return [weight.flatten(1)]
    # Any other matrix may be used from either side, or hold one row per unit by design (decay
    # rates): it counts only where all its entries are one number.
    constant = weight.ndim == 2 and bool(weight.any()) and bool((weight == weight[0, 0]).all())
    return [weight] if constant else []


def _few(units: torch.Tensor) -> torch.Tensor:
    if len(units) <= _MAX_UNITS:
        return units
    return units[torch.linspace(0, len(units) - 1, _MAX_UNITS).round().long()]


# ---- copies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """Two weights that start equal, with what they started from."""

    first: str
    second: str
    one: nn.Parameter
    two: nn.Parameter
    start: torch.Tensor

    def apart(self) -> float | None:
        """Distance between the two now / how far the first has moved; None if it did not move."""
        way = (self.one.detach() - self.start).norm().item()
        return (self.one.detach() - self.two.detach()).norm().item() / way if way > 0 else None


def copies(model: nn.Module) -> list[Copies]:
    """Pairs of trainable matrices with equal random weights. Tied ones are one parameter, not two;
    layers that stand behind each other may be copies (nn.TransformerEncoder makes them so): what
    they see will part them."""
    tables = {id(p) for m in model.modules() if _is_table(m) for p in m.parameters(recurse=False)}
    known: dict[tuple, tuple[str, nn.Parameter]] = {}
    found = []
    for name, p in model.named_parameters():
        if p.ndim < 2 or not p.requires_grad or id(p) in tables or not _is_random(p):
            continue
        key = (tuple(p.shape), p.detach().double().sum().item())
        if key in known and torch.equal(known[key][1], p):
            other, first = known[key]
            found.append(Copies(other, name, first, p, p.detach().clone()))
        known.setdefault(key, (name, p))
    return found


def _is_random(p: nn.Parameter) -> bool:
    """Neither constant nor an identity: no such matrix comes up twice by chance."""
    return p.numel() >= MIN_INPUTS and len(p.detach().flatten()[:64].unique()) > 2
