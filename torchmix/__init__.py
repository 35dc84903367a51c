"""torchmix: the data plane of a large-model training run."""

__version__ = "0.1.0"
