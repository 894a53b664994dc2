"""TorchScript: scripted and traced code with explicit casts. The only code that knows torch._C.Graph."""
