"""int8 weights for an ONNX file: dynamic quantisation, per channel, after outlier channels were scaled down.

ONNX Runtime quantises the input of a matrix product with one scale for the whole tensor. In trained models a few
channels are many times as large as the others and make that scale coarse. Their inputs are divided, and the rows of the
weights multiplied, by a constant (as in SmoothQuant, arXiv 2211.10438, but for outlier channels only), which leaves
the product unchanged.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.onnx.export import HIDDEN, ExportableModel, open_session, quiet

OUTLIER = 3.0  # a channel is scaled down to this multiple of the median of all channels
CALIBRATION_ROWS, CALIBRATION_LENGTH = 16, 128


def write_int8(model: ExportableModel, path: Path, output: Path) -> None:
    """Quantise the weights of an ONNX file, those of the head only with `int8_head`."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path)
    excluded = [] if model.int8_head else head_nodes(graph)
    scale_outlier_channels(graph, largest_inputs(model, path, excluded))
    del graph.graph.value_info[:]  # ONNX Runtime transposes weights of 2D products (Gemm), whose shapes are there, too
    scaled = output.with_suffix(".scaled")
    onnx.save(graph, scaled)
    with quiet():
        # weights of 7 bits: with 8, sums of two products overflow in 16 bits on CPUs without VNNI (docs/log.md)
        quantize_dynamic(
            scaled,
            output,
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded,
        )
    scaled.unlink()


def head_nodes(model: Any) -> list[str]:
    """The names of the nodes that follow the hidden states."""
    tensors, names = {HIDDEN}, []
    for node in model.graph.node:  # in topological order
        if tensors.intersection(node.input):
            tensors.update(node.output)
            names.append(node.name)
    return names


def weight_products(model: Any, excluded: list[str]) -> list[Any]:
    """The matrix products with a weight."""
    weights = {each.name for each in model.graph.initializer}
    nodes = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights]
    return [node for node in nodes if node.name not in excluded]


def largest_inputs(model: ExportableModel, path: Path, excluded: list[str]) -> dict[str, NDArray]:
    """The largest absolute value of each channel of the inputs of matrix products, by name, on random tokens."""
    import onnx

    names = sorted({node.input[0] for node in weight_products(onnx.load(path), excluded)})
    session = open_session(path, names)
    length = min(CALIBRATION_LENGTH, model.encoder.config.positions)
    inputs = model.sample_inputs(CALIBRATION_ROWS, length, is_padded=False)
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return {
        name: np.abs(array).max(axis=tuple(range(array.ndim - 1))) for name, array in zip(names, arrays, strict=True)
    }


def scale_outlier_channels(model: Any, largest: dict[str, NDArray]) -> None:
    """Divide outlier channels before the matrix products with weights, and multiply the rows of the weights."""
    from onnx import helper, numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[0] in largest and node.input[1] in weights:
            channels = largest[node.input[0]]
            factors = np.maximum(1, channels / (OUTLIER * np.median(channels))).astype(np.float32)
            if factors.max() > 1 and np.isfinite(factors).all():
                weight = numpy_helper.to_array(weights[node.input[1]])
                names = [f"{node.name}.{suffix}" for suffix in ("weight", "factors", "input")]
                model.graph.initializer.extend(
                    [
                        numpy_helper.from_array(weight * factors[:, None], names[0]),
                        numpy_helper.from_array(1 / factors, names[1]),
                    ]
                )
                nodes.append(helper.make_node("Mul", [node.input[0], names[1]], [names[2]], names[2]))
                node.input[:] = [names[2], names[0]]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    remove_unused_weights(model)


def remove_unused_weights(model: Any) -> None:
    used = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
