"""The most bytes that a program holds at once, against programs whose memory is counted by hand."""

import sys
from pathlib import Path

import pytest

from narrowcast.programs.placement.memory import KeptBytes
from narrowcast.programs.placement.peak import Lives
from narrowcast.runtime.devices.signature import Workspaces

sys.path.insert(0, str(Path(__file__).parent))
from program_text import parse_program

HEAD = "program p\nregion 0: cpu bf16 enabled cached session 0 policy native\n"
KIB = 1024


def peak(block, fused=False, beside=None):
    """Of a program whose matrix products are a library's."""
    program = parse_program(HEAD + block)
    fuses = lambda s: fused and ".mm." not in s.op
    found = Lives(program.body, KeptBytes(fused), fuses, beside or {}, lambda v: v.bytes).peak()
    return found.bytes / KIB, found


CHAIN = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: fp32[64, 64] cpu = aten.relu.default(self=%1) computes in 0
  %3: bf16[64, 64] cpu = cast(self=%2)
  %4: bf16[64, 64] cpu = aten.relu.default(self=%3) computes in 0
  return %4
}
"""


def test_memory_lives_until_its_last_reader():
    """Two fp32 values at once, and never three; what the caller gave is not counted."""
    size, found = peak(CHAIN)
    assert (size, found.kept, found.op, found.in_backward) == (32, 0, "aten.relu.default", False)


def test_what_a_kernel_takes_beside_counts_where_it_runs():
    """At its own call alone."""
    assert peak(CHAIN, beside={4: (100 * KIB, 0)})[0] == 8 + 8 + 100
    size, found = peak(CHAIN, beside={4: (10 * KIB, 0)})
    assert (size, found.workspace) == (32, 0)


def test_values_inside_a_loop_are_in_no_memory():
    """Fused, only the result is written."""
    assert peak(CHAIN, fused=True)[0] == 8


def test_views_share_memory():
    """A view takes nothing, and what it shows lives as long as it is read."""
    block = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: fp32[4096] cpu = aten.view.default(self=%1) ~0
  %3: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %4: fp32[4096] cpu = aten.relu.default(self=%2) computes in 0
  return %3, %4
}
"""
    assert peak(block)[0] == 48
    given = "  %1: fp32[4096] cpu = aten.view.default(self=%0) ~0\n  return %1\n"
    assert peak(f"block main(%0: fp32[64, 64] cpu) {{\n{given}}}\n")[0] == 0


TRAINED = """block main(%0: fp32[64, 64] cpu, %1: fp32[64, 64] cpu grad weight) {
  %5: bf16[64, 64] cpu = cast(self=%0)
  %6: bf16[64, 64] cpu grad = cast(self=%1)
  %2: bf16[64, 64] cpu grad = aten.mm.default(self=%5, mat2=%6) computes in 0
  %3: bf16[64, 64] cpu grad = aten.mm.default(self=%2, mat2=%6) computes in 0
  return %3
}
"""


def test_what_products_read_is_kept_for_their_backward():
    """Both casts and the first product; the backward holds gradients beside what is still kept."""
    size, found = peak(TRAINED)
    assert found.kept == 3 * 8 * KIB
    # in the second product's backward these are still there, beside the gradients of its result and of what it reads
    assert found.in_backward and size == 24 + 8 + 2 * 8


def test_a_backward_takes_memory_of_its_own():
    """Beside what is kept and the gradients that flow."""
    assert peak(TRAINED, beside={3: (0, 4 * KIB)})[0] == 52
    quiet = TRAINED.replace(" grad", "").replace(" weight", "")
    assert peak(quiet, beside={3: (0, 100 * KIB)})[0] == peak(quiet)[0]


def test_what_is_kept_is_there_to_the_end_of_the_forward():
    """Beside the last product's result and workspace, long after it was read last."""
    assert peak(TRAINED, beside={3: (100 * KIB, 0)})[0] == 3 * 8 + 8 + 100


def test_gradients_flow_where_a_value_has_one():
    """From its last reader, also where it has a view without one; those of what the caller gave stay."""
    block = """block main(%0: fp32[64, 64] cpu grad, %1: fp32[64, 64] cpu grad, %2: fp32[64, 64] cpu) {
  %3: fp32[64, 64] cpu = aten.relu.default(self=%2) computes in 0
  %4: fp32[64, 64] cpu grad = aten.add.Tensor(self=%0, other=%3) computes in 0
  %5: fp32[64, 64] cpu = aten.detach.default(self=%4) ~0
  %6: fp32[64, 64] cpu grad = aten.add.Tensor(self=%4, other=%1) computes in 0
  return %6, %5
}
"""
    size, found = peak(block, beside={4: (0, 100 * KIB)})
    assert (size, found.in_backward) == (16 + 2 * 16 + 100, True)  # of its result, and of the two that came


def test_without_gradients_nothing_is_kept():
    """The same program where nobody asks for gradients."""
    size, found = peak(TRAINED.replace(" grad", "").replace(" weight", ""))
    assert found.kept == 0 and size == 8 * 4 - 8


@pytest.mark.parametrize(
    ("op", "x", "weight", "result", "emulated", "wanted"),
    [
        # measured with torch's profiler on an AVX2 cpu, torch 2.13
        ("aten.conv2d.default", (4, 32, 32, 32), (32, 32, 3, 3), (4, 32, 32, 32), True, 2359296),
        ("aten.conv2d.default", (4, 32, 32, 32), (32, 32, 1, 1), (4, 32, 32, 32), True, 0),
        ("aten.conv1d.default", (4, 32, 256), (32, 32, 3), (4, 32, 254), True, 195072),
        ("aten.conv3d.default", (1, 8, 16, 16, 16), (8, 8, 3, 3, 3), (1, 8, 14, 14, 14), True, 1185408),
        ("aten.conv_transpose2d.input", (4, 32, 32, 32), (32, 32, 3, 3), (4, 32, 34, 34), True, 2359296),
        ("aten.conv2d.default", (4, 32, 32, 32), (32, 32, 3, 3), (4, 32, 32, 32), False, 280576),
        ("aten.mm.default", (64, 64), (64, 64), (64, 64), True, 0),
    ],
)
def test_convolutions_without_units_unfold_what_comes(op, x, weight, result, emulated, wanted):
    """The columns of one convolution, as torch allocates them."""
    shapes = [", ".join(map(str, shape)) for shape in (x, weight, result)]
    program = parse_program(
        f"{HEAD}block main(%0: bf16[{shapes[0]}] cpu, %1: bf16[{shapes[1]}] cpu) {{\n"
        f"  %2: bf16[{shapes[2]}] cpu = {op}(self=%0, weight=%1) computes in 0\n  return %2\n}}\n"
    )
    step = program.steps[2]
    operands = [program.values[o.value] for o in step.operands]
    slow = {"bf16": frozenset(["conv", "gemm"])} if emulated else {}
    assert Workspaces(slow, {})(step, operands)[0] == wanted


def test_memory_is_freed_after_the_last_step_that_knows_it():
    """Returned values live to the end; tuples and what is no tensor take nothing."""
    block = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: tuple = lib.op.default(self=%1) computes in 0
  %3: bf16[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %4: bf16[64, 64] cpu = aten.relu.default(self=%3) computes in 0
  %5: bf16[64, 64] cpu = aten.relu.default(self=%4) computes in 0
  return %5
}
"""
    assert peak(block)[0] == 16
    assert peak(block.replace("return %5", "return %5, %1"))[0] == 32
    assert peak(block.replace("return %5", "return %5, %3"))[0] == 24
    assert peak(block.replace("return %5", "return %0"))[0] == 16


def test_a_view_that_is_larger_takes_its_size():
    """What shares memory is as large as the largest of it, wherever it is made."""
    block = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[32, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: fp32[64, 64] cpu = lib.grown.default(self=%1) ~0
  %3: fp32[16, 64] cpu = lib.shrunk.default(self=%2) ~0
  return %3
}
"""
    assert peak(block)[0] == 16


BODY = """block main(%0: fp32[64, 64] cpu, %1: i64 cpu) {
  %2: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %3: fp32[64, 64] cpu = prim.Loop(a=%1)
    block body(%4: fp32[64, 64] cpu) {
      %5: fp32[64, 64] cpu = aten.relu.default(self=%4) computes in 0
      %6: fp32[64, 64] cpu = aten.relu.default(self=%5) computes in 0
      %7: fp32[64, 64] cpu = aten.relu.default(self=%6) computes in 0
      return %7
    }
    block small() {
      return %2
    }
  return %3, %2
}
"""


def test_what_a_body_takes_is_taken_while_its_step_runs():
    """The largest of several bodies, beside what lives around them."""
    size, found = peak(BODY)
    assert (size, found.op) == (16 + 16 + 32, "prim.Loop")
    assert peak(BODY, beside={6: (KIB, 0)})[0] == 65 and peak(BODY, beside={3: (KIB, 0)})[0] == 65
    assert peak(BODY, beside={2: (KIB, 0)})[0] == 64


def test_a_backward_has_gradients_only_where_they_flow():
    """Of values that have one, and of what the caller gave, which stay; and it needs one step that records."""
    quiet = TRAINED.replace("in 0", "nograd in 0").replace("cast(self=%1)", "cast(self=%1) nograd")
    assert not peak(quiet)[1].in_backward and peak(quiet)[1].kept == 0
    size, found = peak(TRAINED, beside={2: (0, 100 * KIB)})
    assert found.in_backward and found.op == "aten.mm.default" and found.workspace == 100 * KIB
    assert size > 100 and found.kept == 24 * KIB


def test_an_empty_program_takes_nothing():
    """There is no call at which it would."""
    size, found = peak("block main(%0: fp32[64, 64] cpu) {\n  return %0\n}\n")
    assert (size, found.workspace, found.kept, found.op) == (0, 0, 0, "")


def test_the_first_of_equal_peaks_is_named():
    """Later ones are no higher."""
    block = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[64, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: fp32[64, 64] cpu = aten.exp.default(self=%0) computes in 0
  return %0
}
"""
    assert peak(block)[1].op == "aten.relu.default"


def test_fused_values_that_a_library_reads_are_in_memory():
    """So are those that are kept, and returned; a value that nobody reads is in none."""
    block = """block main(%0: fp32[64, 64] cpu{g}) {{
  %1: fp32[64, 64] cpu{g} = aten.gelu.default(self=%0) computes in 0
  %2: fp32[64, 64] cpu{g} = aten.mm.default(self=%1, mat2=%1) computes in 0
  %3: fp32[64, 64] cpu{g} = aten.gelu.default(self=%2) computes in 0
  %4: fp32[64, 64] cpu{g} = aten.gelu.default(self=%2) computes in 0
  return %4
}}
"""
    assert peak(block.format(g=""), fused=True)[0] == 32
    assert peak(block.format(g="").replace("return %4", "return %1"), fused=True)[0] == 32
    assert peak(block.format(g=" grad"), fused=True)[1].kept == 16 * KIB


def test_what_the_caller_gave_gets_its_gradient_when_its_last_reader_s_backward_runs():
    """And that stays to the end; what nobody reads gets none."""
    block = """block main(%0: fp32[64, 64] cpu grad, %1: fp32[64, 64] cpu grad, %2: fp32[64, 64] cpu) {
  %3: fp32[64, 64] cpu grad = aten.add.Tensor(self=%0, other=%2) computes in 0
  %4: fp32[64, 64] cpu grad = aten.add.Tensor(self=%3, other=%0) computes in 0
  return %4
}
"""
    size, found = peak(block)
    # in the first addition's backward: its result's gradient, and that of the one that the caller gave
    assert (size, found.kept) == (48, 0) and found.in_backward
    assert peak(block.replace("other=%0", "other=%1"))[0] == 48


def test_a_value_without_elements_takes_nothing():
    """Nor does one whose size is text."""
    block = """block main(%0: fp32[64, 64] cpu) {
  %1: fp32[0, 64] cpu = aten.relu.default(self=%0) computes in 0
  %2: fp32["n", 64] cpu = aten.relu.default(self=%0) computes in 0
  return %1, %2
}
"""
    assert peak(block)[0] == 0
