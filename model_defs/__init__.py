"""How a checkpoint becomes a traceable model. See README.md."""

from tapeout.model_defs.resolve import open_model
from tapeout.model_defs.source import Checkpoint, ModelSource, TensorInfo

__all__ = ["Checkpoint", "ModelSource", "TensorInfo", "open_model"]
