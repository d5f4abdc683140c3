"""The terms a loss is summed from, read off the project's own step while it runs.

Every call of torch in the step is seen once (`TorchFunctionMode`). Scalars that are combined by
addition, subtraction, or a stack that is summed are terms; a product with a number is a weight. At
`backward` the sum is taken apart, and each term's own gradient is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAX_TERMS = 12  # more are one loss summed over steps or rows
SUMS = {"add", "radd", "iadd", "sub", "rsub", "isub"}
WEIGHTS = {"mul", "rmul", "imul", "div", "truediv", "true_divide", "itruediv", "neg", "idiv"}
LISTED = {"sum", "mean"}  # of a stack of scalars
PLAIN = {
    "float",
    "double",
    "to",
    "clone",
    "squeeze",
    "reshape",
    "view",
    "type",
    "contiguous",
    "cpu",
}


@dataclass(eq=False)
class Node:
    """A scalar, or a stack of scalars, and the scalars it is summed from (none: a term)."""

    tensor: torch.Tensor
    parts: list[tuple[Node, float]] = field(default_factory=list)
    detached: Node | None = None
    from_batch: bool = False
    from_model: bool = False
    from_targets: bool = False


@dataclass(frozen=True)
class Term:
    """A summand of the loss: its weighted value, and the norms of its gradient."""

    value: float
    gradient: float  # of the term itself, over the model's parameters
    weight: float
    connected: bool  # it has a gradient function at all
    from_model: bool
    from_targets: bool


class Recorder(TorchFunctionMode):
    """Sees a step; `terms` is filled when backward is first called."""

    def __init__(self, model: torch.nn.Module, batch: dict):
        super().__init__()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.kept: dict[int, torch.Tensor] = {}  # tensors stay alive, so that ids stay theirs
        self.marks: dict[int, frozenset] = {}
        self.nodes: dict[int, Node] = {}
        self.terms: list[Term] | None = None
        for tensor in _tensors([batch.get("x")]):
            self._mark(tensor, frozenset({"batch"}))
        for tensor in _tensors([batch.get("y")]):
            self._mark(tensor, frozenset({"batch", "targets"}))
        for parameter in model.parameters():
            self._mark(parameter, frozenset({"model"}))

    def _mark(self, tensor: torch.Tensor, marks: frozenset) -> None:
        self.kept[id(tensor)] = tensor
        self.marks[id(tensor)] = marks

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if self.terms is not None:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if name == "backward" and args and _is_scalar(_first(args[0])):
            self.terms = self._take_apart(_first(args[0]))
            self.kept.clear()
            self.nodes.clear()
            return func(*args, **kwargs)
        given = list(_tensors([args, kwargs]))
        before = self._before(func, given)
        out = func(*args, **kwargs)
        self._after(name, args, kwargs, out, given, before)
        return out

    def _before(self, func: Callable, given: list[torch.Tensor]) -> Node | None:
        """What an addition in place is about to change: its node, on a copy."""
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        if not in_place or not given or not _is_scalar(given[0]):
            return None
        old = self._node(given[0])
        return Node(given[0].clone(), old.parts, old.detached, **_origin(old))

    def _after(self, name: str, args: Any, kwargs: dict, out: Any, given: list, before) -> None:
        marks = frozenset().union(*(self.marks.get(id(t), frozenset()) for t in given))
        for tensor in _tensors([out]):
            self._mark(tensor, marks | (self.marks.get(id(tensor), frozenset())))
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            node = self._combined(name, args, kwargs, out, before)
            if node is not None:
                self.nodes[id(out)] = node

    def _combined(self, name: str, args: Any, kwargs: dict, out: Any, before) -> Node | None:
        """The node of a result that is made of scalars, or None."""
        if out.ndim == 0 and name in SUMS | WEIGHTS:
            parts = self._weighted(name, args, kwargs, before)
        elif out.ndim == 1 and name == "stack":
            parts = [(self._node(t), 1.0) for t in _tensors([args]) if _is_scalar(t)]
        elif out.ndim == 0 and name in LISTED | PLAIN and _first(args) is not None:
            source = self.nodes.get(id(_first(args)))
            share = 1 / max(len(source.parts), 1) if source and name == "mean" else 1.0
            parts = [(n, w * share) for n, w in source.parts] if source and source.parts else None
        elif out.ndim == 0 and name == "detach" and _is_scalar(_first(args)):
            return Node(out, [], self._node(_first(args)), **self._marks_of(out))
        else:
            parts = None
        return Node(out, parts, None, **self._marks_of(out)) if parts else None

    def _weighted(self, name: str, args: Any, kwargs: dict, before) -> list | None:
        """Terms and factors of a sum, difference, or product with a number."""
        if not args or any(isinstance(a, torch.Tensor) and a.ndim for a in args[:2]):
            return None
        nodes = [a if not isinstance(a, torch.Tensor) else self._node(a) for a in args[:2]]
        if before is not None:
            nodes[0] = before
        if name in SUMS:
            factor = float(kwargs.get("alpha", 1)) * (-1.0 if "sub" in name else 1.0)
            factors = (factor, 1.0) if name == "rsub" else (1.0, factor)
            pairs = zip(nodes, factors, strict=False)
            return [(n, f) for n, f in pairs if isinstance(n, Node)] or None
        if name == "neg":
            return [(nodes[0], -1.0)]
        return _product(name, nodes)

    def _node(self, tensor: torch.Tensor) -> Node:
        found = self.nodes.get(id(tensor))
        return found or Node(tensor, [], None, **self._marks_of(tensor))

    def _marks_of(self, tensor: torch.Tensor) -> dict[str, bool]:
        marks = self.marks.get(id(tensor), frozenset())
        return {f"from_{kind}": kind in marks for kind in ("batch", "model", "targets")}

    # ---- at backward ----------------------------------------------------------------------------

    def _take_apart(self, loss: torch.Tensor) -> list[Term]:
        """Terms in the order they were added in; all penalties on weights are one, the last."""
        leaves = [part for part in _leaves(self._node(loss), 1.0) if self._counts(part[0])]
        live = {id(node.tensor) for node, _ in leaves if node.tensor.requires_grad}
        leaves = [part for part in leaves if not _same_value(part[0], live)]
        penalties = [part for part in leaves if not part[0].from_batch]
        terms = [part for part in leaves if part[0].from_batch]
        if penalties:
            total = sum(weight * node.tensor for node, weight in penalties)
            terms.append((Node(total, from_model=True), 1.0))
        return [] if len(terms) > MAX_TERMS else [self._term(*part) for part in terms]

    def _counts(self, node: Node) -> bool:
        """Neither a constant nor a parameter of its own, such as a learned weight of a term."""
        made = (node.from_batch or node.from_model) and node.tensor.is_floating_point()
        return made and not (node.tensor.is_leaf and node.tensor.requires_grad)

    def _term(self, node: Node, weight: float) -> Term:
        tensor = node.tensor
        return Term(
            value=weight * tensor.item(),
            gradient=gradient_norm(tensor, self.parameters),
            weight=weight,
            connected=tensor.requires_grad,
            from_model=node.from_model,
            from_targets=node.from_targets,
        )


def _same_value(node: Node, live: set[int]) -> bool:
    """The value of one loss with the gradient of another: a + (b - a).detach()."""
    if node.tensor.requires_grad or node.detached is None:
        return False
    return any(id(part.tensor) in live for part, _ in _leaves(node.detached, 1.0))


def _leaves(node: Node, weight: float) -> list[tuple[Node, float]]:
    """The terms of a sum in the order in which they were added; one that occurs twice is one."""
    if not node.parts:
        return [(node, weight)]
    found: dict[int, tuple[Node, float]] = {}
    for part, factor in node.parts:
        for leaf, share in _leaves(part, weight * factor):
            key = id(leaf.tensor)
            found[key] = (leaf, share + (found[key][1] if key in found else 0.0))
    return list(found.values())


def _product(name: str, nodes: list) -> list | None:
    """A term times or by a number, or by a scalar without gradient."""
    first, second = (*nodes, None)[:2]
    if "div" in name and not isinstance(first, Node):
        return None
    if not isinstance(first, Node):
        first, second = second, first
    factor = _number(second)
    if factor is None and "div" not in name:
        first, factor = second, _number(first)
    if factor is None or not isinstance(first, Node) or ("div" in name and factor == 0):
        return None
    return [(first, 1 / factor if "div" in name else factor)]


def _number(value: Any) -> float | None:
    """A number, or a scalar tensor that no weight changes (a count)."""
    if isinstance(value, Node):
        constant = not (value.tensor.requires_grad or value.from_model)
        return value.tensor.item() if constant else None
    return float(value) if isinstance(value, int | float) else None


def gradient_norm(term: torch.Tensor, parameters: list[torch.Tensor]) -> float:
    """Over the model's parameters and small ones outside it (a learned weight of a term); 0 without
    a gradient function, not finite if the gradient is not."""
    if not term.requires_grad:
        return 0.0
    own = {id(p) for p in parameters}
    small = [p for p in _reached(term) if id(p) not in own and p.numel() <= 16]
    grads = torch.autograd.grad(term, [*parameters, *small], retain_graph=True, allow_unused=True)
    norms = [g.float().norm() for g in grads if g is not None]
    return torch.stack(norms).norm().item() if norms else 0.0


def _reached(term: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves of the graph of a tensor."""
    seen, queue = set(), [term.grad_fn]
    while queue:
        function = queue.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            yield function.variable
        queue += [following for following, _ in function.next_functions]


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _first(value: Any) -> Any:
    return next(itertools.islice(_tensors([value]), 1), None)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _origin(node: Node) -> dict[str, bool]:
    kinds = ("from_batch", "from_model", "from_targets")
    return {kind: getattr(node, kind) for kind in kinds}
