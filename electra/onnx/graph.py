"""Changes to a traced graph that make it faster in ONNX Runtime, or smaller."""

from collections import defaultdict
from typing import Any

import numpy as np

QKV = 3  # queries, keys and values


def split_qkv_products(model: Any, heads: int) -> None:
    """Compute queries, keys and values by three matrix products instead of one.

    ONNX Runtime copies the parts of one product's output; the weights are parted here once."""
    from onnx import helper, numpy_helper

    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    consumers = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            consumers[name].append(node)
    nodes: dict[str, list[Any]] = {}  # by the output that they replace
    for node in model.graph.node:  # [B, L, 3 · D] to [B, L, 3, H, K], of which each slice is one of the three
        slices = consumers[node.output[0]]
        if node.op_type != "Reshape" or [each.op_type for each in slices] != ["Slice"] * QKV:
            continue
        before = producers[node.input[0]]
        product = producers[before.input[0]] if before.op_type == "Add" else before
        tensors = {"MatMul": product.input[1]} | ({"Add": before.input[1]} if before.op_type == "Add" else {})
        for part in slices:
            (squeeze,) = consumers[part.output[0]]
            index, output = int(weights[part.input[1]][0]), squeeze.output[0]
            replaced, last = [], product.input[0]
            for op, tensor in tensors.items():
                name = f"{output}.{op}"
                values = np.split(weights[tensor], QKV, axis=-1)[index]
                model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values), f"{name}.tensor"))
                replaced.append(helper.make_node(op, [last, f"{name}.tensor"], [name], name))
                last = name
            replaced.append(helper.make_node("Reshape", [last, "qkv_shape"], [output], f"{output}.Reshape"))
            nodes[output] = replaced
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, heads, -1]), "qkv_shape"))
    new = [each for node in model.graph.node for each in nodes.get(node.output[0], [node])]
    del model.graph.node[:]
    model.graph.node.extend(new)
    remove_unused(model)


def remove_unused(model: Any) -> None:
    """Remove nodes and weights that no output depends on."""
    used, kept = {output.name for output in model.graph.output}, []
    for node in reversed(model.graph.node):  # against the topological order
        if used.intersection(node.output):
            used.update(node.input)
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(kept))
    weights = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(weights)


def keep_fast_layer_norms(model: Any) -> None:
    """Write the sum before a LayerNorm as `Sum` instead of `Add`.

    ONNX Runtime would fuse Add and LayerNorm to one operation, which is slower on a CPU (docs/log.md)."""
    producers = {name: node for node in model.graph.node for name in node.output}
    for node in model.graph.node:
        before = producers.get(node.input[0]) if node.op_type == "LayerNormalization" else None
        if before is not None and before.op_type == "Add":
            before.op_type = "Sum"


def remove_stack_traces(model: Any) -> None:
    """Remove what torch.onnx notes about the origin of each node: source lines, with paths of this computer."""
    for each in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del each.metadata_props[:]
