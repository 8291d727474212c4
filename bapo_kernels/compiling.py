"""`torch.compile`: how the public functions enter a graph whole, and how values are checked that only a run will have.

A call is one node to the tracer of Python (`nonstrict_trace`); the compiler behind it traces through, on tensors that stand for those of a
run. So what works on vectors of N numbers is compiled and fused, and what touches the vocabulary is an operator (head/ops.py).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import register_pytree_node

P = ParamSpec("P")
R = TypeVar("R")


def is_traced(t: Tensor) -> bool:
    """Whether `t` only stands for the tensors of later runs, and has no values to look at."""
    return isinstance(t, FakeTensor | FunctionalTensor)


def compilable(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as one node of a compiled graph."""
    outside = torch.compiler.disable(function)
    if not hasattr(torch._dynamo, "nonstrict_trace"):
        return outside  # the graph breaks there
    returned = _named_tuple_of(get_type_hints(function)["return"])
    optional = {name for name, parameter in signature(function).parameters.items() if parameter.default is None}

    # A node has no room for None, groups and classes: groups go in by name, and out come plain lists, an empty one for None.
    @torch._dynamo.nonstrict_trace
    def node(*args, **kwargs):
        if "dp_group" in kwargs:
            kwargs["dp_group"] = group_named(kwargs["dp_group"])
        return _plain(outside(*args, **kwargs))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_dynamo_compiling():
            return outside(*args, **kwargs)
        given: dict[str, Any] = {
            name: value for name, value in kwargs.items() if value is not None or name not in optional
        }
        if "dp_group" in given:
            given["dp_group"] = given["dp_group"].group_name
        return _named(node(*args, **given), returned)

    return call


def _plain(out: Any) -> Any:
    if isinstance(out, tuple):
        return [_plain(v) for v in out]
    return [] if out is None else out


def _named(out: Any, tree: Any) -> Any:
    if not isinstance(out, list):
        return out
    return tree[0](*map(_named, out, tree[1])) if out else None


def _named_tuple_of(hint: Any) -> tuple[type, list] | None:
    """The named tuple of a type hint, and those of its fields."""
    for cls in (hint, *get_args(hint)):
        if hasattr(cls, "_fields"):
            return cls, [_named_tuple_of(field) for field in get_type_hints(cls).values()]
    return None


def register_fields(cls: type) -> None:
    """Lets frozen dataclasses of numbers, words, tensors and None go into a node."""
    names = [f.name for f in fields(cls)]

    def flatten(x):
        given = [name for name in names if getattr(x, name) is not None]
        return [getattr(x, name) for name in given], given

    register_node(
        cls, flatten, lambda values, given: cls(**dict.fromkeys(names) | dict(zip(given, values, strict=True)))
    )


def register_node(cls: type, flatten: Callable, unflatten: Callable) -> None:
    """Lets a class be an argument of a node: `flatten` gives its values and a constant, and `unflatten` takes them."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)


def group_named(name: Any):
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def traced_size(size: int) -> int:
    """In the run that a graph is traced for; later runs may have another."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def require(valid: Tensor, values: Tensor, message: str) -> None:
    """ValueError where not all is `valid`, in a compiled graph when that is run. "{}" in `message` becomes the first of `values` that is
    not."""
    if is_traced(valid):
        torch.ops.bapo_kernels.require(valid, values, message)
    elif not bool(valid.all()):
        raise ValueError(message.format(values[~valid][0].item()))


@torch.library.custom_op("bapo_kernels::require", require, mutates_args=()).register_fake
def _(valid: Tensor, values: Tensor, message: str) -> None:
    return None


# It has no result, and still it has to stay in a graph.
torch.fx.node.has_side_effect(torch.ops.bapo_kernels.require.default)
