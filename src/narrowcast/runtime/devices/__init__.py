"""What ops and casts cost on a device: measured, kept in profiles, and interpolated from them.

device: the one at hand. abilities: what it can run. measure, sweep, signature: its calls. prices: the cost model, and
what placing asks. show: what a person does.
"""
