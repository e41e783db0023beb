"""From staged programs to one ONNX file: operators of a target, both stages in one graph, the manifest."""
