"""The only code that touches torch's private names: one module per subsystem, patches, and probes.

state:    autocast's state, its keys and guards, modes that are on.  dispatch: overloads, kernels, dispatch modes.
autograd: what runs a backward, what is saved for it.                dynamo:   what it traces, what it must not.
fx:       tracing, fake tensors, what graphs hold.                   jit:      scripts, their graphs and passes.
grad_scaling: torch's scaler, its ops, who clips gradients.
patches:  everything of torch that is replaced, in one table.        probes:   each assumption about torch, by name.

Nothing here decides anything. The rest of Narrowcast asks for these by public names; a check on the syntax tree holds
it to that (tests/checkers/test_surface.py).
"""
