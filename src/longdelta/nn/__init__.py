"""What a model author imports: the layer, and the short convolution before its op."""

from longdelta.nn.conv import ConvOutput, ShortConvolution, causal_conv1d
from longdelta.nn.layer import GatedDeltaNet, LayerOutput, LayerState, Operands

__all__ = [
    "ConvOutput",
    "GatedDeltaNet",
    "LayerOutput",
    "LayerState",
    "Operands",
    "ShortConvolution",
    "causal_conv1d",
]
