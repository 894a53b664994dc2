"""Narrowcast inside the training loops of frameworks: one file per framework, imported by its own name.

No file here imports its framework before it is used; `import narrowcast` imports none of them.
"""
