"""ONNX files of models, and their comparison with PyTorch."""
