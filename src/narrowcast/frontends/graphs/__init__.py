"""Graphs: capture, read, edit, write back with explicit casts; backward precision. Nothing is decided here."""
