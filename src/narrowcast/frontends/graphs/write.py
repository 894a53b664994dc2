"""write: a program back into the graph that it was read from. The graph then has the program's casts, and no region."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from narrowcast.formats import fp32, parse_format
from narrowcast.frontends.graphs.capture import detached
from narrowcast.frontends.graphs.read import ReadGraph, replace_operands
from narrowcast.output.collector import collector_paused
from narrowcast.programs.passes import Pass, PassResult, run_passes
from narrowcast.programs.program import Block, Program, Step
from narrowcast.runtime.torch_bridge import DTYPES, defaults_after, find_op, id_with_dtype, op_facts
from narrowcast.runtime.torch_surface.dispatch import TO_COPY, OpOverload
from narrowcast.runtime.torch_surface.modules import STACK

CASTS = (TO_COPY, torch.ops.prims.convert_element_type.default)
_NOTES = ("stack_trace", STACK, "source_fn_stack", "custom", "seq_nr", "partitioner_tag")


def write_passes(
    reading: ReadGraph, passes: tuple[Pass, ...], assigns: bool = True, lowered: bool = False
) -> tuple[PassResult, dict[int, Node]]:
    """Run passes on what was read and write the outcome into its graph; with the nodes of its steps. Linear in size.

    assigns: decide first. lowered: as for `write_graph`.
    """
    with collector_paused():
        outcome = run_passes(reading.program, passes, reading.policies if assigns else None, id_with_dtype)
        return outcome, write_graph(reading, outcome.program, lowered)


def write_graph(reading: ReadGraph, program: Program, lowered: bool = False) -> dict[int, Node]:
    """Change the graph modules that `reading` was read from into what `program` says; the nodes of its steps.

    program: made from `reading.program` by edits alone. lowered: the graph is below the compiler's decompositions,
    where a cast is prims.convert_element_type.
    """
    nodes = dict(reading.nodes)
    blocks = _in_reading_order(program.body)
    before = _in_reading_order(reading.program.body)
    for module, old, new in zip(reading.modules, before, blocks, strict=True):
        if old.steps is not new.steps or old.returns != new.returns:
            _write_block(module.graph, old, new, nodes, lowered)
            module.graph.lint()
            module.recompile()
    return nodes


def _in_reading_order(body: Block) -> list[Block]:
    blocks = [body]
    for step in body.steps:
        for inner in step.blocks:
            blocks += _in_reading_order(inner)
    return blocks


def _write_block(graph: Graph, old: Block, new: Block, nodes: dict[int, Node], lowered: bool) -> None:
    known = {step.id: step for step in old.steps}
    cursor = next(iter(graph.find_nodes(op="placeholder")[::-1]), None)
    for step in new.steps:
        node = nodes.get(step.id)
        if node is None:
            node = nodes[step.id] = _insert(graph, step, nodes, cursor, lowered)
        else:
            _change(node, known[step.id], step, nodes)
        cursor = node
    if old.returns != new.returns:
        output = graph.output_node()
        for was, now in zip(old.returns, new.returns, strict=True):
            if was != now:
                output.replace_input_with(nodes[was], nodes[now])
    left = {step.id for step in new.steps}
    for step in reversed(old.steps):
        if step.id not in left:
            graph.erase_node(nodes[step.id])
    if [s.id for s in old.steps if s.id in left] != [s.id for s in new.steps if s.id in known]:
        _order(graph, new, nodes)


def _insert(graph: Graph, step: Step, nodes: dict[int, Node], cursor: Node | None, lowered: bool) -> Node:
    source = nodes[step.operands[0].value]
    dtype = DTYPES[parse_format(step.value.type)]
    site = graph.inserting_after(cursor) if cursor is not None else graph.inserting_before(next(iter(graph.nodes)))
    with site:
        if lowered:
            node = graph.call_function(CASTS[1], (source, dtype))
        else:
            node = graph.call_function(CASTS[0], (source,), {"dtype": dtype})
    value = source.meta.get("val", source.meta.get("example_value"))
    if isinstance(value, torch.Tensor):
        node.meta["val"] = detached(value).to(dtype)
    return node


def _change(node: Node, old: Step, new: Step, nodes: dict[int, Node]) -> None:
    if old.operands != new.operands:
        _note(old, new, node, nodes)
        if isinstance(node.target, OpOverload):
            replace_operands(node, [nodes[o.value] for o in new.operands])
        else:
            for was, now in zip(old.operands, new.operands, strict=True):
                if was.value != now.value:
                    node.replace_input_with(nodes[was.value], nodes[now.value])
    value = node.meta.get("val")
    if old.value.type != new.value.type and isinstance(value, torch.Tensor):  # its result is cast behind it now
        node.meta["val"] = detached(value).to(DTYPES[parse_format(new.value.type)])
    if f"dtype={fp32}" in new.given - old.given and isinstance(node.target, OpOverload):
        _set_dtype(node, node.target, new.op)


def _note(old: Step, new: Step, node: Node, nodes: dict[int, Node]) -> None:
    """Give new casts the place of the call that they are for."""
    for was, now in zip(old.operands, new.operands, strict=True):
        cast = nodes[now.value]
        if was.value != now.value and cast.target in CASTS and "stack_trace" not in cast.meta:
            cast.meta.update({key: node.meta[key] for key in _NOTES if key in node.meta})


def _set_dtype(node: Node, op: OpOverload, wanted: str) -> None:
    other = find_op(wanted)
    if other is not None and other is not op:
        node.args = (*node.args, *defaults_after(op, len(node.args)))
        node.target = other
    position = op_facts(op).dtype_position
    if position is not None and position < len(node.args):
        node.update_arg(position, torch.float32)
    else:
        node.update_kwarg("dtype", torch.float32)


def _order(graph: Graph, block: Block, nodes: dict[int, Node]) -> None:
    """Put the nodes in the order of the steps; what is no step (bodies of higher-order ops) comes first."""
    cursor: Node | None = None
    ours = {nodes[step.id] for step in block.steps}
    for node in graph.nodes:
        if node not in ours and node.op != "output":
            cursor = node
    for step in block.steps:
        node = nodes[step.id]
        if cursor is not None and cursor is not node:
            cursor.append(node)
        cursor = node
