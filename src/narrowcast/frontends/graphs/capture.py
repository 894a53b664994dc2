"""capture: from a graph of Dynamo's or torch.export's to one of ATen calls, with the region's real formats in force.

The graph is run on fake tensors while torch's pre-dispatch tracing records the calls above autocast. Regions are really
opened and closed on the way, so each value has the format that eager code would give it, and what code asks of a
format (`y.float()` on an fp32 y) is answered as in eager. Composite ops that no rule is about are recorded as the calls
inside them, which rules may be about. Bodies of higher-order ops are captured one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx, track_tensor_tree

from narrowcast.errors import CaptureError
from narrowcast.frontends.graphs.composites import decompositions
from narrowcast.runtime.regions.marks import MARKS, closing_marked, enter_marked, exit_marked, exported_key, find_marked
from narrowcast.runtime.sites.graph_nodes import NO_OUTSIDE, Outside, at_site, node_site
from narrowcast.runtime.sites.numbering import PLAIN_BODIES, Numbering
from narrowcast.runtime.torch_bridge import is_weight
from narrowcast.runtime.torch_surface import dispatch, fx, state
from narrowcast.runtime.torch_surface.autograd import INFERENCE_MODE, transforms_as_they_were

# Their bodies run without autocast, in eager mode too, and stay as they are; an autocast kernel of torch's own, which
# is Python, casts these arguments.
_CAST_ARGUMENTS = {"flex_attention": 3}
_BACKWARD_BODIES = {"autograd_function_apply": 1}  # which of a higher-order op's bodies runs in the backward


@dataclass(slots=True)
class Captured:
    """A captured graph. flags: of each placeholder, bodies' included, whether it requires grad and is a weight."""

    graph: torch.fx.GraphModule
    flags: dict[torch.fx.Node, tuple[bool, bool]] = field(default_factory=dict)

    def note_flags(self, module: torch.fx.GraphModule, pairs: Iterable[tuple[bool, bool]]) -> None:
        """Note what is known of the placeholders of a graph, or of a body in it."""
        self.flags.update(zip(module.graph.find_nodes(op="placeholder"), pairs, strict=False))


def capture(graph: torch.fx.GraphModule, inputs: Sequence[Any], outside: Outside = NO_OUTSIDE) -> Captured:
    """Return the ATen form of a graph that Dynamo or torch.export made; `graph` is left as it is.

    inputs: the fake tensors and sizes of its placeholders. outside: where it is called.

    Must be called with the regions open that the graph is to run in. Raises whatever running the graph raises.
    """
    flags = [_flags(value) for value in inputs]
    captured = Captured(graph)
    numbering = Numbering(outside.begins)
    runner = _GraphRunner(graph, captured, outside, torch.is_autocast_cache_enabled(), numbering)
    table = decompositions(graph)
    with (
        torch.fx.traceback.preserve_node_meta(), fx.same_random_numbers(), transforms_as_they_were(),
        closing_marked(),
    ):  # fmt: skip
        tracer = make_fx(runner.run, decomposition_table=table, pre_dispatch=True, _allow_non_fake_inputs=True)
        aten = tracer(*map(_fresh, inputs))
    _refuse_constants(aten)
    _copy_placeholders(graph, aten)
    captured.graph = aten
    captured.note_flags(aten, flags)
    return captured


def _flags(value: Any) -> tuple[bool, bool]:
    """Return whether a value requires grad, and whether the weight cache would keep its cast."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False, False
    return True, is_weight(value)


def _fresh(value: Any) -> Any:
    """Return a tensor like this one, on the same memory, whose autograd state is independent of the original's."""
    if not isinstance(value, torch.Tensor):
        return value
    fresh = detached(value)
    fresh.requires_grad_(value.requires_grad)
    return fresh if value.is_leaf or not value.requires_grad else fresh.view_as(fresh)


def detached(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory, without autograd; of a fake one that represents a number, the same number."""
    with torch.no_grad():
        plain = value.detach()
    if isinstance(value, fx.FakeTensor) and value.item_memo is not None:
        plain.item_memo = value.item_memo  # type: ignore[attr-defined]
    return plain


def _refuse_constants(graph: torch.fx.GraphModule) -> None:
    """Raise CaptureError if a fake tensor became a constant: a value that the tracing lost (`x.data`, torch.func)."""
    for name, module in graph.named_modules():
        for key, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            wrapped = isinstance(value, torch.Tensor) and fx.is_functorch_wrapped_tensor(value)
            if wrapped or isinstance(value, fx.FakeTensor):
                found = f"the tracer lost sight of a value ({name}{key})"
                advice = "Transforms of torch.func (vmap, grad) are not followed, nor is x.data: x.detach() is."
                raise CaptureError("a graph with explicit casts", found, advice=advice)


def _copy_placeholders(old: torch.fx.GraphModule, new: torch.fx.GraphModule) -> None:
    """Copy names, sources and metadata of the inputs, which AOTAutograd and Inductor read."""
    new.meta.update(old.meta)
    pairs = zip(old.graph.find_nodes(op="placeholder"), new.graph.find_nodes(op="placeholder"), strict=True)
    for before, after in pairs:
        after.meta = {**before.meta, "val": after.meta.get("val", before.meta.get("example_value"))}
        after.meta.pop("grapharg", None)  # Dynamo's own: it refers to a weight, which could not be swapped any more


class _GraphRunner(torch.fx.Interpreter):
    """Runs a Dynamo graph, or the body of a higher-order op in one, while make_fx records."""

    def __init__(
        self, graph: torch.fx.GraphModule, captured: Captured, outside: Outside, cached: bool, numbering: Numbering
    ) -> None:
        super().__init__(graph)
        self.numbering = numbering
        self.captured = captured
        self.outside = outside
        self.cached = [cached]
        self.current: torch.fx.Node | None = None
        self.batched = integer_vmaps(graph)

    def run_node(self, n: torch.fx.Node) -> Any:
        self.current = n
        if n in self.batched:
            return self._copy(n)
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        with at_site(node_site(n.meta, self.outside), number=partial(self.numbering.number, n.meta)):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in INFERENCE_MODE:
            advice = "Enter inference mode around the compiled call, or use torch.no_grad inside."
            raise CaptureError("a graph with explicit casts", f"{target.__name__} inside it", advice=advice)
        if target is state.ENTER_AUTOCAST:
            return self._enter(args)
        if target is state.EXIT_AUTOCAST:
            args[0].__exit__(None, None, None)
            self.cached.pop()
            return None
        if target in MARKS:
            return self._mark(target, args)
        if target is torch.ops.higher_order.wrap_with_autocast:
            return self._inline(args)
        if isinstance(target, dispatch.HigherOrderOperator) and any(
            isinstance(a, torch.fx.GraphModule) for a in dispatch.tree_leaves((args, kwargs))
        ):
            return self._higher_order(target, args, kwargs)
        if target is dispatch.ASSERT_METADATA:  # torch.export foresees another format for `torch.sparse.mm` than it has
            args, kwargs = args[:3], {**kwargs, "dtype": args[0].dtype}
        if target is torch.randint_like:  # drawn without autograd, as torch's function does; the op does not say so
            args, kwargs = dispatch.tree_map_only(torch.Tensor, torch.detach, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _enter(self, args: tuple[Any, ...]) -> Any:
        """Open torch's own region. make_fx has the weight cache off; the node says whether it would be on."""
        device, dtype, enabled, cache = args
        cache = self.cached[-1] if cache is None else cache
        region = state.GraphRegion(device, dtype, enabled, False)
        region.__enter__()
        node = next(iter(reversed(_tracer().graph.nodes)))
        node.args = (*node.args[:3], cache)
        self.cached.append(cache)
        return region

    def _mark(self, target: Callable[[str], None], args: tuple[Any, ...]) -> None:
        node = _tracer().create_node("call_function", target, args, {})
        node.meta["val"] = None
        if target is enter_marked:
            self.cached.append(find_marked(*args).prepared.facts.cache)
        else:
            self.cached.pop()
        with fx.without_pre_dispatch_mode():  # it would record torch's region inside ours, too
            target(*args)

    def _higher_order(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op with its bodies captured; one that casts by itself, with these casts before it and its bodies
        unchanged. Its results are those that Dynamo foresaw.
        """
        tracer, op = _tracer(), dispatch.higher_order_name(target)
        device = args[0].device.type if op in _CAST_ARGUMENTS else ""
        if device and torch.is_autocast_enabled(device):
            low, count = torch.get_autocast_dtype(device), _CAST_ARGUMENTS[op]
            args = (*(state.cast_for_autocast(a, device, low) for a in args[:count]), *args[count:])
        bodies = 0
        grad_mode = bool(args[0]) if op == "wrap_with_set_grad_enabled" else torch.is_grad_enabled()
        backward = _BACKWARD_BODIES.get(op)

        def registered(leaf: Any) -> Any:
            nonlocal bodies
            if not isinstance(leaf, torch.fx.GraphModule):
                return leaf
            if not device:
                off = state.autocast_off() if bodies == backward else nullcontext()
                bodies += 1
                in_bodies = self.numbering.in_bodies(self.current.meta if self.current else {}, op)
                with off, _not_recorded(), torch.set_grad_enabled(grad_mode), in_bodies:
                    leaf = self._body(leaf, keeps_cache=op in PLAIN_BODIES)
            tracer.root.register_module(tracer.get_fresh_qualname("body"), leaf)
            return leaf

        proxies = dispatch.tree_map(tracer.unwrap_proxy, dispatch.tree_map(registered, (args, kwargs)))
        return self._track(tracer.create_proxy("call_function", target, *proxies, name=op))

    def _track(self, out: Any) -> Any:
        """Return the foreseen results of the current node, known to the tracer as `out`."""
        with _not_recorded():
            example = dispatch.tree_map(_fresh, noted(self.current) if self.current else None)
        return track_tensor_tree(example, out, constant=None, tracer=_tracer())

    def _copy(self, node: torch.fx.Node) -> Any:
        """Copy a node inside a vmap unchanged. The tracer gets what Dynamo foresaw, or a proxy."""
        tracer = _tracer()
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        unwrapped = dispatch.tree_map(tracer.unwrap_proxy, (args, kwargs))
        out = tracer.create_proxy(node.op, node.target, *unwrapped, name=node.name)
        out.node.meta.update(node.meta)
        return self._track(out) if any(user not in self.batched for user in node.users) else out

    def _inline(self, args: tuple[Any, ...]) -> Any:
        """Run the calls of a region that torch.export wrapped, in the region, without the wrapper."""
        device, dtype, enabled, cache, body, *operands = args
        key = exported_key(body)
        if key is not None:
            self._mark(enter_marked, (key,))
        else:
            region = self._enter((device, dtype, enabled, cache))
        try:
            return _GraphRunner(body, self.captured, self.outside, self.cached[-1], self.numbering).run(*operands)
        finally:
            if key is not None:
                self._mark(exit_marked, (key,))
            else:
                region.__exit__(None, None, None)
                self.cached.pop()

    def _body(self, body: torch.fx.GraphModule, keeps_cache: bool) -> torch.fx.GraphModule:
        """Capture a body by itself. What gradients its inputs carry is not known: carries change from step to step."""
        values = [noted(n) for n in body.graph.find_nodes(op="placeholder")]
        runner = _GraphRunner(body, self.captured, self.outside, self.cached[-1], self.numbering)
        captured: torch.fx.GraphModule = fx.reenter_make_fx(runner.run)(*[_fresh(v) for v in values])
        captured.meta.update(body.meta)
        self.captured.note_flags(captured, [(True, keeps_cache and weight) for _, weight in map(_flags, values)])
        return captured


def integer_vmaps(graph: torch.fx.GraphModule) -> frozenset[torch.fx.Node]:
    """Return the nodes of each vmap of a graph in which nothing floats, such as those that make block masks.

    Pre-dispatch tracing cannot follow a vmap. Where nothing floats there is nothing to decide, and no need to.
    """
    nodes: list[torch.fx.Node] = []
    inside: list[torch.fx.Node] = []
    depth = 0
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", "")
        depth += name == "_vmap_increment_nesting"
        if depth:
            inside.append(node)
        if name == "_vmap_decrement_nesting" and depth:
            depth -= 1
            if not depth:
                nodes += [] if any(map(_floats, inside)) else inside
                inside = []
    return frozenset(nodes)


def _floats(node: torch.fx.Node) -> bool:
    values = [noted(n) for n in (node, *node.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)


def noted(node: torch.fx.Node) -> Any:
    """Return the value that was foreseen for a node, by Dynamo or by torch.export."""
    return node.meta.get("example_value", node.meta.get("val"))


def all_nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the nodes of a graph, and of the bodies of higher-order ops in it."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from module.graph.nodes


def fake_mode_of(graph: torch.fx.GraphModule, **options: Any) -> fx.FakeTensorMode:
    """Return the mode of the fake tensors that are noted beside a graph's nodes; or a new one, with these options."""
    modes = (value.fake_mode for node in graph.graph.nodes if isinstance(value := noted(node), fx.FakeTensor))
    return next(modes, None) or fx.FakeTensorMode(**options)


@contextmanager
def _not_recorded() -> Iterator[None]:
    with disable_proxy_modes_tracing(), fx.without_pre_dispatch_mode():
        yield


def _tracer() -> Any:
    mode = get_proxy_mode()
    return mode.tracer if mode is not None else None
