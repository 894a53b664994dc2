"""`nc.record`: a ledger of what autocasting does in a block, and what it warns of."""
