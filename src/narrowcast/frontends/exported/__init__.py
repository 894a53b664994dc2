"""`nc.export`: torch.export with explicit casts."""
