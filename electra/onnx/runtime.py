"""Models in ONNX Runtime with the interface of ours in PyTorch, from a folder that `electra export --to onnx` wrote."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from electra.data.tokenizer import load_tokenizer
from electra.errors import ConfigError, DataError, require_libraries
from electra.finetuning.kinds import KINDS
from electra.finetuning.models import TaskModel
from electra.finetuning.predict import Predictor
from electra.huggingface.convert import from_huggingface_config
from electra.huggingface.names import get_architecture
from electra.model.config import EncoderConfig
from electra.model.electra import Discriminator, Electra, Generator
from electra.model.encoder import Encoder
from electra.onnx.export import FOLDER, FP32, HIDDEN, INT8, TASK, OnnxTask, open_session
from electra.runfolder import CONFIG, damaged_file_error, read_json, read_stored


class OnnxSession:
    """An ONNX file with its inputs and outputs as tensors."""

    def __init__(self, folder: Path, int8: bool) -> None:
        require_libraries("a folder of electra export --to onnx", ("onnx", "onnxruntime"))
        file = folder / FOLDER / (INT8 if int8 else FP32)
        if not file.exists():
            raise DataError(f"{folder} has no {FOLDER}/{file.name}; export it with --to onnx{' --int8' * int8}")
        try:
            self.session = open_session(file, [HIDDEN])
        except Exception as error:  # those of protobuf and ONNX Runtime have no common class
            raise damaged_file_error(file, " ".join(str(error).split()), "export it again") from None
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]

    def run(
        self,
        outputs: Iterable[str],
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Some of the outputs by name."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        segments = torch.zeros_like(input_ids) if segment_ids is None else segment_ids
        tensors = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": segments}
        names = list(outputs)
        arrays = self.session.run(names, {name: tensors[name].numpy() for name in self.inputs})
        return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

    def logits(self, *inputs: Any) -> Tensor:
        return self.run(["logits"], *inputs)["logits"]


class OnnxEncoder(Encoder):
    """The hidden states of an ONNX file."""

    def __init__(self, config: EncoderConfig, session: OnnxSession) -> None:
        nn.Module.__init__(self)
        self.config, self.output_width, self.session = config, config.width, session

    def forward(self, input_ids: Tensor, *inputs: Any, **named_inputs: Any) -> Tensor:
        return self.session.run([HIDDEN], input_ids, *inputs)[HIDDEN]

    def hidden_states(self, *inputs: Any, **named_inputs: Any) -> NoReturn:
        raise ConfigError("an ONNX file has the states of the last layer only; use the folder it was exported from")


class OnnxDiscriminator(Discriminator):
    """The logits of an ONNX file; the modern style has one for each label, original and replaced."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        nn.Module.__init__(self)
        self.encoder = encoder

    def forward(self, input_ids: Tensor, *inputs: Any, **named_inputs: Any) -> Tensor:
        assert isinstance(self.encoder, OnnxEncoder)
        logits = self.encoder.session.logits(input_ids, *inputs)
        return logits[..., 1] - logits[..., 0] if logits.ndim == 3 else logits


class OnnxGenerator(Generator):
    """The logits of an ONNX file, which has those of all tokens."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        nn.Module.__init__(self)
        self.encoder = encoder

    def forward(self, input_ids: Tensor, *inputs: Any, positions: Tensor | None = None, **named_inputs: Any) -> Any:
        assert isinstance(self.encoder, OnnxEncoder)
        assert positions is not None
        logits = self.encoder.session.logits(input_ids, *inputs)  # [B, L, V]
        return SimpleNamespace(logits=logits[torch.arange(len(logits))[:, None], positions])


class OnnxElectra(Electra):
    """The generator or the discriminator of an ONNX folder."""

    def __init__(self, folder: Path, int8: bool) -> None:
        nn.Module.__init__(self)
        settings = read_json(folder / CONFIG)
        architecture = get_architecture(settings, folder)
        encoder = OnnxEncoder(from_huggingface_config(settings, architecture, folder), OnnxSession(folder, int8))
        is_generator = architecture.part == "generator"
        self.has_head = bool(architecture.head)
        self.generator = OnnxGenerator(encoder) if is_generator else None
        self.discriminator = None if is_generator else OnnxDiscriminator(encoder)


class OnnxPredictor(Predictor):
    """The fine-tuned model of an ONNX folder."""

    def __init__(self, folder: Path, int8: bool) -> None:
        stored = read_stored(folder / TASK, OnnxTask)
        self.session = OnnxSession(folder, int8)
        self.model_class: type[TaskModel] = KINDS[stored.task.kind].model(stored.task)
        self.folders, self.models = [folder], [self.compute_logits]
        self.device, self.precision = torch.device("cpu"), torch.float32
        self.task, self.length = stored.task, stored.length
        self.tokenizer = load_tokenizer(folder)
        self.pad_id = self.tokenizer.vocabulary.pad_id
        self.batch_size, self.max_tokens = 64, None
        self.rows = self.truncated = 0

    def compute_logits(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor, targets: Tensor | None
    ) -> Tensor:
        names = [name for name in self.session.outputs if name != HIDDEN]
        outputs = self.session.run(names, input_ids, attention_mask, segment_ids)
        return self.model_class.logits_of_outputs(outputs, attention_mask, segment_ids, targets)
