"""Under the front ends: open regions, kept casts of weights, source lines, devices, and what is torch's own."""
