"""int8 weights for an ONNX file: dynamic quantisation, weights per output channel, embeddings per token.

ONNX Runtime quantises the input of a matrix product with one scale for the whole tensor. In trained models a few
channels, and a few tokens such as [SEP], are many times as large as the others and make that scale coarse. Outlier
channels of the input are divided, and the rows of the weights multiplied, by a constant (as in SmoothQuant, arXiv
2211.10438, but for outlier channels only); where it helps, each token is divided by its largest channel and the product
multiplied by it. Both leave the product unchanged. The products with the largest effect on the hidden states stay in
fp32.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra.onnx.export import HIDDEN, ExportableModel, open_session, remove_unused

OUTLIERS = (np.inf, 10.0, 7.0, 5.0, 4.0, 3.0, 2.0, 1.5, 1.0)  # channels are reduced to a multiple of their median
MIN_GAIN = 1.1  # by how much the error must be less for a scaling that takes more time
FP32_FRACTION = 0.1  # of the multiplications with weights of the encoder that stay in fp32
CALIBRATION_ROWS, CALIBRATION_LENGTH = 16, 128
CALIBRATION_TOKENS = 512  # on which errors are compared
EFFECT_ROWS = 4  # on which effects are compared
MAX_WEIGHT = 127
DAMPING = 0.01  # of the second moments of inputs, as a fraction of their mean
BLOCK = 128  # rows that are compensated together
MAX_PAIR = 128  # of two weights with the same sign, see `quantise_weight`
TINY = 1e-30


@dataclass(frozen=True)
class Scaling:
    """How the input of some products is scaled before it is quantised."""

    factors: NDArray  # [channels] that the input is divided by; 1 for channels that are no outliers
    by_token: bool  # whether each token is divided by its largest channel


@dataclass(frozen=True)
class QuantisedProducts:
    """Products with the same input."""

    scaling: Scaling
    weights: list[tuple[NDArray, NDArray]]  # int8 [inputs, outputs] and steps [outputs], in the order of the graph


def write_int8(model: ExportableModel, path: Path, output: Path) -> None:
    """Quantise the weights of an ONNX file, those of the head only with `int8_head`."""
    import onnx

    graph = onnx.load(path)
    products = group_products(graph, excluded=[] if model.int8_head else head_nodes(graph))
    sample = calibration_sample(model)
    quantised = quantise_weights(products, path, sample)
    kept = choose_fp32(quantised, path, sample, output.with_suffix(".switched"))
    quantise_products(graph, {source: each for source, each in quantised.items() if source not in kept})
    quantise_embeddings(graph)
    remove_unused(graph)
    del graph.graph.value_info[:]
    onnx.save(graph, output)


def head_nodes(model: Any) -> list[str]:
    """The names of the nodes that follow the hidden states."""
    tensors, names = {HIDDEN}, []
    for node in model.graph.node:  # in topological order
        if tensors.intersection(node.input):
            tensors.update(node.output)
            names.append(node.name)
    return names


def find_weights(model: Any) -> dict[str, NDArray]:
    """The matrices of a graph by name."""
    from onnx import TensorProto, numpy_helper

    stored = [each for each in model.graph.initializer if each.data_type == TensorProto.FLOAT and len(each.dims) == 2]
    return {each.name: numpy_helper.to_array(each) for each in stored}


def group_products(model: Any, excluded: Collection[str]) -> dict[str, list[NDArray]]:
    """The weights of matrix products by the name of their input."""
    weights = find_weights(model)
    products: dict[str, list[NDArray]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights and node.name not in excluded:
            products.setdefault(node.input[0], []).append(weights[node.input[1]])
    return products


def calibration_sample(model: ExportableModel) -> dict[str, NDArray]:
    """Inputs of an ONNX file: pairs of texts of random tokens, between [CLS] and [SEP] if their ids are known."""
    length = min(CALIBRATION_LENGTH, model.encoder.config.positions)
    inputs = model.sample_inputs(CALIBRATION_ROWS, length, is_padded=False)
    if model.special_ids is not None:
        cls_id, sep_id = model.special_ids
        inputs["input_ids"][..., [length // 2 - 1, length - 1]] = sep_id
        inputs["input_ids"][..., 0] = cls_id
    return {name: tensor.numpy() for name, tensor in inputs.items()}


def quantise_weights(
    products: dict[str, list[NDArray]], path: Path, sample: dict[str, NDArray]
) -> dict[str, QuantisedProducts]:
    """Scale and quantise the weights of products by their inputs in an ONNX file."""
    names = list(products)
    quantised = {}
    for name, array in zip(names, open_session(path, names).run(names, sample), strict=True):
        inputs = array.reshape(-1, array.shape[-1])
        scaling = choose_scaling(inputs, products[name])
        factors, scaled = scaling.factors[:, None], inputs / scaling.factors
        weights = [quantise_calibrated(weight * factors, scaled) for weight in products[name]]
        quantised[name] = QuantisedProducts(scaling, weights)
    return quantised


def choose_scaling(inputs: NDArray, weights: list[NDArray]) -> Scaling:
    """The scaling of the inputs [tokens, channels] of some products with the least error; slower ones need a gain."""
    channels = np.abs(inputs).max(0)
    ratios = channels / max(np.median(channels), TINY)
    unscaled, *scaled = [np.maximum(1, ratios / outlier).astype(np.float32) for outlier in OUTLIERS]
    tokens = inputs[:: max(1, len(inputs) // CALIBRATION_TOKENS)]
    best, least = Scaling(unscaled, by_token=False), np.inf
    for candidates, by_token in (([unscaled], False), (scaled, False), ([unscaled], True), (scaled, True)):
        scalings = [Scaling(factors, by_token) for factors in candidates]
        errors = [max(quantisation_error(tokens, weight, each) for weight in weights) for each in scalings]
        if MIN_GAIN * min(errors) < least:
            best, least = scalings[int(np.argmin(errors))], min(errors)
    return best


def quantisation_error(inputs: NDArray, weight: NDArray, scaling: Scaling) -> float:
    """The squared error of a product in int8, relative to its size."""
    scaled = inputs / scaling.factors
    largest = np.maximum(np.abs(scaled).max(-1, keepdims=True), TINY) if scaling.by_token else np.float32(1)
    scaled /= largest
    step = max((max(0.0, scaled.max()) - min(0.0, scaled.min())) / 255, TINY)
    rows, steps = quantise_weight(weight * scaling.factors[:, None])
    exact = inputs @ weight
    product = np.round(scaled / step) * step * largest @ (rows * steps)
    return float(np.square(product - exact).sum() / max(np.square(exact).sum(), TINY))


def quantise_weight(weight: NDArray) -> tuple[NDArray, NDArray]:
    """A weight [inputs, outputs] in int8, and its steps [outputs].

    x86 processors without VNNI add two adjacent products in 16 bits. They do not saturate if two weights of the same
    sign have a sum of at most 128, as inputs are at most 255."""
    even = np.pad(weight, ((0, len(weight) % 2), (0, 0)))
    pairs = [np.maximum(0, each[::2]) + np.maximum(0, each[1::2]) for each in (even, -even)]
    largest_pair = np.maximum(*pairs).max(0)
    steps = np.maximum(np.abs(weight).max(0) / MAX_WEIGHT, largest_pair / (MAX_PAIR - 1))  # both may be rounded up
    steps = np.maximum(steps, TINY).astype(np.float32)
    return np.round(weight / steps).astype(np.int8), steps


def quantise_calibrated(weight: NDArray, inputs: NDArray) -> tuple[NDArray, NDArray]:
    """A weight in int8 as `quantise_weight`, with the error of each row, for these inputs [tokens, channels],
    compensated by the rows that follow (GPTQ, arXiv 2210.17323)."""
    steps = quantise_weight(weight)[1]
    moments = inputs.T.astype(np.float64) @ inputs
    moments += DAMPING * max(np.trace(moments) / len(moments), TINY) * np.eye(len(moments))
    upper = np.linalg.cholesky(np.linalg.inv(moments)).T
    upper = (upper / np.diag(upper)[:, None]).astype(np.float32)
    left, rows = weight / steps, np.zeros(weight.shape, np.int8)
    for start in range(0, len(left), BLOCK):
        block = slice(start, start + BLOCK)
        errors = np.zeros_like(left[block])
        for row in range(start, min(start + BLOCK, len(left))):
            low, high = np.float32(-MAX_WEIGHT), np.float32(MAX_WEIGHT)
            if row % 2:
                before = rows[row - 1].astype(np.float32)
                low = np.maximum(low, -MAX_PAIR - np.minimum(before, 0))
                high = np.minimum(high, MAX_PAIR - np.maximum(before, 0))
            rows[row] = np.clip(np.round(left[row]), low, high)
            errors[row - start] = left[row] - rows[row]
            left[row + 1 : start + BLOCK] -= np.outer(upper[row, row + 1 : start + BLOCK], errors[row - start])
        left[start + BLOCK :] -= upper[block, start + BLOCK :].T @ errors
    return rows, steps


def choose_fp32(
    quantised: dict[str, QuantisedProducts], path: Path, sample: dict[str, NDArray], switched: Path
) -> set[str]:
    """The inputs of the products that stay in fp32: those which, in int8, change the hidden states most for their size.

    They are compared by a file `switched` in which each can be switched to int8."""
    import onnx

    graph = onnx.load(path)
    switches = quantise_products(graph, quantised, has_switches=True)
    onnx.save(graph, switched)
    session = open_session(switched, [HIDDEN])
    switched.unlink()
    rows = {name: array[:EFFECT_ROWS] for name, array in sample.items()}
    off = {name: np.array(False) for name in switches.values()}

    def hidden_states(switches: dict[str, NDArray]) -> NDArray:
        return session.run([HIDDEN], rows | off | switches)[0]

    exact = hidden_states({})
    sizes = {source: sum(weight.size for weight, _ in each.weights) for source, each in quantised.items()}
    effects = {
        source: np.square(hidden_states({switch: np.array(True)}) - exact).sum() / sizes[source]
        for source, switch in switches.items()
    }
    kept: set[str] = set()
    left = FP32_FRACTION * sum(size for source, size in sizes.items() if effects[source] > 0)  # 0 in heads
    for source in sorted(effects, key=lambda name: -effects[name]):
        if effects[source] > 0 and sizes[source] <= left:
            left -= sizes[source]
            kept.add(source)
    return kept


class GraphWriter:
    """New nodes for a graph, in topological order."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.nodes: list[Any] = []

    def add(self, operator: str, inputs: Sequence[str], *outputs: str, **attributes: Any) -> str:
        """Add a node; the name of its first output."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, outputs, f"{outputs[0]}/{operator}", **attributes))
        return outputs[0]

    def store(self, array: NDArray, name: str) -> str:
        from onnx import numpy_helper

        self.model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def finish(self) -> None:
        del self.model.graph.node[:]
        self.model.graph.node.extend(self.nodes)


def quantise_products(
    model: Any, quantised: dict[str, QuantisedProducts], has_switches: bool = False
) -> dict[str, str]:
    """Replace products in the graph by those in int8; with switches, only where an input of the graph is true, whose
    name is returned for the input of the products."""
    from onnx import TensorProto, helper

    weights, writer = find_weights(model), GraphWriter(model)
    switches = {source: f"{source}.is_int8" for source in quantised} if has_switches else {}
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in switches.values())
    weights_left: dict[str, Iterator[tuple[NDArray, NDArray]]] = {}
    for node in model.graph.node:
        source = node.input[0] if node.op_type == "MatMul" and node.input[1] in weights else ""
        if source not in quantised:
            writer.nodes.append(node)
            continue
        scaling = quantised[source].scaling
        if source not in weights_left:
            weights_left[source] = iter(quantised[source].weights)
            add_quantised_input(writer, source, scaling)
        output = node.output[0]
        product = f"{output}.product" if has_switches else output
        add_quantised_product(writer, source, scaling, *next(weights_left[source]), product)
        if has_switches:
            node.output[0] = f"{output}.fp32"
            writer.nodes.append(node)
            writer.add("Where", [switches[source], product, node.output[0]], output)
    writer.finish()
    return switches


def add_quantised_input(writer: GraphWriter, source: str, scaling: Scaling) -> None:
    """Add the int8 values of an input, their step and their zero point."""
    last = source
    if scaling.factors.max() > 1:
        factors = writer.store(1 / scaling.factors, f"{source}.factors")
        last = writer.add("Mul", [last, factors], f"{source}.scaled")
    if scaling.by_token:  # without Abs, which would write the whole tensor once more
        axis = writer.store(np.array([-1]), f"{source}.axis")
        tiny = writer.store(np.array([TINY], np.float32), f"{source}.tiny")
        high = writer.add("ReduceMax", [last, axis], f"{source}.high")
        low = writer.add("Neg", [writer.add("ReduceMin", [last, axis], f"{source}.low")], f"{source}.negative")
        last = writer.add("Div", [last, writer.add("Max", [high, low, tiny], f"{source}.largest")], f"{source}.tokens")
    writer.add("DynamicQuantizeLinear", [last], f"{source}.int8", f"{source}.step", f"{source}.zero")


def add_quantised_product(
    writer: GraphWriter, source: str, scaling: Scaling, weight: NDArray, steps: NDArray, output: str
) -> None:
    """Add the product of a quantised input with a weight, in nodes that ONNX Runtime fuses to one."""
    from onnx import TensorProto

    tensors = [f"{source}.int8", writer.store(weight, f"{output}.weight"), f"{source}.zero"]
    zeros = writer.store(np.zeros(len(steps), np.int8), f"{output}.zeros")
    sums = writer.add("MatMulInteger", [*tensors, zeros], f"{output}.sums")
    values = writer.add("Cast", [sums], f"{output}.values", to=TensorProto.FLOAT)
    scales = writer.add("Mul", [f"{source}.step", writer.store(steps, f"{output}.steps")], f"{output}.scales")
    if scaling.by_token:
        product = writer.add("Mul", [values, scales], f"{output}.unscaled")
        writer.add("Mul", [product, f"{source}.largest"], output)
    else:
        writer.add("Mul", [values, scales], output)


def quantise_embeddings(model: Any) -> None:
    """Store embeddings in int8, with a step for each row; a generator's head transposes them, too."""
    from onnx import TensorProto

    weights, writer = find_weights(model), GraphWriter(model)
    tables = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}.intersection(weights)
    for table in sorted(tables):
        steps = np.maximum(np.abs(weights[table]).max(-1, keepdims=True) / MAX_WEIGHT, TINY).astype(np.float32)
        writer.store(np.round(weights[table] / steps).astype(np.int8), f"{table}.int8")
        writer.store(steps, f"{table}.steps")
    for node in model.graph.node:
        if node.op_type not in ("Gather", "Transpose") or node.input[0] not in tables:
            writer.nodes.append(node)
            continue
        table, output = node.input[0], node.output[0]
        rows, scales = f"{table}.int8", f"{table}.steps"
        if node.op_type == "Gather":
            rows = writer.add("Gather", [rows, node.input[1]], f"{output}.int8")
            scales = writer.add("Gather", [scales, node.input[1]], f"{output}.scales")
        values = writer.add("Cast", [rows], f"{output}.values", to=TensorProto.FLOAT)
        if node.op_type == "Gather":
            writer.add("Mul", [values, scales], output)
        else:
            node.input[0] = writer.add("Mul", [values, scales], f"{output}.rows")
            writer.nodes.append(node)
    writer.finish()
