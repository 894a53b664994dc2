"""`nc.compile`, and the backend that torch.compile calls."""
