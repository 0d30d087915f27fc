"""What autograd and ``torch.vmap`` make of an op, written once for all ops that take quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def below_autograd(op: Any) -> Callable[..., Any]:
    """The op without derivative: its outputs never require grad."""

    def run(keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return run


def one_by_one(op: Any) -> Callable[..., Any]:
    """The op under ``torch.vmap``: each example by itself, the results stacked along a new first dimension."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        dims = structure.flatten_up_to(in_dims)

        def of_example(choose: Callable[[Tensor, int], Tensor]) -> Any:
            example = [
                choose(leaf, dim) if isinstance(leaf, Tensor) and dim is not None else leaf
                for leaf, dim in zip(leaves, dims, strict=True)
            ]
            return op(*pytree.tree_unflatten(example, structure))

        if info.batch_size == 0:  # what one example would give says the shapes
            one = of_example(lambda leaf, dim: leaf.new_zeros(leaf.shape[:dim] + leaf.shape[dim + 1 :]))
            none = pytree.tree_map(lambda result: result.new_empty((0, *result.shape)), one)
            return none, pytree.tree_map(lambda _: 0, none)

        def selecting(index: int) -> Callable[[Tensor, int], Tensor]:
            return lambda leaf, dim: leaf.select(dim, index)

        results = [of_example(selecting(index)) for index in range(info.batch_size)]
        stacked = pytree.tree_map(lambda *each: torch.stack(each), results[0], *results[1:])
        return stacked, pytree.tree_map(lambda _: 0, stacked)

    def run(keyset: Any, *args: Any) -> Any:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        return custom_function_call_vmap_helper(retrieve_current_functorch_interpreter(), rule, op, *args)

    return run
