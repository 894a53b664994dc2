"""Front ends: regions in eager code, compiled and exported graphs, TorchScript. They carry out what is decided."""
