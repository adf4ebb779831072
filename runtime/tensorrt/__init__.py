"""TensorRT and TensorRT-RTX behind one adapter; loaded only for engines that hold segments. See README.md."""
