"""The dispatcher: overloads and their schemas, the kernels that are registered, dispatch modes, facts of tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch._C import DispatchKey as DispatchKey, DispatchKeySet as DispatchKeySet
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._higher_order_ops import utils as _higher_order
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    keystr as keystr,
    tree_flatten as tree_flatten,
    tree_flatten_with_path as tree_flatten_with_path,
    tree_leaves as tree_leaves,
    tree_map as tree_map,
    tree_map_only as tree_map_only,
    tree_unflatten as tree_unflatten,
)

from narrowcast.runtime.torch_surface.dynamo import CompiledCode, never_trace
from narrowcast.runtime.torch_surface.patches import stay
from narrowcast.runtime.torch_surface.state import autocast_key, autocast_key_name, autocast_off, excluding

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
TO_COPY = torch.ops.aten._to_copy.default
"""The op that a conversion of element types ends in."""
CLONE = torch.ops.aten.clone.default
"""What `tensor.contiguous()` calls where it copies."""
COPY = torch.ops.aten.copy_.default
"""What writes the values of one tensor into another, perhaps of another element type."""
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""What `tensor.item()` calls."""
ONES_LIKE = torch.ops.aten.ones_like.default
"""What `loss.backward()` asks of its root."""
ENCODER_LAYER = torch.ops.aten._transformer_encoder_layer_fwd.default
"""An nn.TransformerEncoderLayer as one op; those that its kernel calls are below."""
MULTI_HEAD_ATTENTION = torch.ops.aten._native_multi_head_attention.default
ADDMM_ACTIVATION = torch.ops.aten._addmm_activation.default
SCALED_MM = torch.ops.aten._scaled_mm.default
SPARSE_ADDMM = torch.ops.aten._sparse_addmm.default
TRILINEAR = torch.ops.aten._trilinear.default
"""What torch.bilinear calls; its kernel calls bmm."""
ASSERT_METADATA = torch.ops.aten._assert_tensor_metadata.default

attention_by_definition = torch.ops.aten._scaled_dot_product_attention_math.default
"""Matmuls, a mask, softmax, in any format: what fused kernels compute."""
cudnn_rnn = torch.ops.aten._cudnn_rnn.default
_DEVICE = torch.ops.prim.device.default
"""What C++ asks of tensors whose classes say where they are."""
_READS_NUMBERS = (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
_WIDE = {float: torch.float64, complex: torch.complex128}
"""The dtypes of tensors that Python numbers become."""

PYTHON = DispatchKeySet(DispatchKey.Python)
"""The key of modes and of subclasses."""
without_modes = _disable_current_modes
"""`with without_modes():` no dispatch mode sees what runs inside."""
below_modes = torch._C._DisableTorchDispatch
"""The same for tensors of torch's own classes, at a tenth of its cost."""
without_functions = torch._C.DisableTorchFunction
"""`with without_functions():` no `__torch_function__`, of a class or a mode, sees what runs inside."""
count_dispatch_modes = torch._C._len_torch_dispatch_stack
"""How many dispatch modes of users are on."""
all_op_names = torch._C._dispatch_get_all_op_names
"""`aten::mm`, `aten::add.Tensor`: everything that is registered now."""
parse_schema = torch._C.parse_schema


@contextmanager
def quietly() -> Iterator[None]:
    """Run code of ours that computes with the user's tensors: without modes, class functions, autocast, autograd."""
    with without_modes(), without_functions(), autocast_off(), torch.no_grad():
        yield


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that Dynamo leaves alone, as torch has it, without importing Dynamo at the first op. Under it ops
    of higher order (flex_attention, cond) run as they do without one.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        sees = cls.__dict__.get("__torch_dispatch__")
        if sees is None:
            return

        def see(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if op is _DEVICE and hasattr(args[0], "fake_device"):  # asked seven times by each cast
                return args[0].device
            if isinstance(op, HigherOrderOperator):
                result = op(*args, **(kwargs or {}))
                mode.ran_higher_order(higher_order_name(op), args, result)
                return result
            return sees(mode, op, types, args, kwargs)

        cls.__torch_dispatch__ = see  # type: ignore[method-assign]
        never_trace(sees, see)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether Dynamo compiles under it: what ops of higher order have compiled, and no other code."""
        return bool(getattr(_higher_order, "_in_hop_compile", bool)())

    def __enter__(self) -> Any:
        for owner in (_higher_order, sys.modules.get("torch.nn.attention.flex_attention", _higher_order)):
            if hasattr(owner, _COMPILING):
                stay(owner, _COMPILING, _lifting, "functions of ops of higher order are compiled under our modes, too")
        return super().__enter__()

    def ran_higher_order(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Inspect what an op of higher order has returned, of whose parts nothing is known."""


_COMPILING, _SKIPPING = "setup_compilation_env", "in_any_mode_without_ignore_compile_internals"


def _lifting(make: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the context in which `torch.cond` and others compile their functions, which lifts the tensors that these
    close over: those have no gradients otherwise. Dynamo skips all code under a mode that does not ignore what it
    compiles.
    """

    @contextmanager
    def lifting() -> Iterator[Any]:
        with make() as backend, ExitStack() as stack:
            modes = [torch._C._get_dispatch_stack_at(n) for n in range(torch._C._len_torch_dispatch_stack())]
            others = [mode for mode in modes if not isinstance(mode, DispatchMode)]
            skips = any(not (m.is_infra_mode() or getattr(m, "ignore_compile_internals", bool)()) for m in others)
            if len(others) < len(modes) and not skips:
                stack.callback(_set_skipping, getattr(_python_dispatch, f"_is_{_SKIPPING}", False))
                stack.enter_context(CompiledCode(on=True))
                _set_skipping(False)
            yield backend

    return lifting


def _set_skipping(skips: bool) -> None:
    """Say whether Dynamo skips code because of a mode: torch asks in Python, and in C++ (2.13)."""
    setattr(_python_dispatch, f"_is_{_SKIPPING}", skips)
    getattr(torch._C._dynamo.guards, f"set_is_{_SKIPPING.replace('any_', '')}", bool)(skips)


def converts(op: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether a call converts a tensor: by the same op vmap converts numbers."""
    return op is TO_COPY and isinstance(args[0], torch.Tensor)


def call_op(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op that a dispatch mode was given. TorchScript compares and reads constants, and hands tensors that were
    Python numbers to a mode as these numbers, which the ops for that do not take. On the CPU ops on lists call those on
    their tensors, which count what they write, but not beneath a mode: it is counted here.
    """
    if op in _READS_NUMBERS:
        args = [arg if isinstance(arg, torch.Tensor) else _number(arg) for arg in args]
    result = op(*args, **kwargs)
    if result is None and op_name(op).startswith("_foreach_"):
        written = [t for t in args[0] if t.is_cpu and not t.is_inference()]
        torch.autograd.graph.increment_version(written)
    return result


def _number(value: complex) -> torch.Tensor:
    return torch.tensor(value, dtype=_WIDE.get(type(value)), device="cpu")


def step_out(mode: DispatchMode) -> bool:
    """Take a mode off, if it is the innermost; `step_in` puts it back. Transforms of functions keep the state of modes
    by themselves: there none may go.
    """
    depth = torch._C._len_torch_dispatch_stack()
    is_innermost = depth and torch._C._get_dispatch_stack_at(depth - 1) is mode
    if not is_innermost or in_transform():
        return False
    torch._C._pop_torch_dispatch_stack(None)
    return True


step_in = torch._C._push_on_torch_dispatch_stack


# -- overloads ---------------------------------------------------------------------------------------------------------


schema_of: Callable[[OpOverload], Any] = attrgetter("_schema")
"""The overload's schema."""
op_name: Callable[[OpOverload], str] = attrgetter("_opname")
"""`mm` of aten.mm.default."""
overload_name: Callable[[OpOverload], str] = attrgetter("_overloadname")
"""`default` of aten.mm.default."""
higher_order_name: Callable[[Any], str] = attrgetter("_name")
"""`wrap_with_autocast`: the name of a higher-order op."""
can_decompose: Callable[[OpOverload], bool] = methodcaller("_can_decompose")
"""Whether the overload is made of calls of others on some device type."""


def is_dispatched(op: OpOverload) -> bool:
    """Return whether torch's dispatcher has the overload; some are of TorchScript's interpreter alone."""
    schema = schema_of(op)
    try:
        torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
    except RuntimeError:
        return False
    return True


def composite_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """Return the kernel that runs the calls inside a composite op; None if none is registered."""
    key = DispatchKey.CompositeImplicitAutograd
    return partial(op._op_dk, key) if has_kernel(op, key) else None


def in_transform() -> bool:
    """Return whether a transform of torch.func runs on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


is_below_autograd = partial(torch._C._dispatch_tls_is_dispatch_key_excluded, DispatchKey.AutogradFunctionality)
"""Whether autograd is off: in kernels of other ops, in inference mode and in transforms."""


def is_inside_kernel() -> bool:
    """Return whether below autograd the kernel of another op makes this call, as that of `logsumexp` calls `amax`: no
    graph sees it. Not known in inference mode, where autograd is off around all calls.
    """
    return not torch.is_inference_mode_enabled() and not in_transform()


def told_of_transforms(tell: Callable[[], None]) -> None:
    """Call a function, from now on, as a transform of torch.func begins."""

    def telling(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begins(*args: Any, **kwargs: Any) -> Any:
            tell()
            return begin(*args, **kwargs)

        return begins

    for module, names in _TRANSFORMS.items():
        for name in names:
            if hasattr(sys.modules.get(module), name):
                stay(sys.modules[module], name, telling, "rules about composite ops do not hold in transforms")


_TRANSFORMS = {
    "torch._functorch.vmap": ("_vmap_increment_nesting",),
    "torch._functorch.eager_transforms": (
        "_grad_increment_nesting",
        "_jvp_increment_nesting",
        "_func_increment_nesting",
    ),
}


# -- kernels -----------------------------------------------------------------------------------------------------------


def has_kernel(op: OpOverload, key: DispatchKey | str) -> bool:
    """Return whether a kernel is registered for the overload at a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def registered_kernel(op: OpOverload, device_type: str) -> Any | None:
    """Return the kernel at the device type's Autocast key, or None where the op falls through it."""
    if not has_kernel(op, autocast_key_name(device_type)):
        return None
    return torch.library.get_kernel(op.name(), autocast_key(device_type))


def computed_kernel(op: OpOverload, device_type: str) -> Any:
    """Return the kernel of an op that is known to have one; a tenth of a millisecond less for each hundred ops."""
    return torch._C._dispatch_get_computed_kernel_for_dispatch_key(op.name(), autocast_key(device_type))


def register(
    library: torch.library.Library, kernels: Sequence[tuple[OpOverload, Callable[..., Any]]], device_type: str
) -> None:
    """Register `kernel(keyset, *args, **kwargs)` for ops of the library's namespace at the device type's Autocast key.

    What `Library.impl` does for overloads that exist, without its checks, which take as long again.
    """
    stay(torch.Tensor, "_wrapped_number", lambda _: _NUMBER, "kernels of ours are called with numbers")
    key = autocast_key_name(device_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is the purpose
        for op, kernel in kernels:
            name = op_name(op) if overload_name(op) == "default" else f"{op_name(op)}.{overload_name(op)}"
            library.m.impl(name, key, kernel, True)  # type: ignore[union-attr]


def _wrapped_number(tensor: torch.Tensor) -> Any:
    """Return the number that a tensor without memory represents: one that torch.func wraps, or a forward-mode zero.

    In `x + 1` torch gives kernels in Python the number, not the tensor that holds it: it asks for this attribute, which
    it sets where the number is a symbol, and else reads the tensor's memory.
    """
    functorch = torch._C._functorch
    if "_wrapped_number" in vars(tensor):
        return vars(tensor)["_wrapped_number"]
    number = tensor
    while functorch.is_functorch_wrapped_tensor(number):
        number = functorch.get_unwrapped(number)
    if number._is_zerotensor():
        return {torch.bool: False, torch.int64: 0, torch.complex128: 0j}.get(number.dtype, 0.0)
    if number is tensor:
        raise AttributeError("_wrapped_number")
    transforms = DispatchKeySet(DispatchKey.FuncTorchDynamicLayerFrontMode)
    transforms |= DispatchKeySet(DispatchKey.FuncTorchDynamicLayerBackMode)
    with excluding(transforms), below_modes(), without_functions():
        return number.item()


def _set_wrapped_number(tensor: torch.Tensor, number: Any) -> None:
    vars(tensor)["_wrapped_number"] = number


_NUMBER = property(_wrapped_number, _set_wrapped_number)


release = torch.library.Library._destroy
"""Give the ops of a library the kernels back that they had before it."""


# -- tensors -----------------------------------------------------------------------------------------------------------


is_view: Callable[[torch.Tensor], bool] = torch.Tensor._is_view
"""Whether the tensor is a view of another, to autograd."""


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that this one is a view of; None of one that is no view."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was written to, but through `.data`; -1 for one of inference mode."""
    return -1 if tensor.is_inference() else int(tensor._version)


@cache
def holds_others(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class are made of others: it defines itself what ops do with it."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the memory that a weak reference refers to; None where it is freed."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share that lie in one storage."""
    return int(tensor.untyped_storage()._cdata)
