"""The ONNX host: a model and its plan as one graph of standard operators, which any ONNX Runtime runs."""
