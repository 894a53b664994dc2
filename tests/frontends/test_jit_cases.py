"""PyTorch's own tests of autocast in TorchScript (test/test_jit_autocast.py), case by case, on the cpu.

What its pass gives by cuda's lists is compared with eager code here: formats, bits, gradients. Traces, which its tests
make of three networks, are made of all kinds of convolutions, in each way in which a trace comes to its casts.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.errors import ScriptError

_spec = importlib.util.spec_from_file_location("jit_cases", Path(__file__).with_name("jit_cases.py"))
cases = importlib.util.module_from_spec(_spec)
sys.modules["jit_cases"] = cases
_spec.loader.exec_module(cases)

pytestmark = pytest.mark.filterwarnings("ignore")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# All tests of the original, in its order; two of its versions, of 2024 and later, have the same ones.
TEST_AUTOCAST = [
    "test_jit_generic_autocast", "test_minimal", "test_linear_bf16", "test_minimal_cpu", "test_minimal_off",
    "test_runtime_autocast_state", "test_runtime_autocast_state_expr", "test_explicit_casts",
    "test_duplicate_inputs", "test_fp32_policy", "test_fp32_policy_with_fp64", "test_promote_policy",
    "test_promote_policy_fp64", "test_fp32_set_opt_dtype_policy", "test_fp32_set_opt_dtype_policy_fp64",
    "test_control_flow", "test_divergent_types", "test_divergent_autocast", "test_conditional_autocast",
    "test_nested_autocast", "test_implicitly_nested_autocast", "test_reused_autocast", "test_reused_autocast_expr",
    "test_callees", "test_callees_with_autocast_on", "test_callees_with_autocast_off", "test_eager_and_script",
    "test_script_and_tracing", "test_script_and_tracing_with_autocast", "test_tracing_and_script",
    "test_tracing_with_autocast_and_script", "test_script_module", "test_autocast_decorator",
    "test_autocast_decorator_outside_jit", "test_inplace", "test_autocast_api", "test_autocast_api_not_supported",
    "test_autocast_mixed_dtypes", "test_jit_executor_under_autocast", "test_autocast_autodiff",
    "test_jit_call_method_under_autocast", "test_jit_freeze_autocast_basic", "test_jit_freeze_autocast_constants",
    "test_jit_autocast_softmax_cpu", "test_jit_autocast_softmax_gpu", "test_ignore_amp",
]  # fmt: skip
TEST_JIT_TRACE_AUTOCAST = [
    "test_generate_autocast_jit_trace_model", "test_nchw_autocast_jit_trace_model",
    "test_nhwc_autocast_jit_trace_model", "test_cat_promote", "test_script_autocast_cpu",
    "test_script_autocast_cuda", "test_scripted_aliasing", "test_script_autocast_enable_and_check",
]  # fmt: skip
ORIGINAL = TEST_AUTOCAST + TEST_JIT_TRACE_AUTOCAST
NOT_HERE = {
    "test_ignore_amp": "`_set_ignore_amp` tells torch's own pass to leave a graph alone; it never runs in our scripts. "
    "One that its caller's region leaves alone has `enabled=False` around it: test_a_script_that_is_off_stays_off",
}
HELD: dict[str, str] = {}  # test of the original: test here


def holds(*names):
    """The decorated test is the cases of these names."""

    def decorate(test):
        HELD.update(dict.fromkeys(names, test.__name__))
        return test

    return decorate


# -- comparing


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave, what it made of its arguments, and the gradients of the arguments and of other leaves."""

    values: list
    arguments: list
    gradients: list


def outcome(function, *arguments, leaves=(), gradients=True):
    """Call it with copies of the arguments, and backward from a sum over all that it gives."""
    copies = [argument.detach().clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    own = [copy for copy in copies if isinstance(copy, torch.Tensor)] if gradients else []
    for leaf in own:
        leaf.requires_grad_()
    for leaf in leaves:
        leaf.grad = None
    with torch.set_grad_enabled(gradients):
        values = torch.utils._pytree.tree_leaves(function(*copies))
    sums = [
        value.double().square().sum() for value in values if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if sums:
        with torch.autocast("cpu", enabled=False):  # a caller's region holds in the call alone
            torch.stack(sums).sum().backward()
    read = [value.detach() if isinstance(value, torch.Tensor) else value for value in (*values, *copies)]
    return Outcome(read[: len(values)], read[len(values) :], [leaf.grad for leaf in (*own, *leaves)])


def differences(expected, found):
    """A line for each value, argument and gradient that is another: its kind, format, shape, or a bit of it."""
    lines = []
    for field in dataclasses.fields(Outcome):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if len(ours) != len(theirs):
            lines.append(f"{field.name}: {len(theirs)} in eager code, {len(ours)}")
        for n, (a, b) in enumerate(zip(theirs, ours, strict=False)):
            if type(a) is not type(b):
                lines.append(f"{field.name} {n}: {type(a).__name__} in eager code, {type(b).__name__}")
            elif not isinstance(a, torch.Tensor):
                lines += [f"{field.name} {n}: {a} in eager code, {b}"] if a != b else []
            elif a.dtype is not b.dtype or a.shape != b.shape:
                lines.append(f"{field.name} {n}: {a.dtype} {list(a.shape)} in eager code, {b.dtype} {list(b.shape)}")
            elif not torch.equal(a, b):
                lines.append(f"{field.name} {n}: they differ by up to {(a.double() - b.double()).abs().max()}")
    return lines


def assert_same(function, scripted, *arguments, leaves=(), gradients=(True, False), times=3):
    """Several runs, those of the profiling executor's graphs included: with gradients first, then without."""
    for mode in gradients:
        expected = outcome(function, *arguments, leaves=leaves, gradients=mode)
        for run in range(times):
            found = outcome(scripted, *arguments, leaves=leaves, gradients=mode)
            assert not differences(expected, found), f"run {run}, gradients {mode}"
    return expected


WITHOUT = (False,)


def test_the_comparison_notices_each_kind_of_difference():
    """A format, a bit, a gradient's bit, format and absence, an argument that was written to, an answer, a number."""

    def function(a, b, answer=True, scale=1.0, low=False, write=False):
        if write:
            a = a.mul_(2.0) if not a.requires_grad else a
        x = torch.mm(a.to(BF16) if low else a, b.to(BF16) if low else b) * scale
        return x, answer

    a, b = tensors("fp32 fp32")
    expected, quiet = outcome(function, a, b), outcome(function, a, b, gradients=False)
    assert not differences(expected, outcome(function, a, b))

    def said(base=expected, gradients=True, **changed):
        return differences(base, outcome(lambda a, b: function(a, b, **changed), a, b, gradients=gradients))

    def changed(what, change):
        return differences(expected, dataclasses.replace(expected, **{what: change(getattr(expected, what))}))

    assert any(
        line.startswith("values 0: torch.float32 [4, 4] in eager code, torch.bfloat16") for line in said(low=True)
    )
    assert any(line.startswith("values 0: they differ") for line in said(scale=1.0 + 2**-23))
    assert said(answer=False) == ["values 1: True in eager code, False"]
    assert any(line.startswith("arguments 0: they differ") for line in said(quiet, False, write=True))
    assert changed("values", lambda v: v[:1]) == ["values: 2 in eager code, 1"]
    assert changed("gradients", lambda g: [g[0].nextafter(g[0] + 1), g[1]])[0].startswith("gradients 0: they differ")
    assert changed("gradients", lambda g: [g[0], g[1].double()])[0].startswith("gradients 1: torch.float32 [4, 4] in")
    assert changed("gradients", lambda g: [None, g[1]]) == ["gradients 0: Tensor in eager code, NoneType"]
    assert changed("values", lambda v: [v[0][:1], v[1]])[0].endswith("torch.float32 [1, 4]")
    with pytest.raises(AssertionError, match="they differ"):
        assert_same(function, lambda a, b: function(a, b, scale=1.5), a, b)


FORMATS = {"fp32": FP32, "fp64": FP64, "fp16": FP16, "bf16": BF16}


def tensors(formats, low=BF16, first=0.75):
    """One for each name of a format; `first` is what branches ask for."""
    torch.manual_seed(0)
    found = [(torch.rand(4, 4) / 2 + 0.25) for _ in formats.split()]
    found[0][0, 0] = first
    return [t.to(FORMATS.get(name, low)) for t, name in zip(found, formats.split(), strict=True)]


def formats_of(found):
    return [value.dtype for value in found.values if isinstance(value, torch.Tensor)]


# -- programs


REGIONS = {
    "bf16": (BF16, lambda: (torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False))),
    "fp16": (FP16, lambda: (torch.autocast("cpu", FP16), torch.autocast("cpu", enabled=False))),
    "ours": (BF16, lambda: (nc.autocast("cpu", BF16), nc.autocast("cpu", enabled=False))),
    "cuda's lists": (
        FP16,
        lambda: (nc.autocast("cpu", FP16, policy=cases.CUDA_LISTS), nc.autocast("cpu", FP16, enabled=False)),
    ),
}


@pytest.mark.sweep(one_in=2)
@holds(*(case.name for case in cases.CASES))
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_programs_equal_eager_code(case, region):
    """By the lists of the cpu, and by those of cuda, with the formats that the table says; in both branches."""
    low, make = REGIONS[region]
    function = case.make(*make())
    scripted = nc.script(function)
    says = case.by_cuda if region == "cuda's lists" else case.by_cpu
    for mode in (True, False)[not case.gradients :]:
        for first in (0.75, 0.25):
            arguments = tensors(case.arguments, low, first)
            expected = assert_same(function, scripted, *arguments, gradients=(mode,))
            assert formats_of(expected) == [FORMATS.get(name, low) for name in says.split()]


PRODUCTS = [case.make for case in cases.CASES if case.arguments == "fp32 fp32" and case.gradients]


@pytest.mark.parametrize("make", [*PRODUCTS, cases.one_value_twice], ids=lambda make: make.__name__)
def test_gradients_after_calls_without_are_those_before(make):
    """Two calls without gradients are optimized, and what is made then is run with gradients as well."""
    function = make(*REGIONS["bf16"][1]())
    scripted, arguments = nc.script(function), tensors("fp32 " * function.__code__.co_argcount)
    assert_same(function, scripted, *arguments, gradients=(True, False, True))


def test_addmm_in_a_script_has_the_bits_of_eager_code():
    """With its own beta and alpha, 1 and 1: TorchScript takes such a call apart, into a product and a sum."""
    for region in ("bf16", "fp16"):
        function = cases.added(*REGIONS[region][1]())
        assert_same(function, nc.script(function), *tensors("fp32 fp32 fp32"))


@pytest.mark.parametrize("region", ["bf16", "cuda's lists"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_programs_equal_eager_code_in_a_caller_s_region_and_from_a_file(case, region, tmp_path):
    """Nothing of another region gets in, and what is saved holds all of it."""
    low, make = REGIONS[region]
    function = case.make(*make())
    scripted, arguments = nc.script(function), tensors(case.arguments, low)
    if case.make is cases.with_a_dtype:
        arguments.append(None)  # a saved function has no defaults, torch's own neither
    with nc.autocast("cpu", BF16):
        assert_same(function, scripted, *arguments, gradients=WITHOUT, times=2)
    scripted.save(str(tmp_path / "program.pt"))
    assert_same(function, torch.jit.load(tmp_path / "program.pt"), *arguments, gradients=WITHOUT)


@holds("test_fp32_set_opt_dtype_policy", "test_fp32_set_opt_dtype_policy_fp64")
@pytest.mark.parametrize("given", ["low", "fp64"])
@pytest.mark.parametrize("kind", [None, FP32, FP64, BF16])
def test_a_dtype_that_only_the_running_script_knows(kind, given):
    """None of it is cuda's fp32 as well; torch's pass takes it for a dtype that was given."""
    function = cases.with_a_dtype(*REGIONS["cuda's lists"][1]())
    assert_same(function, nc.script(function), *tensors(" ".join([given] * 4), FP16), kind, gradients=WITHOUT)


@holds(*cases.MADE_INSIDE)
@pytest.mark.parametrize("first", [0.75, 0.25])
@pytest.mark.parametrize(
    "function", [function for found in cases.MADE_INSIDE.values() for function in found], ids=lambda f: f.__name__
)
def test_regions_that_a_function_makes_for_itself(function, first):
    """Chosen by a branch, by a condition, by an argument; entered inside themselves."""
    arity = function.__code__.co_argcount
    by_argument = "on" in function.__code__.co_varnames
    arguments = tensors("fp32 " * (arity - by_argument), first=first)
    assert_same(function, nc.script(function), *arguments, *[first > 0.5] * by_argument)


def test_a_region_that_a_function_makes_for_itself_with_a_policy_of_the_module():
    """A policy that the module holds, as in a with statement."""
    function = cases.made_with_a_policy_of_the_module
    expected = assert_same(function, nc.script(function), *tensors("fp32 fp32"))
    assert formats_of(expected) == [FP16, FP32]


# -- how a region is written


@holds("test_jit_generic_autocast", "test_autocast_api", "test_autocast_api_not_supported", "test_minimal_cpu")
@pytest.mark.parametrize("spelling", cases.BF16_SPELLINGS + cases.FP16_SPELLINGS + cases.CUDA_SPELLINGS)
def test_each_spelling_of_a_region(spelling):
    """Those without a dtype have the device's; those for cuda touch nothing on the cpu."""
    expected = assert_same(spelling, nc.script(spelling), *tensors("fp32 fp32"))
    low = BF16 if spelling in cases.BF16_SPELLINGS else FP16 if spelling in cases.FP16_SPELLINGS else FP32
    assert set(formats_of(expected)) == {low}


@holds("test_jit_generic_autocast")
@pytest.mark.parametrize("group", [cases.BF16_SPELLINGS, cases.FP16_SPELLINGS, cases.CUDA_SPELLINGS])
def test_spellings_of_one_region_give_one_result(group):
    """Bit for bit, scripted."""
    found = [outcome(nc.script(spelling), *tensors("fp32 fp32")) for spelling in group]
    assert not [line for other in found[1:] for line in differences(found[0], other)]


@holds("test_autocast_mixed_dtypes")
@pytest.mark.parametrize("function", [cases.two_devices, cases.two_devices_off])
def test_regions_of_two_device_types(function):
    """Each rules its own device; the one for cuda lowers nothing on the cpu, and switches nothing off."""
    expected = assert_same(function, nc.script(function), *tensors("fp32 fp32"))
    assert set(formats_of(expected)) == {BF16}


def test_a_weight_is_cast_once_in_regions_of_two_device_types():
    """A region of another device type inside does not end what eager's weight cache holds."""
    function = cases.one_weight_in_regions_of_two_devices
    assert_same(function, nc.script(function), *tensors("fp32 fp32"))


@holds("test_autocast_decorator")
def test_a_decorated_function():
    """The decorator under `script`."""
    expected = assert_same(cases.decorated, nc.script(cases.decorated), *tensors("fp32 fp32"))
    assert formats_of(expected) == [BF16]


@holds("test_autocast_decorator_outside_jit")
@pytest.mark.parametrize("around", [torch.autocast("cpu", BF16), nc.autocast("cpu", FP16)])
def test_a_decorated_script(around):
    """The decorator on what `script` returned: the region of a caller."""
    function, scripted = around(cases.product), around(nc.script(cases.product))
    expected = assert_same(function, scripted, *tensors("fp32 fp32"))
    assert formats_of(expected) != [FP32]


@holds("test_jit_autocast_softmax_cpu", "test_jit_autocast_softmax_gpu")
def test_a_softmax_of_the_low_format():
    """It stays by the cpu's list, and is raised by cuda's."""
    for function, given, gives in (
        (cases.softmax, "bf16", BF16), (cases.softmax, "fp32", FP32), (cases.softmax_with_cuda_lists, "fp16", FP32),
    ):  # fmt: skip
        expected = assert_same(function, nc.script(function), *tensors(given))
        assert formats_of(expected) == [gives]


# -- the region of a caller


@holds("test_eager_and_script")
def test_a_script_follows_the_region_of_each_call():
    """On and off in turn; the same script all the time."""
    scripted, (a, b) = nc.script(cases.product), tensors("fp32 fp32")
    for n in range(8):
        on, dtype = n % 2 == 0, (BF16, FP16)[n // 4]
        with torch.autocast("cpu", dtype=dtype, enabled=on):
            expected = assert_same(cases.product, scripted, a, b, times=1)
        assert formats_of(expected) == [dtype if on else FP32]


CALLERS = {
    "both": (("cpu", BF16), ("cuda", FP16)),
    "the other way round": (("cuda", FP16), ("cpu", BF16)),
    "cpu": (("cpu", BF16),),
    "cuda": (("cuda", FP16),),
    "none": (),
}


@contextlib.contextmanager
def opened(device_type, dtype):
    """A region of torch's, also of a device that is not here, for which torch.autocast opens none."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu")):
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(device_type, before[0])
            torch.set_autocast_dtype(device_type, before[1])


@holds("test_jit_executor_under_autocast")
def test_a_script_in_callers_regions_of_several_devices():
    """One script in all of them, there and back; outside it has no casts."""
    scripted, arguments = nc.script(cases.products), tensors("fp32 fp32")
    for name in (*CALLERS, *reversed(CALLERS)):
        with contextlib.ExitStack() as stack:
            for device_type, dtype in CALLERS[name]:
                stack.enter_context(opened(device_type, dtype))
            expected = assert_same(cases.products, scripted, *arguments)
        on_cpu = any(device_type == "cpu" for device_type, _ in CALLERS[name])
        assert set(formats_of(expected)) == {BF16 if on_cpu else FP32}
    assert "_autocast_to" not in str(scripted.graph) and "aten::to" not in str(scripted.graph)


@holds("test_autocast_autodiff")
@pytest.mark.parametrize("region", ["bf16", "fp16"])
def test_gradients_of_a_script_in_a_caller_s_region(region):
    """Five runs with backward passes first, in which TorchScript would make formulas of its own."""
    scripted, (a, b) = nc.script(cases.product_and_relu), tensors("fp32 fp32")
    a, b = a - 0.5, b - 0.5
    expected = outcome(within(cases.product_and_relu, region), a, b)
    assert [gradient.dtype for gradient in expected.gradients] == [FP32, FP32]
    for _ in range(6):
        assert not differences(expected, outcome(within(scripted, region), a, b))


def test_a_script_that_is_off_stays_off():
    """Whatever its caller's region is: that is what `_set_ignore_amp` is for in torch."""
    quiet, arguments = nc.script(cases.products, under=nc.autocast("cpu", "bf16", enabled=False)), tensors("fp32 fp32")
    with torch.autocast("cpu", BF16):
        found = [outcome(quiet, *arguments) for _ in range(3)]
    expected = outcome(cases.products, *arguments)
    assert not [line for other in found for line in differences(expected, other)]
    assert formats_of(expected) == [FP32, FP32]


# -- modules, interfaces, freezing


@holds("test_script_module")
def test_a_module_with_a_parameter_and_a_submodule():
    """Parameters used as they are and through a layer; their gradients, too."""
    torch.manual_seed(0)
    model, x = cases.Weighted(), torch.rand(3)
    model.linear = nn.Linear(2, 3)
    expected = assert_same(model, nc.script(model), x, leaves=[*model.parameters()])
    assert formats_of(expected) == [BF16, BF16]


@holds("test_jit_call_method_under_autocast")
def test_a_method_of_an_interface():
    """In a region, a caller's too, nobody can see what it calls: an error with the line. Outside it is called."""
    with pytest.raises(ScriptError, match="interface") as caught:
        nc.script(cases.CallsAnInterface())
    (site,) = caught.value.where
    assert "self.part.forward(z, x)" in site.note and site.file.endswith("jit_cases.py")
    model, arguments = cases.CallsAnInterfaceOutside(), tensors("fp32 fp32")
    scripted = nc.script(model)
    assert_same(model, scripted, *arguments)
    with torch.autocast("cpu"), pytest.raises(ScriptError, match="interface"):
        scripted(*arguments)
    assert_same(model, scripted, *arguments)


@holds("test_jit_call_method_under_autocast")
def test_a_method_of_a_module_of_a_known_class():
    """It is cast as what stands around it."""
    model, arguments = cases.CallsAModule(), tensors("fp32 fp32")
    scripted = nc.script(model)
    assert formats_of(assert_same(model, scripted, *arguments)) == [BF16]
    with torch.autocast("cpu", BF16):
        assert formats_of(assert_same(model, scripted, *arguments)) == [BF16]


def casts(graph):
    return str(graph).count("aten::_autocast_to") + str(graph).count("aten::to(")


@holds("test_jit_freeze_autocast_basic")
def test_a_frozen_script_has_its_casts_once():
    """Running it adds none, in a region neither."""
    model, arguments = cases.Product().eval(), tensors("fp32 fp32")
    scripted = nc.script(model)
    frozen = torch.jit.freeze(scripted)
    assert_same(model, scripted, *arguments)
    assert_same(model, frozen, *arguments, gradients=WITHOUT)
    assert casts(frozen.graph) == casts(frozen.graph_for(*arguments)) == casts(scripted.inlined_graph) > 0


@holds("test_jit_freeze_autocast_constants")
def test_a_frozen_script_has_its_constants_cast():
    """One of two casts is made while it is frozen, and running it does not bring it back."""
    torch.manual_seed(0)
    model, y, arguments = cases.ProductWithAConstant().eval(), torch.rand(4, 5), tensors("fp32 fp32")
    scripted = nc.script(model)
    frozen = torch.jit.freeze(scripted)
    assert_same(model, scripted, y)
    assert_same(model, frozen, y, gradients=WITHOUT)
    both = casts(torch.jit.freeze(nc.script(cases.Product().eval())).graph_for(*arguments))
    assert casts(frozen.graph) == casts(frozen.graph_for(y)) == both / 2
    assert "BFloat16(3, 4" in str(frozen.graph)


# -- code that asks


@holds("test_script_autocast_cpu")
@pytest.mark.parametrize("target", [nc.script, lambda f: nc.script(torch.jit.script(f))], ids=["script", "convert"])
def test_code_that_asks_is_told_of_its_caller_s_region(target):
    """Asked when it runs, not when it is compiled."""
    scripted, arguments = target(cases.asks), tensors("fp32")
    for _ in range(2):
        for around in (
            torch.autocast("cpu"), torch.autocast("cpu", enabled=True), torch.cpu.amp.autocast(),
            torch.autocast("cpu", enabled=False), nc.autocast("cpu", FP16), contextlib.nullcontext(),
        ):  # fmt: skip
            with around:
                assert_same(cases.asks, scripted, *arguments, times=1)


@holds("test_script_autocast_cuda")
@pytest.mark.parametrize("function", [cases.asks_for_cuda, cases.asks_for_cuda_inside])
def test_code_that_asks_for_cuda(function):
    """`torch.is_autocast_enabled()` is cuda's: no region for the cpu changes it."""
    scripted, arguments = nc.script(function), tensors("fp32")
    for device_type in ("cpu", "cuda"):
        with torch.autocast(device_type):
            assert_same(function, scripted, *arguments)
    assert_same(function, scripted, *arguments)


@holds("test_scripted_aliasing")
def test_what_was_asked_before_a_region_is_not_asked_in_it():
    """torch's test asks the alias analysis; here the answers are compared, also in a caller's region."""
    scripted, arguments = nc.script(cases.asks_before), tensors("fp32")
    for enabled in (False, True, False):
        with torch.autocast("cpu", enabled=enabled):
            expected = assert_same(cases.asks_before, scripted, *arguments)
        assert [expected.values[0], expected.values[2]] == [enabled, enabled]


@holds("test_script_autocast_enable_and_check")
def test_answers_and_formats_belong_together():
    """Outside, inside, and off inside."""
    scripted, arguments = nc.script(cases.asks_everywhere), tensors("fp32 fp32")
    for enabled in (False, True):
        with torch.cpu.amp.autocast(enabled=enabled):
            expected = assert_same(cases.asks_everywhere, scripted, *arguments)
        assert expected.values[1::2] == [enabled, True, False]
        assert [value.dtype is BF16 for value in expected.values[::2]] == [enabled, True, False]


# -- scripts and traces of functions


@holds("test_script_and_tracing")
@pytest.mark.parametrize("function", [cases.product, cases.scaled, cases.products])
def test_scripts_call_traces(function):
    """Torch's traces and ours, which have no region of their own."""
    arguments = tensors("fp32 fp32")
    for traced in (torch.jit.trace(function, tuple(arguments)), nc.trace(function, tuple(arguments))):
        expected = assert_same(cases.calling(function), nc.script(cases.calling(traced)), *arguments)
        assert set(formats_of(expected)) == {BF16}


@holds("test_script_and_tracing_with_autocast")
@pytest.mark.parametrize("function", [cases.scaled_outside, cases.partly_outside])
def test_scripts_call_traces_with_regions(function):
    """`autocast(False)` inside of the trace holds; torch's own trace has lost it."""
    arguments = tensors("fp32 fp32")
    traced = nc.trace(function, tuple(arguments))
    expected = assert_same(cases.calling(function), nc.script(cases.calling(traced)), *arguments)
    assert FP32 in formats_of(expected)
    assert_same(cases.calling(function), cases.calling(traced), *arguments)
    assert_same(function, traced, *arguments)


@holds("test_tracing_and_script")
@pytest.mark.parametrize("own_trace", [True, False], ids=["nc.trace", "torch.jit.trace"])
@pytest.mark.parametrize("called", [cases.of_the_package, cases.scaled_outside], ids=lambda f: f.__name__)
def test_traces_call_scripts_with_regions(called, own_trace):
    """The script's own region is in the trace."""
    arguments, scripted = tensors("fp32 fp32"), nc.script(called)

    def function(a, b):
        return called(a, b)

    def calls(a, b):
        return scripted(a, b)

    traced = (nc.trace if own_trace else torch.jit.trace)(calls, tuple(arguments))
    assert_same(function, traced, *arguments)


@holds("test_tracing_with_autocast_and_script")
@pytest.mark.parametrize("target", [nc.script, torch.jit.script], ids=["nc.script", "torch.jit.script"])
@pytest.mark.parametrize("called", [cases.product, cases.products], ids=lambda f: f.__name__)
def test_traces_with_regions_call_scripts(called, target):
    """The region is around the call, and the script in it is cast."""
    arguments, scripted = tensors("fp32 fp32"), target(called)
    traced = nc.trace(cases.calling(scripted), tuple(arguments))
    expected = assert_same(cases.calling(called), traced, *arguments)
    assert set(formats_of(expected)) == {BF16}


@holds("test_cat_promote")
@pytest.mark.parametrize("freezes", [False, True], ids=["traced", "frozen"])
@pytest.mark.parametrize("formats", ["fp32 bf16", "bf16 fp32", "fp32 fp32", "bf16 bf16"])
def test_a_trace_promotes_what_it_concatenates(formats, freezes):
    """The widest format, recorded under a region, given around it, and converted."""
    model, arguments = cases.Concatenated().eval(), tensors(formats)
    inputs = tuple(arguments)
    traced = nc.trace(model, inputs, under="bf16")
    converted = nc.script(torch.jit.trace(model, inputs), under="bf16")
    for found in (recorded(model, inputs, "bf16"), traced, converted):
        expected = assert_same(
            within(model, "bf16"), torch.jit.freeze(found) if freezes else found, *arguments, gradients=WITHOUT
        )
        assert formats_of(expected) == [BF16 if formats == "bf16 bf16" else FP32]


# -- traces of models


LOW = {"bf16": BF16, "fp16": FP16}
CALLING = {"bf16": cases.CallsInBf16, "fp16": cases.CallsInFp16}


def reloaded(script):
    """What a file has of it."""
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def frozen(script):
    """Without the arithmetic of convolution and batch norm made one, which gives other bits."""
    return torch.jit.freeze(script, optimize_numerics=False)


def traced_inside(model, x, dtype):
    with nc.autocast("cpu", LOW[dtype]):
        return nc.trace(model, x)


def recorded(model, x, dtype):
    with nc.autocast("cpu", LOW[dtype], cache_enabled=False), torch.no_grad():
        return torch.jit.trace(model, x)


# Each way in which a trace comes to its casts.
FORMS = {
    "converted": lambda model, x, dtype: nc.script(torch.jit.trace(model, x), under=dtype),
    "called by a script": lambda model, x, dtype: nc.script(CALLING[dtype](torch.jit.trace(model, x))),
    "our trace, called by a script": lambda model, x, dtype: nc.script(CALLING[dtype](nc.trace(model, x))),
    "our trace, converted": lambda model, x, dtype: nc.script(nc.trace(model, x), under=dtype),
    "traced": lambda model, x, dtype: nc.trace(model, x, under=dtype),
    "traced in a region": traced_inside,
}
# What is frozen computes no gradients of weights: they are constants.
FILES = {
    "file, converted": lambda model, x, dtype: nc.script(reloaded(torch.jit.trace(model, x)), under=dtype),
    "file, called by a script": lambda model, x, dtype: nc.script(CALLING[dtype](reloaded(torch.jit.trace(model, x)))),
    "traced, saved": lambda model, x, dtype: reloaded(nc.trace(model, x, under=dtype)),
    "recorded": recorded,
}
FROZEN = {
    "traced, frozen": lambda model, x, dtype: frozen(nc.trace(model, x, under=dtype)),
    "converted, frozen": lambda model, x, dtype: frozen(nc.script(torch.jit.trace(model, x), under=dtype)),
    "frozen, converted": lambda model, x, dtype: nc.script(frozen(torch.jit.trace(model, x)), under=dtype),
    "frozen file, converted": lambda model, x, dtype: nc.script(
        reloaded(frozen(torch.jit.trace(model, x))), under=dtype
    ),
    "called by a script, frozen": lambda model, x, dtype: frozen(
        nc.script(CALLING[dtype](torch.jit.trace(model, x)).eval())
    ),
    "frozen file, called by a script": lambda model, x, dtype: nc.script(
        CALLING[dtype](reloaded(frozen(torch.jit.trace(model, x))))
    ),
    "recorded, frozen": lambda model, x, dtype: frozen(recorded(model, x, dtype)),
}


SOME = [
    "conv1d", "conv3d", "depthwise", "padded", "padded by reflection", "same, 1d", "same, 2d", "same, uneven", "valid",
    "transposed, 2d", "transposed, grouped",
]  # fmt: skip


def built(name, channels_last=False):
    """A model in inference mode, and an input for it."""
    make, shape = {**cases.NETWORKS, **cases.CONVOLUTIONS}[name]
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    if channels_last:
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    return model, x


def within(model, dtype):
    """The model as eager code in a region."""

    def call(*arguments):
        with nc.autocast("cpu", LOW[dtype]):
            return model(*arguments)

    return call


@pytest.mark.sweep(one_in=3)
@holds("test_nchw_autocast_jit_trace_model")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*cases.NETWORKS, *cases.CONVOLUTIONS])
def test_traced_models_equal_eager_code(name, form):
    """With the gradients of the input and of all parameters."""
    model, x = built(name)
    made = FORMS[form](model, x, "bf16")
    leaves = [*made.parameters()] if "converted" in form else [*model.parameters()]
    expected = outcome(within(model, "bf16"), x, leaves=[*model.parameters()])
    assert BF16 in formats_of(expected)
    for _ in range(2):
        assert not differences(expected, outcome(made, x, leaves=leaves))


@pytest.mark.sweep(one_in=3)
@holds("test_generate_autocast_jit_trace_model", "test_nchw_autocast_jit_trace_model")
@pytest.mark.parametrize("form", [*FILES, *FROZEN])
@pytest.mark.parametrize("name", [*cases.NETWORKS, *SOME])
def test_saved_and_frozen_traces_equal_eager_code(name, form):
    """Whichever comes first: the trace, the file, the freezing, the casts."""
    model, x = built(name)
    assert_same(within(model, "bf16"), {**FILES, **FROZEN}[form](model, x, "bf16"), x, gradients=WITHOUT, times=2)


@holds("test_nhwc_autocast_jit_trace_model")
@pytest.mark.parametrize("form", ["converted", "called by a script", "traced", "traced, frozen", "frozen, converted"])
@pytest.mark.parametrize(
    "name", ["digits", "conv, norm", "conv without bias, norm", "conv3d", "same, 2d", "transposed, 2d"]
)
def test_traced_models_equal_eager_code_with_channels_last(name, form):
    """Of three dimensions, too; the layout of the result is eager code's."""
    model, x = built(name, channels_last=True)
    made = {**FORMS, **FROZEN}[form](model, x, "bf16")
    assert_same(within(model, "bf16"), made, x, gradients=WITHOUT, times=2)
    with torch.no_grad():
        assert made(x).stride() == within(model, "bf16")(x).stride()


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("form", [*FORMS, *FROZEN])
@pytest.mark.parametrize("name", ["conv, norm", "same, 2d", "transposed, 1d", "linear"])
def test_traced_models_equal_eager_code_in_fp16(name, form):
    """The other low format of the cpu."""
    model, x = built(name)
    assert_same(within(model, "fp16"), {**FORMS, **FROZEN}[form](model, x, "fp16"), x, gradients=WITHOUT, times=2)


@holds("test_generate_autocast_jit_trace_model")
@pytest.mark.parametrize("form", ["traced", "converted", "recorded"])
@pytest.mark.parametrize("name", ["digits", "conv, norm", "conv without bias, norm", "same, 2d"])
def test_freezing_with_its_numerics_gives_the_same_formats(name, form):
    """Convolution and batch norm become one, whose weights are rounded after they were multiplied: other bits."""
    model, x = built(name)
    made = torch.jit.freeze({**FORMS, **FILES}[form](model, x, "bf16"))
    with torch.no_grad():
        expected, found = within(model, "bf16")(x), [made(x) for _ in range(3)]
    for value in found:
        assert value.dtype is expected.dtype
        if "norm" in name:
            assert torch.allclose(value.float(), expected.float(), rtol=0.02, atol=0.02)
        else:
            assert torch.equal(value, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_traced_models_in_training_equal_eager_code(bias, form):
    """Batch norm of the batch, with gradients through it."""
    torch.manual_seed(0)
    model, x = cases.Normed(bias).train(), torch.randn(2, 3, 16, 16)
    made = FORMS[form](model, x, "bf16")
    leaves = [*made.parameters()] if "converted" in form else [*model.parameters()]
    expected = outcome(within(model, "bf16"), x, leaves=[*model.parameters()])
    for _ in range(2):
        assert not differences(expected, outcome(made, x, leaves=leaves))


@pytest.mark.parametrize("name", ["conv2d", "same, 2d", "transposed, 2d", "residual", "digits"])
@pytest.mark.parametrize("target", [torch.jit.trace, nc.trace], ids=["torch.jit.trace", "nc.trace"])
def test_a_trace_is_cast_where_its_script_has_a_region(name, target):
    """It is called outside as well, and stays uncast there."""
    model, x = built(name)
    eager, scripted = cases.CallsTwice(model), nc.script(cases.CallsTwice(target(model, x)))
    expected = assert_same(eager, scripted, x, leaves=[*model.parameters()])
    assert {BF16, FP32} <= set(formats_of(expected))


@pytest.mark.parametrize("name", ["conv2d", "same, 2d", "transposed, 2d", "conv, norm"])
@pytest.mark.parametrize("target", [lambda m, x: nc.script(torch.jit.trace(m, x)), nc.trace], ids=["convert", "trace"])
def test_a_trace_without_a_region_follows_its_caller_s(name, target):
    """In each format in turn, and in none."""
    model, x = built(name)
    made = target(model, x)
    for dtype in ("bf16", "fp16", "bf16"):
        assert_same(within(model, dtype), within(made, dtype), x, gradients=WITHOUT, times=2)
        assert_same(model, made, x, gradients=WITHOUT, times=2)


@pytest.mark.parametrize("form", ["our trace, called by a script", "traced", "traced in a region"])
def test_a_region_inside_of_a_traced_model_is_kept(form):
    """One convolution in fp32 between two that are cast, with gradients."""
    torch.manual_seed(0)
    model, x = cases.OutOfRegion().eval(), torch.randn(2, 3, 8, 8)
    made = FORMS[form](model, x, "bf16")
    expected = assert_same(within(model, "bf16"), made, x, leaves=[*model.parameters()])
    assert formats_of(expected) == [BF16, FP32]


@pytest.mark.parametrize("target", [torch.jit.trace, nc.trace], ids=["torch.jit.trace", "nc.trace"])
@pytest.mark.parametrize("function", [cases.convolved, cases.convolved_same, cases.convolved_three_ways])
def test_traced_functions_with_convolutions(function, target):
    """Called by a script, converted, given a region: weights are arguments here."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    traced = target(function, (x, w))
    weighted = (x, w.clone().requires_grad_())  # what eager's weight cache holds depends on it when a region is traced
    for made in (
        nc.script(cases.calling(traced)), nc.script(traced, under="bf16"), nc.trace(function, weighted, under="bf16")
    ):  # fmt: skip
        expected = assert_same(within(function, "bf16"), made, x, w, times=2)
        assert set(formats_of(expected)) == {BF16}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["conv2d", "same, 2d", "residual", "linear"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_traced_weight_has_its_gradient_after_calls_without(name, form, times):
    """The first cast of a weight was made without gradients; the next call's is another."""
    model, x = built(name)
    made = FORMS[form](model, x, "bf16")
    leaves = [*made.parameters()] if "converted" in form else [*model.parameters()]
    expected = outcome(within(model, "bf16"), x, leaves=[*model.parameters()])
    for _ in range(times):
        outcome(made, x, gradients=False)
    assert not differences(expected, outcome(made, x, leaves=leaves))


# -- what a trace cannot do


class Own(torch.autograd.Function):
    """A product."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x.mm(w)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient.mm(w.T.to(gradient.dtype)), x.T.to(gradient.dtype).mm(gradient)


class OwnFloat(Own):
    """It converts by itself, whatever region is open."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.float() * 2).to(x.dtype)


class InFloat(Own):
    """Its results have few bits that differ outside of the region, its gradients many."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return gradient * 2, x.T.mm(gradient)


class Calling(nn.Module):
    """It calls one of them, on what a layer gives, or on its input."""

    def __init__(self, function, has_layer):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(8, 8))
        self.layer = nn.Linear(8, 8) if has_layer else nn.Identity()

    def forward(self, x):
        return self.function.apply(self.layer(x), self.weight)


@pytest.mark.parametrize("has_layer", [False, True])
@pytest.mark.parametrize("check_trace", [False, True])
def test_a_trace_refuses_a_function_that_it_would_call_outside_of_the_region(has_layer, check_trace):
    """It computed in fp32, or raised for mixed formats, as a trace calls an autograd.Function in Python."""
    x = torch.randn(4, 8)
    with pytest.raises(ScriptError, match=r"a trace calls Own in Python, where no region") as caught:
        nc.trace(Calling(Own, has_layer), (x,), under="bf16", check_trace=check_trace)
    assert caught.value.where[0].file == __file__ and "narrowcast.compile" in caught.value.advice
    if has_layer:
        with pytest.raises(ScriptError, match=r"a trace calls InFloat in Python"):
            nc.trace(Calling(InFloat, has_layer), (x,), under="bf16", check_trace=check_trace)
    model = Calling(OwnFloat, has_layer)
    with nc.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(x)
    made = nc.trace(model, (x,), under="bf16", check_trace=check_trace)
    with torch.no_grad():
        assert torch.equal(made(x), expected)


class InPlace(torch.autograd.Function):
    """It writes to its argument."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class WithoutBackward(Own):
    """Its gradients are never asked for."""

    @staticmethod
    def forward(ctx, x, w):
        return torch.rand_like(x) + x

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


def test_functions_that_a_trace_can_call_are_told_from_those_that_it_cannot():
    """One that draws random numbers and has no backward is traced; one that writes in place raised as it ran."""
    x = torch.randn(4, 8)
    with pytest.raises(ScriptError, match="InPlace writes to an argument"):
        nc.trace(Calling(InPlace, True), (x,), under="bf16", check_trace=False)
    model = Calling(WithoutBackward, True)
    made = nc.trace(model, (x,), under="bf16")
    with torch.no_grad():
        torch.manual_seed(0)
        with nc.autocast("cpu", torch.bfloat16):
            expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(made(x), expected)


def test_looking_for_such_a_function_updates_no_running_statistics():
    """Nobody asked for a check, which runs the module again."""
    model, x = nn.Sequential(nn.BatchNorm1d(8), Calling(OwnFloat, False)), torch.randn(4, 8) + 3
    nc.trace(model, (x,), under="bf16", check_trace=False)
    assert model[0].num_batches_tracked == 1 and torch.allclose(model[0].running_mean, 0.1 * x.mean(0))


def test_a_script_is_no_code_to_trace():
    """torch returns it as it is: it lost the region, and a disabled one was written into the caller's script."""
    x, made = torch.randn(2, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    code = made.code
    with pytest.raises(ScriptError, match="it is a script already") as caught:
        nc.trace(made, (x,), under="bf16")
    assert "nc.script(it, under=...)" in caught.value.advice and made.code == code


def test_what_has_no_inputs_or_no_name_is_refused():
    """torch's own errors name neither."""
    layer = nn.Linear(8, 8)
    with pytest.raises(ScriptError, match=r"trace\(Linear\): no inputs"):
        nc.trace(layer, under="bf16")
    for target in (layer.forward, functools.partial(torch.add, torch.ones(2))):
        with pytest.raises(ScriptError, match="to which TorchScript cannot give a name"):
            nc.trace(target, (torch.ones(2, 8),), under="bf16")


def test_arguments_by_keyword_are_given_as_torch_s_trace_takes_them():
    """In example_kwarg_inputs, or as inputs=((), {...})."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    made = nc.trace(layer, example_kwarg_inputs={"input": x}, under="bf16")
    assert made(x).dtype == torch.bfloat16


class Inner(nn.Module):
    """A loop, which a trace unrolls and a script keeps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, times: int):
        for _ in range(times):
            x = self.layer(x)
        return x


class Outer(nn.Module):
    """It calls that, or a script of it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, 2)


def test_rules_about_modules_of_a_script_that_a_trace_calls_hold_or_are_said_not_to():
    """torch's script does not say which of its modules a call is in; ours does."""
    x, rule = torch.randn(2, 8), nc.Rule("aten.linear", "full", module="inner.layer")
    policy = nc.Policy.native().with_rules(rule)
    assert nc.trace(Outer(nc.script(Inner())), (x,), under=policy)(x).dtype == torch.float32
    with pytest.warns(nc.errors.ScriptWarning, match="rules about these hold for none of its calls"):
        nc.trace(Outer(torch.jit.script(Inner())), (x,), under=policy, check_trace=False)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])  # an LSTM in bf16 is a kernel that not every machine has
@pytest.mark.parametrize("where", [{"module_class": "LayerNorm"}, {"module": "nowhere"}, {"module": "0"}, {}])
def test_rules_that_match_elsewhere_leave_recurrent_layers_of_a_trace_as_they_are(kind, where):
    """A glob that named the op, wherever it holds, had it taken for one that a rule decides: it was fp32."""
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(6, 8, batch_first=True)), torch.randn(2, 5, 6)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.*", "full", **where))
    with torch.no_grad():
        with nc.autocast("cpu", torch.bfloat16, policy=policy):
            expected = model(x)[0]
        made = nc.trace(model, (x,), under=policy, check_trace=False)(x)[0]
    is_low = bool({"nowhere", "LayerNorm"} & {*where.values()}) and kind is not nn.GRU  # on the CPU it is in fp32
    assert made.dtype == expected.dtype == (torch.bfloat16 if is_low else torch.float32)
    assert torch.equal(made, expected)


# -- nothing is left out


def unaccounted(original, held, not_here):
    """What is neither tested nor has a reason, what is both, and what the original does not have."""
    return {
        "missing": [name for name in original if name not in held and name not in not_here],
        "both": [name for name in held if name in not_here],
        "unknown": [name for name in (*held, *not_here) if name not in original],
        "twice": sorted({name for name in original if original.count(name) > 1}),
    }


def test_every_case_of_the_original_is_here_or_has_a_reason():
    """The numbers are those of its two classes."""
    assert (len(TEST_AUTOCAST), len(TEST_JIT_TRACE_AUTOCAST)) == (46, 8)
    assert not any(unaccounted(ORIGINAL, HELD, NOT_HERE).values()), unaccounted(ORIGINAL, HELD, NOT_HERE)
    assert all(callable(globals()[test]) and test.startswith("test_") for test in HELD.values())
    assert all(reason for reason in NOT_HERE.values())


def test_a_case_that_is_left_out_is_noticed():
    """One that is missing, one with both a test and a reason, one that nobody knows, one listed twice."""
    found = unaccounted(["a", "b", "c", "c"], {"b": "test_b", "x": "test_x"}, {"b": "no cuda", "c": "no cuda"})
    assert found == {"missing": ["a"], "both": ["b"], "unknown": ["x"], "twice": ["c"]}
