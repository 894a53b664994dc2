"""nc.Scaler: losses scaled, gradients checked and unscaled, steps skipped, and who is to blame."""
