"""CPU kernels, and the layers that use them."""
