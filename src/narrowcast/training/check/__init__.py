"""Training loops: what is wrong with the precision of one, seen in a few of its steps."""
