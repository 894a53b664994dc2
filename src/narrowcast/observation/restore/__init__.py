"""What a run changes, restored: each part is a context manager, to be entered into one ExitStack. They differ in when
they copy, since nobody knows before a run what it changes.

weights: values, before they are written to first. modules: attributes, buffers and what scripts keep
(`frontends.scripts.state`), before a module is called, or at the start. gradients: put aside. attributes: of one
object. fakes: what a program kept of a run on fake tensors. memory: of tensors, before it is written to first. objects:
parameters, modules, optimizers, schedules and scalers of a process, at the start. variables: of a function. process:
all of these, of what was there and was met; `training.check.kept` asks it about steps.
`runtime.devices.random_state_kept` keeps the random state.
"""
