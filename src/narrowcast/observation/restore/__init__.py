"""What a run changes, restored. Each part is a context manager, or has `put_back`; they differ in when they copy.

weights: values, before they are written to first. modules: attributes, buffers and what scripts keep, before a module
is called. objects: parameters, modules, optimizers, schedules and scalers of a process, at the start. attributes: of
one object. fakes: what a program kept of a run on fake tensors. Gradients are put aside by `observation.trial`, the
random state is kept by `runtime.devices.random_state_kept`, what scripts keep by `frontends.scripts.state`.
"""
