"""What torch raises for the formats of a call, with a note: which call it was, and what avoids it.

Asked only once an error is on its way out of a region, a compiled graph or a script.
"""

from __future__ import annotations

import re
from contextlib import suppress

from torch.nn import Module

from narrowcast.core.policy.capabilities import RAISES, device_label, short_name
from narrowcast.errors import NarrowcastError
from narrowcast.runtime.devices.abilities import capabilities
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.sites.python_stack import find_site, innermost_frame
from narrowcast.runtime.torch_bridge import FORMATS, LOW

_MARK = "narrowcast: "
_FROM_TRACE = re.compile(r'^\s+File "([^"]+)", line (\d+), in ', re.MULTILINE)
_NO_KERNEL = re.compile(r'"(?P<kernel>\w+)" not implemented for \'(?P<type>BFloat16|Half)\'')
_BEYOND = re.compile(r"value cannot be converted to type (c10|at)::(?P<type>BFloat16|Half) without overflow")
_NOT_FINITE = re.compile("contained non-finite values|algorithm failed to converge")
_NAMES = {"BFloat16": "bf16", "Half": "fp16"}


_ONE_FORMAT = re.compile(
    r"same (scalar |data )?d?types?\b|expected (scalar type|dtype) \S+ .*but (found|got)|dtypes match|did not match"
    r"|different dtypes|must have the same type|to have (the same|scalar) type|same dtypes?\b",
    re.IGNORECASE,
)


def note_failure(error: BaseException, device_type: str, repairs: bool = False, low: str = "") -> None:
    """Add the note to an error that the device raised for want of a kernel, an op for mixed formats, low formats that
    meet, a number beyond one, what is not finite, torch's trace for casts of weights; nothing to any other. repairs:
    the policy has avoided what can be avoided. low: the region's low format, if that is known.
    """
    if not isinstance(error, RuntimeError) or _is_ours(error):
        return
    with suppress(Exception):  # the user's error goes on, with a note or without
        _add_note(error, device_type, repairs, low)


def note_weights(error: RuntimeError, module: Module) -> None:
    """Add a note to an error of formats that meet in a module whose inputs a pin or a rule casts: its weights are as
    they were.
    """
    with suppress(Exception):
        low = [(name, FORMATS[p.dtype]) for name, p in module.named_parameters() if p.dtype in LOW]
        if low and not _is_ours(error) and _ONE_FORMAT.search(str(error)):
            name, own = low[0]
            error.add_note(
                f"{_MARK}a pin, or a rule about module.call, casts what {type(module).__name__} is given, and not its "
                f"weights: {name} is in {own}.\n"
                '  Convert it, .float(), or write a rule about its op, which casts both: nc.Rule("aten.linear", "full")'
            )


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is our own, or has our note."""
    noted = any(note.startswith(_MARK) for note in getattr(error, "__notes__", ()))
    return noted or isinstance(error, NarrowcastError)


def _add_note(error: RuntimeError, device_type: str, repairs: bool, low: str) -> None:
    first_line = str(error).strip().partition("\n")[0]
    if first_line.startswith("Cannot insert a Tensor that requires grad as a constant"):
        error.add_note(
            f"{_MARK}torch.jit.trace takes the cast of a weight that the region keeps for a constant.\n"
            "  narrowcast.trace(model, inputs, under=...) traces models in regions; so does torch.jit.trace under "
            "torch.no_grad(), or in a region with cache_enabled=False and with check_trace=False."
        )
        return
    if "autocast::prioritize" in first_line:
        error.add_note(
            f"{_MARK}a tensor in another low format than the region's{low and f', {low},'} meets others"
            f"{_where(error)}.\n"
            "  Open all regions in one format; under= says in which nc.compare and the other calls run a model."
        )
        return
    beyond = _BEYOND.match(first_line)
    if beyond is not None:
        error.add_note(
            f"{_MARK}{_NAMES[beyond['type']]} does not hold a number of this call{_where(error)}: one that masks are "
            "filled with, perhaps.\n"
            "  Write torch.finfo(scores.dtype).min, or float('-inf'), in its place; nc.repair(model, inputs) finds the "
            "rule that keeps the call in fp32."
        )
        return
    if _NOT_FINITE.search(first_line):
        was = "was given NaN or infinity" if "non-finite" in first_line else "has perhaps read infinity"
        error.add_note(
            f"{_MARK}this call {was}{_where(error)}.\n"
            "  Run it in `with nc.watch() as watched:`: watched.first names the call that made them, and what to do."
        )
        return
    lack = _what(first_line, device_type, low)
    if lack is None:
        if not repairs and _ONE_FORMAT.search(str(error)):
            error.add_note(
                f"{_MARK}a call got tensors of several formats{_where(error)}. Autocasting makes them differ where it "
                "lowers what one of them comes from.\n"
                '  policy="safe" gives such calls one format; nc.explain(model, inputs) names the call, and tries it.'
            )
        return
    lacks, rule = lack
    error.add_note(
        f"{_MARK}{lacks}{_where(error)}.\n"
        f'  policy="safe" runs what the device lacks in fp32, with the results that were promised; so does a rule:\n'
        f"  {rule}"
    )


def _where(error: BaseException) -> str:
    traced = _FROM_TRACE.findall(str(error))
    if traced:  # the stack is the compiler's; it says itself where
        return ", {}:{}".format(*traced[-1])
    site = find_site(frame=innermost_frame(error))
    module = f" in {site.module_path}" if site.module_path and "<" not in site.module_path else ""
    return f"{module}, {site.file}:{site.line}" if site.file else module


def _what(first_line: str, device_type: str, low: str) -> tuple[str, str] | None:
    """Return what the device lacks by this error, and the rule that avoids it; None for another error."""
    known = capabilities(device_type)
    raising = [a for a in known.abilities if a.state == RAISES and a.error and a.error == first_line]
    if raising:
        ability = next((a for a in raising if str(a.format) == low), raising[0])
        lacks = f"{known.device} has no {ability.format} {short_name(ability.op)} ({ability.op})"
        return lacks, f'nc.Rule("{ability.op}", "full")'
    missing = _NO_KERNEL.search(first_line)
    if missing is not None:
        lacks = f"{device_label(device_type, device_now(device_type).units)} has no {_NAMES[missing['type']]} kernel"
        return f"{lacks} {missing['kernel']}", 'nc.Rule("aten.<the op>", "inside"), with the op that nc.record() names'
    return None
