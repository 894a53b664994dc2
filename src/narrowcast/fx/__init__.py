"""Graphs: capture, read, edit, write back with explicit casts; the compile backend, export, backward precision."""
