"""A vLLM whose linear layers stay parameters on a CPU, as on a GPU: its checksums are then of every tensor.

A server takes it by `--worker-extension-cls tests.engines.unpacked_vllm.Extension`.
"""

from vllm import _custom_ops

_custom_ops._supports_onednn = False


class Extension:
    """What `--worker-extension-cls` names; it needs no methods."""
