"""Renderers: a document as the first screen of a terminal, HTML, a notebook cell; traces for other viewers."""
