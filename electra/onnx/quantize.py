"""int8 weights for an ONNX file: dynamic quantisation, per channel, after outlier channels were scaled down where that
makes the products more exact.

ONNX Runtime quantises the input of a matrix product with one scale for the whole tensor. In trained models a few
channels are many times as large as the others and make that scale coarse. Their inputs are divided, and the rows of the
weights multiplied, by a constant (as in SmoothQuant, arXiv 2211.10438, but for outlier channels only), which leaves
the product unchanged. It makes the quantised weights coarser, so that of several thresholds, one of them infinite, the
one with the least error on random tokens is taken.
"""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.onnx.export import HIDDEN, ExportableModel, open_session, quiet
from electra.onnx.graph import remove_unused

OUTLIERS = (np.inf, 10.0, 7.0, 5.0, 4.0, 3.0, 2.0)  # channels are reduced to a multiple of the median of all channels
CALIBRATION_ROWS, CALIBRATION_LENGTH = 16, 128
CALIBRATION_TOKENS = 512  # on which errors are compared
MAX_ERROR = 5e-4  # of a product, squared and relative to its size; products with a larger one stay in fp32


def write_int8(model: ExportableModel, path: Path, output: Path) -> None:
    """Quantise the weights of an ONNX file, those of the head only with `int8_head`."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    graph = onnx.load(path)
    excluded = [] if model.int8_head else head_nodes(graph)
    excluded += scale_outlier_channels(graph, calibration_inputs(model, path, excluded))
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


def calibration_inputs(model: ExportableModel, path: Path, excluded: list[str]) -> dict[str, NDArray]:
    """The inputs [tokens, channels] of matrix products, by name, on random tokens."""
    import onnx

    names = sorted({node.input[0] for node in weight_products(onnx.load(path), excluded)})
    session = open_session(path, names)
    length = min(CALIBRATION_LENGTH, model.encoder.config.positions)
    inputs = model.sample_inputs(CALIBRATION_ROWS, length, is_padded=False)
    arrays = session.run(names, {name: tensor.numpy() for name, tensor in inputs.items()})
    return {name: array.reshape(-1, array.shape[-1]) for name, array in zip(names, arrays, strict=True)}


def choose_factors(inputs: NDArray, weights: list[NDArray]) -> NDArray | None:
    """What to divide the channels of the inputs [tokens, channels] of some products by, 1 if it is no outlier; None if
    the error is too large for int8 with any factors."""
    channels = np.abs(inputs).max(0)
    ratios = channels / np.median(channels)
    if not np.isfinite(ratios).all():
        return None
    candidates = [np.maximum(1, ratios / outlier).astype(np.float32) for outlier in OUTLIERS]
    tokens = inputs[:: max(1, len(inputs) // CALIBRATION_TOKENS)]
    errors = [max(quantisation_error(tokens, each, factors) for each in weights) for factors in candidates]
    return candidates[int(np.argmin(errors))] if min(errors) <= MAX_ERROR else None


def quantisation_error(inputs: NDArray, weight: NDArray, factors: NDArray) -> float:
    """The error of a product in int8, relative to its size, if outlier channels are divided by factors."""
    scaled, rows = inputs / factors, weight * factors[:, None]
    low, high = min(0.0, scaled.min()), max(0.0, scaled.max())
    step, steps = (high - low) / 255, np.maximum(np.abs(rows).max(0), 1e-30) / 63
    exact = inputs @ weight
    product = np.round(scaled / step) * step @ (np.round(rows / steps) * steps)
    return float(np.square(product - exact).sum() / np.square(exact).sum())


def scale_outlier_channels(model: Any, inputs: dict[str, NDArray]) -> list[str]:
    """Divide outlier channels before the matrix products with weights, and multiply the rows of the weights; the names
    of products that are to stay in fp32."""
    from onnx import helper, numpy_helper

    weights = {each.name: each for each in model.graph.initializer}
    products: dict[str, list[Any]] = {}  # by their input
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[0] in inputs and node.input[1] in weights:
            products.setdefault(node.input[0], []).append(node)
    inexact: list[str] = []
    scalings: dict[str, Any] = {}  # nodes by the name of the product that they precede
    for source, nodes in products.items():
        matrices = [numpy_helper.to_array(weights[node.input[1]]) for node in nodes]
        factors = choose_factors(inputs[source], matrices)
        if factors is None:
            inexact += [node.name for node in nodes]
        if factors is None or factors.max() <= 1:
            continue
        scaled = f"{source}.scaled"
        model.graph.initializer.append(numpy_helper.from_array(1 / factors, f"{source}.factors"))
        scalings[nodes[0].name] = helper.make_node("Mul", [source, f"{source}.factors"], [scaled], scaled)
        for node, matrix in zip(nodes, matrices, strict=True):
            rows = numpy_helper.from_array(matrix * factors[:, None], f"{node.name}.weight")
            model.graph.initializer.append(rows)
            node.input[:] = [scaled, rows.name]
    ordered = [[scalings[node.name], node] if node.name in scalings else [node] for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(chain.from_iterable(ordered))
    remove_unused(model)
    return inexact
