"""ONNX files of a model in fp32 and int8, with the inputs and outputs of its class in `transformers`; traced graphs are
changed where that makes them faster in ONNX Runtime, or smaller."""

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from electra.data.tokenizer import TOKENIZER_FILES, TOKENIZER_JSON, load_tokenizer
from electra.errors import ConfigError, require_libraries
from electra.finetuning.tasks import Task
from electra.model.encoder import Encoder
from electra.model.storage import ONNX_FILE, copy_tokenizer_files
from electra.runfolder import write_file, write_stored

FOLDER, FP32, INT8 = *ONNX_FILE.parts, "model_quantized.onnx"
TASK = "task.json"  # of a fine-tuned model
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
HIDDEN = "last_hidden_state"
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
MAX_BYTES = 2**31 - 2**24  # of the weights: protobuf files are below 2 GiB
QKV = 3  # queries, keys and values
MASKED = -3.4e38  # added to the attention logits of padding; unlike -inf, no row of them has a softmax of NaN

OutputFunction = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


class ExportableModel(nn.Module):
    """A model with the inputs and outputs of its class in `transformers`."""

    def __init__(
        self,
        module: nn.Module,
        encoder: Encoder,
        compute_outputs: OutputFunction,  # of input_ids, attention_mask and segment_ids
        axes: tuple[str, ...] = ("batch", "length"),  # of these inputs
        int8_head: bool = False,  # whether an int8 file has all that follows the hidden states in int8, too
        has_segments: bool | None = None,  # whether segment ids are an input; by default of the classic style
        special_ids: tuple[int, int] | None = None,  # of [CLS] and [SEP], for the calibration of int8
    ) -> None:
        super().__init__()
        self.module, self.encoder, self.compute_outputs = module, encoder, compute_outputs
        self.axes, self.int8_head, self.special_ids = axes, int8_head, special_ids
        self.has_segments = not encoder.config.is_modern() if has_segments is None else has_segments

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The outputs, followed by the encoder's hidden states if they are not an output."""
        hidden: list[Tensor] = []
        hook = self.encoder.register_forward_hook(lambda encoder, inputs, output: hidden.append(output))
        try:
            segment_ids = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            outputs = self.compute_outputs(input_ids, attention_mask.bool(), segment_ids)
        finally:
            hook.remove()
        return outputs | {HIDDEN: hidden[0]}

    def sample_inputs(self, rows: int, length: int, is_padded: bool = True) -> dict[str, Tensor]:
        """Pairs of random texts of different lengths, padded at the end."""
        config, generator = self.encoder.config, torch.Generator().manual_seed(length)
        shape = (rows, *[2] * (len(self.axes) - 2), length)
        lengths = (length * torch.rand(shape[:-1], generator=generator)).long().clamp(min=min(2, length))
        lengths.view(-1)[: 1 if is_padded else None] = length
        attention_mask = torch.arange(length) < lengths[..., None]
        input_ids = torch.randint(config.vocab_size, shape, generator=generator)
        segment_ids = (2 * torch.arange(length) >= length).long().clamp(max=config.segments - 1).expand(shape)
        inputs = (input_ids.where(attention_mask, config.pad_id), attention_mask.long(), segment_ids)
        return dict(zip(INPUTS[: 2 + self.has_segments], inputs, strict=False))


def check_export_libraries() -> None:
    """Raise, with the command that installs them, if libraries for the export are missing."""
    require_libraries("--to onnx or page", LIBRARIES)


@dataclass(frozen=True, kw_only=True)
class OnnxTask:
    """What predictions need beside the ONNX file of a fine-tuned model."""

    task: Task
    length: int  # maximum length in tokens


def write_task(folder: Path, task: Task, length: int) -> None:
    """Write the task of a model that was exported: its outputs are in the unit of the scores, for one window of each
    text. Files of the training data are not named."""
    exported = replace(task, splits={}, scale=1.0, offset=0.0, windows=1)
    write_stored(folder / TASK, asdict(OnnxTask(task=exported, length=length)))


def write_tokenizer(source: Path, folder: Path, length: int) -> list[str]:
    """Copy the tokenizer files of the folder `source`; JavaScript libraries read no vocab.txt, so tokenizer.json is
    written if it is missing."""
    copied = copy_tokenizer_files(source, folder, length, for_transformers=True)
    if copied and TOKENIZER_JSON not in copied:
        tokenizer = load_tokenizer(folder)
        write_file(folder / TOKENIZER_JSON, tokenizer.library.to_str(pretty=True) + "\n")
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def write_onnx(model: ExportableModel, path: Path) -> None:
    """Write the graph of a model, in fp32, with dynamic batch size and length."""
    import onnx

    size = sum(4 * parameter.numel() for parameter in model.module.parameters())
    if size > MAX_BYTES:
        raise ConfigError(
            f"the model has {size / 2**30:.1f} GiB of weights; ONNX files are limited to 2 GiB; use --to huggingface"
        )
    traced = trace(model, model.encoder.config.positions)
    outputs = {output.name: output for output in traced.graph.output}
    del traced.graph.output[:]
    traced.graph.output.extend(outputs[name] for name in output_names(outputs))
    split_qkv_products(traced, model.encoder.config.heads)
    keep_fast_layer_norms(traced)
    remove_stack_traces(traced)
    onnx.save(traced, path)


def output_names(names: Iterable[str]) -> list[str]:
    """The outputs of a file: the hidden states only of a model without a head."""
    return [name for name in names if name != HIDDEN] or [HIDDEN]


def trace(model: ExportableModel, length: int) -> Any:
    """The ONNX graph of a model, whose outputs include the hidden states.

    `length` should be the longest: below its window, the local attention of a modern model is global, and the graph
    would have no window at any length."""
    inputs = model.sample_inputs(2, length)
    axes = dict(enumerate(model.axes))
    with torch.no_grad(), quiet():
        outputs = model(**model.sample_inputs(1, 2))
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes=dict.fromkeys(inputs, axes),
            input_names=list(inputs),
            output_names=list(outputs),
            custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: attention_nodes},
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def attention_nodes(query: Any, key: Any, value: Any, attn_mask: Any) -> Any:
    """ONNX nodes of softmax(Q Kᵀ / √K) V with a boolean mask.

    PyTorch's own translation compares every attention weight with NaN."""
    from onnxscript import opset20 as op

    scaled = op.Mul(query, op.Constant(value_float=1 / math.sqrt(query.shape[-1])))
    logits = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))  # [B, H, L, L]
    kept: Any = op.Constant(value_float=0.0)
    bias = op.Where(attn_mask, kept, op.Constant(value_float=MASKED))
    return op.MatMul(op.Softmax(op.Add(logits, bias), axis=-1), value)


def open_session(path: Path, outputs: Iterable[str] = ()) -> Any:
    """A session of ONNX Runtime with as many threads as PyTorch; `outputs` are tensors to add to its outputs."""
    import onnx
    import onnxruntime

    model = onnx.load(path)
    own = [output.name for output in model.graph.output]
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs if name not in own
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as OMP_WAIT_POLICY=PASSIVE
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch.onnx about itself, and the advice of ONNX Runtime."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# Changes of a traced graph.


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
