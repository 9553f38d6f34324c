"""Device, precision and compilation."""

import pytest
import torch

from electra.errors import ConfigError
from electra.training.config import HardwareConfig
from electra.training.hardware import choose_device, choose_dtype, should_compile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("setting", "device", "is_compiled"),
    [("auto", CPU, False), ("auto", CUDA, True), ("on", CPU, True), ("on", CUDA, True), ("off", CUDA, False)],
)
def test_auto_compiles_on_a_gpu_only(monkeypatch, setting, device, is_compiled):
    monkeypatch.setattr("electra.training.hardware.can_compile", lambda device: True)
    assert should_compile(HardwareConfig(compile=setting), device) == is_compiled


@pytest.mark.parametrize(("setting", "device", "missing"), [("on", CPU, "g\\+\\+"), ("auto", CUDA, "gcc")])
def test_compiling_without_a_compiler_is_an_error(monkeypatch, setting, device, missing):
    monkeypatch.setattr("electra.training.hardware.can_compile", lambda device: False)
    with pytest.raises(ConfigError, match=rf"torch.compile needs .*{missing}.*--compile off"):
        should_compile(HardwareConfig(compile=setting), device)
    assert not should_compile(HardwareConfig(compile="off"), device)


def test_a_cpu_runs_in_fp32_unless_asked_otherwise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    assert choose_dtype("auto", CPU) == torch.float32
    assert choose_dtype("bf16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="no CUDA device is available; use --device cpu"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("has_bf16", "capability", "dtype"),
    [(True, (9, 0), torch.bfloat16), (False, (7, 5), torch.float16), (False, (6, 1), torch.float32)],
)
def test_a_gpu_without_bf16_uses_fp16_if_it_has_tensor_cores(monkeypatch, has_bf16, capability, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert choose_dtype("auto", CUDA) == dtype
    assert choose_dtype("fp16", CUDA) == torch.float16
    if not has_bf16:
        with pytest.raises(ConfigError, match="unlike a GPU; use --precision fp16"):
            choose_dtype("bf16", CUDA)
