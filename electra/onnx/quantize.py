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
from electra.onnx.graph import remove_unused

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
    scaled: dict[str, tuple[str, NDArray]] = {}  # name of the scaled input and its factors, by the name of the input
    nodes = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[0] in largest and node.input[1] in weights:
            source, weight = node.input
            if source not in scaled:
                channels = largest[source]
                factors = np.maximum(1, channels / (OUTLIER * np.median(channels))).astype(np.float32)
                scaled[source] = f"{source}.scaled", factors
                if has_outliers(factors):
                    model.graph.initializer.append(numpy_helper.from_array(1 / factors, f"{source}.factors"))
                    inputs = [source, f"{source}.factors"]
                    nodes.append(helper.make_node("Mul", inputs, [f"{source}.scaled"], f"{source}.scaled"))
            name, factors = scaled[source]
            if has_outliers(factors):
                rows = numpy_helper.to_array(weights[weight]) * factors[:, None]
                model.graph.initializer.append(numpy_helper.from_array(rows, f"{node.name}.weight"))
                node.input[:] = [name, f"{node.name}.weight"]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    remove_unused(model)


def has_outliers(factors: NDArray) -> bool:
    return bool(factors.max() > 1 and np.isfinite(factors).all())
