"""Why two programs of one model give other numbers: `nc.parity`."""
